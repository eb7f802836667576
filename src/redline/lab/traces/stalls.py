"""Finds when an engine did nothing useful, and which launch ended that: the late one.

A device is useful while it has work, except while a collective or a replay of it waits for the rank that began last. An engine
stalls while none of its devices is useful. Without device work, it stalls while a rank waits in a collective for the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from redline.lab.traces.engines import Engine
from redline.lab.traces.intervals import Intervals, any_of
from redline.lab.traces.names import is_graph_launch
from redline.lab.traces.timeline import Kind, Timeline

SHORT_NS = 20_000
"""Pauses of a device that are shorter are launch overhead, and are only summed."""
ISLAND = 0.25
"""Share of a stall that other ranks may work in, on what then waits for the late one."""
SHORT_WAIT_NS = 100_000
"""The same for ranks that wait for each other on the CPU."""
LATE_NS = 100_000
"""A replay that begins so much later than on the first rank is late."""


@dataclass(slots=True, frozen=True)
class Stall:
    """A stretch in which an engine did nothing useful."""

    start: int
    end: int
    process: int
    """Whose work ended it: the late one."""
    thread: int
    """The thread that launched that work; −1 where the capture does not tell."""
    launched: int
    """When the call that launched it was over; −1 where the capture does not tell."""

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(slots=True, frozen=True)
class RankTime:
    """What one device of one rank did, in nanoseconds of the engine's window."""

    process: int
    device: int
    """−1 for a rank without one."""
    busy: int
    waiting: int
    """Part of `busy` in which it did nothing but wait for other ranks."""
    idle: int
    replays: int
    """CUDA graphs that it launched."""
    late: int
    """Replays that began later than on the first rank."""
    late_by: int
    """Median of how much later those began."""


@dataclass(slots=True, frozen=True)
class Lost:
    """The time of one engine."""

    engine: Engine
    start: int
    end: int
    stalls: tuple[Stall, ...]
    short: int
    """Nanoseconds in pauses too short to look at."""
    ranks: tuple[RankTime, ...]

    @property
    def total(self) -> int:
        return sum(stall.length for stall in self.stalls)

    @property
    def window(self) -> int:
        return self.end - self.start


class Launches:
    """Which call launched a piece of device work, of all processes."""

    def __init__(self, timeline: Timeline) -> None:
        ranges = timeline.ranges
        rows = np.flatnonzero((ranges.kind == Kind.RUNTIME) & (ranges.correlation >= 0))
        key = _keys(timeline.range_process[rows], ranges.correlation[rows])
        order = np.argsort(key, kind="stable")
        self._key, self._row = key[order], rows[order]

    def row(self, process: int, correlation: int) -> int:
        """Return the row of the call in `Timeline.ranges`, −1 where it was not recorded."""
        key = _keys(np.array([process]), np.array([correlation]))[0]
        place = int(np.searchsorted(self._key, key))
        return int(self._row[place]) if correlation >= 0 and place < len(self._key) and self._key[place] == key else -1


def _keys(process: np.ndarray, correlation: np.ndarray) -> np.ndarray:
    return process.astype(np.int64) << 40 | correlation


def lost(timeline: Timeline, engine: Engine, launches: Launches) -> Lost:
    """Return an engine's stalls and the time of its ranks."""
    return _on_devices(timeline, engine, launches) if engine.has_device else _on_cpus(timeline, engine)


def _on_devices(timeline: Timeline, engine: Engine, launches: Launches) -> Lost:
    start, end = _window(timeline, engine, [timeline.busy(process) for process in engine.processes])
    devices = _devices(timeline, engine)
    useful = {p: any_of([found.useful for found in devices if found.process == p]) for p in engine.processes}
    pauses = any_of(list(useful.values())).outside(start, end)
    long = (pauses.end - pauses.start) >= SHORT_NS
    rows = np.flatnonzero(np.isin(timeline.work_process, engine.processes))
    places = np.minimum(np.searchsorted(timeline.work.start[rows], pauses.end[long]), len(rows) - 1)
    stalls = [
        _stall(timeline, int(rows[place]), launches, since, until)
        for place, (since, until) in zip(places, Intervals(pauses.start[long], pauses.end[long]), strict=True)
    ]
    stalls = _joined(stalls, useful)
    replays = dict(zip(engine.processes, _replays(timeline, engine), strict=True))
    ranks = tuple(_rank(found, start, end, replays.pop(found.process, (0, np.empty(0)))) for found in devices)
    return Lost(engine, start, end, tuple(stalls), int((pauses.end - pauses.start)[~long].sum()), ranks)


def _window(timeline: Timeline, engine: Engine, busy: list[Intervals]) -> tuple[int, int]:
    """Return from when to when all ranks were recorded."""
    some = [b for b in busy if len(b)]
    start, end = max(int(b.start[0]) for b in some), min(int(b.end[-1]) for b in some)
    if start >= end:
        timeline.lacks.append(f"The ranks of engine {engine.index} were recorded at different times: they cannot be lined up.")
        return min(int(b.start[0]) for b in some), max(int(b.end[-1]) for b in some)
    return start, end


@dataclass(slots=True, frozen=True)
class _Device:
    """When one device of one process had work, and when that was more than waiting for others."""

    process: int
    device: int
    busy: Intervals
    useful: Intervals


def _devices(timeline: Timeline, engine: Engine) -> list[_Device]:
    """Return the devices of all ranks; a process without device work has one without any."""
    work, found = timeline.work, []
    devices = list(dict.fromkeys(stream.device for stream in timeline.streams))
    device_of = np.array([devices.index(stream.device) for stream in timeline.streams], np.int32)[work.stream]
    start, end = engine.meetings()
    last = np.nanmax(start, axis=1) if len(start) else np.empty(0)
    for rank, (process, joint) in enumerate(zip(engine.processes, engine.joints, strict=True)):
        mine, joins = timeline.work_process == process, np.zeros(len(work), bool)
        joins[joint.row if joint.kind != "cpu" else []] = True
        met = np.flatnonzero(engine.places[:, rank] >= 0)
        rows = joint.row[engine.places[met, rank]]
        for device in np.unique(device_of[mine]).tolist() or [-1]:
            here = mine & (device_of == device)
            meets = met[device_of[rows] == device] if joint.kind != "cpu" else met[:0]
            waits = Intervals.union(
                start[meets, rank].astype(np.int64), np.minimum(last[meets], end[meets, rank]).astype(np.int64)
            )
            others, shared = (Intervals.union(work.start[m], work.end[m]) for m in (here & ~joins, here & joins))
            index = devices[device] if device >= 0 else -1
            found.append(_Device(process, index, any_of([others, shared]), any_of([others, shared.without(waits)])))
    return found


def _stall(timeline: Timeline, row: int, launches: Launches, start: int, end: int) -> Stall:
    """Return the stall that ends when this piece of work begins."""
    work = timeline.work
    process = timeline.streams[work.stream[row]].process
    if process in timeline.clocks_apart:
        return Stall(start, end, process, -1, -1)
    call = launches.row(process, int(work.correlation[row]))
    if call < 0:
        return Stall(start, end, process, timeline.launchers.get(process, -1), -1)
    return Stall(start, end, process, int(timeline.ranges.thread[call]), int(timeline.ranges.end[call]))


def _joined(stalls: list[Stall], useful: dict[int, Intervals]) -> list[Stall]:
    """Join stalls between which only ranks worked that then waited for the late one: it had nothing to do since the first."""
    found: list[Stall] = []
    for stall in stalls:
        start, islands = stall.start, 0
        while found:
            before = found[-1]
            islands += start - before.end
            own = useful[stall.process].has_any(before.end, start)
            if own or islands > ISLAND * (stall.end - before.start):
                break
            start = found.pop().start
        found.append(replace(stall, start=start))
    return found


def _rank(found: _Device, start: int, end: int, replay: tuple[int, np.ndarray]) -> RankTime:
    count, late = replay
    late = late[late > LATE_NS]
    busy, useful = found.busy.clipped(start, end).total, found.useful.clipped(start, end).total
    late_by = int(np.median(late)) if len(late) else 0
    return RankTime(found.process, found.device, busy, busy - useful, end - start - busy, count, len(late), late_by)


def _replays(timeline: Timeline, engine: Engine) -> list[tuple[int, np.ndarray]]:
    """Line up graph replays: for each rank how many it launched, and by how much each began after the first rank."""
    graph = timeline.named(is_graph_launch)[timeline.ranges.name] if len(timeline.ranges) else np.empty(0, bool)
    spans = [_spans(timeline, process, graph) for process in engine.processes]
    most = max(range(len(spans)), key=lambda r: len(spans[r][0]))
    start, end = spans[most]
    begun = np.full((len(start), len(spans)), np.nan)
    for rank, (other_start, other_end) in enumerate(spans):
        if len(other_start) and len(start):  # replays of one step overlap, since their collectives need each other
            place = np.clip(np.searchsorted(other_end, (start + end) // 2), 0, len(other_end) - 1)
            overlap = (other_start[place] < end) & (other_end[place] > start)
            begun[overlap, rank] = other_start[place][overlap]
    aligned = (~np.isnan(begun)).sum(axis=1) > 1
    first = np.nanmin(begun[aligned], axis=1) if aligned.any() else np.empty(0)
    after = [begun[aligned, rank] - first for rank in range(len(spans))]
    return [(len(span[0]), late[~np.isnan(late)]) for span, late in zip(spans, after, strict=True)]


def _spans(timeline: Timeline, process: int, graph: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return when each graph replay of a process ran on the device, whether recorded whole or node by node."""
    ranges, work = timeline.ranges, timeline.work
    launched = np.unique(ranges.correlation[graph & (timeline.range_process == process)]) if len(ranges) else np.empty(0)
    rows = np.flatnonzero((timeline.work_process == process) & np.isin(work.correlation, launched))
    rows = rows[np.argsort(work.correlation[rows], kind="stable")]
    if not len(rows):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    first = np.flatnonzero(np.concatenate(([True], np.diff(work.correlation[rows]) != 0)))
    start, end = np.minimum.reduceat(work.start[rows], first), np.maximum.reduceat(work.end[rows], first)
    order = np.argsort(end, kind="stable")
    return start[order], end[order]


def _on_cpus(timeline: Timeline, engine: Engine) -> Lost:
    """Without device work: a stall lasts from the first rank's arrival at a collective to the last one's.

    Collectives may overlap: a moment counts once, for the one that began first.
    """
    arrival, _ = engine.meetings()
    if not len(arrival):
        return Lost(engine, 0, 0, (), 0, ())
    ranges, owner = timeline.ranges, timeline.range_process
    low, high = _window(
        timeline, engine, [Intervals.union(ranges.start[owner == p], ranges.end[owner == p]) for p in engine.processes]
    )
    stalls, short, covered = [], 0, low
    first, last = np.nanmin(arrival, axis=1), np.nanargmax(arrival, axis=1)
    for event in np.argsort(first, kind="stable").tolist():
        rank = int(last[event])
        since, until = max(int(first[event]), covered), min(int(arrival[event, rank]), high)
        covered = max(covered, until)
        if until - since < SHORT_WAIT_NS:
            short += max(0, until - since)
            continue
        row = engine.joints[rank].row[engine.places[event, rank]]
        stalls.append(Stall(since, until, engine.processes[rank], int(ranges.thread[row]), until))
    ranks = tuple(
        RankTime(process, -1, 0, _waited(arrival, r).clipped(low, high).total, 0, 0, 0, 0)
        for r, process in enumerate(engine.processes)
    )
    return Lost(engine, low, high, tuple(stalls), short, ranks)


def _waited(arrival: np.ndarray, rank: int) -> Intervals:
    """Return when a rank waited for the last one in some collective."""
    there = ~np.isnan(arrival[:, rank])
    return Intervals.union(arrival[there, rank].astype(np.int64), np.nanmax(arrival[there], axis=1).astype(np.int64))
