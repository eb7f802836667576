"""Sums the slices of all stalls into causes: which call of which process, of which class, cost how much, and how it grows."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from redline.lab.traces.blame import Slice, Walker
from redline.lab.traces.names import HOST_WORK, class_of, normal, sends, size_in, waits
from redline.lab.traces.stalls import Lost, Stall
from redline.lab.traces.timeline import Kind

UNRECORDED = "unrecorded"
"""The class of time in which the thread that mattered recorded nothing."""
ON_DEVICE = "device"
"""The class of time after the launch: the work was asked for, and the device had not begun."""
LARGE = 0.25
"""Share of a stall from which on a range without a class is worth naming."""
FEWEST_FOR_GROWTH = 6
EXPLAINS = 0.5
"""Share of the variance from which on a fit says something."""


@dataclass(slots=True, frozen=True)
class Growth:
    """How the time of a call grows."""

    by: str
    """"size" where the capture carries sizes, "time" where calls only grow longer as the capture goes on."""
    explained: float
    """Share of the variance that a straight line explains."""
    first_s: float
    """Seconds of a call at the smallest size, or at the beginning, by the line."""
    last_s: float
    points: tuple[tuple[float, float], ...]
    """Size or second of the capture, and seconds lost: what a page draws."""


@dataclass(slots=True)
class Cause:
    """One call that engines waited for."""

    process: int
    """Where it ran."""
    kind: str
    """The class: serialisation, scheduling, ipc, tokenisation, gil, copy, synchronisation, …"""
    call: str
    """Its name; empty where nothing was recorded."""
    path: tuple[str, ...]
    """The names of the ranges around it, outermost first."""
    lost: int
    """Nanoseconds of stalls."""
    stalls: list[Stall]
    late: Counter[int]
    """Process → stalls of this cause that ended with its launch."""
    hops: int
    """Messages between the call and the late launch, most of the time."""
    growth: Growth | None = None
    basis: str = ""
    """Why it has its class, where the name alone does not say."""


@dataclass(slots=True)
class _Sum:
    """What is known of a cause while slices are added."""

    lost: Counter[int] = field(default_factory=Counter)
    """Place of the stall → nanoseconds."""
    paths: Counter[tuple[str, ...]] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    hops: Counter[int] = field(default_factory=Counter)
    rows: dict[int, int] = field(default_factory=dict)
    """Place of the stall → the row of the call in it."""
    threads: set[int] = field(default_factory=set)


def causes(walker: Walker, lost: Lost) -> list[Cause]:
    """Return what the stalls of an engine are due to, the most time first. They add up to the stalls."""
    sums: defaultdict[tuple[int, str, str], _Sum] = defaultdict(_Sum)
    for place, stall in enumerate(lost.stalls):
        until = min(stall.end, max(stall.start, stall.launched)) if stall.launched >= 0 else stall.end
        for piece in walker.slices(stall.thread, stall.start, until):
            _add(walker, sums, piece, place, stall)
        if until < stall.end:
            _sum(sums, (stall.process, ON_DEVICE, ""), place, stall.end - until)
    found = [_cause(walker, key, total, lost) for key, total in sums.items()]
    return sorted(found, key=lambda cause: -cause.lost)


def _sum(sums: defaultdict[tuple[int, str, str], _Sum], key: tuple[int, str, str], place: int, ns: int) -> _Sum:
    found = sums[key]
    found.lost[place] += ns
    return found


def _add(walker: Walker, sums: defaultdict, piece: Slice, place: int, stall: Stall) -> None:
    """Count a slice for the call that it belongs to."""
    length = piece.end - piece.start
    if piece.row < 0:
        process = walker.timeline.threads[piece.thread].process if piece.thread >= 0 else stall.process
        _sum(sums, (process, UNRECORDED, ""), place, length)
        return
    view = walker.view(piece.thread)
    chain = [int(view.rows[p]) for p in view.chain(int(np.searchsorted(view.rows, piece.row)))]
    kind, at = _named(walker, chain, stall)
    names = [walker.name(row) for row in chain]
    found = _sum(sums, (walker.timeline.threads[piece.thread].process, kind, normal(names[at])), place, length)
    found.paths[tuple(names[:at])] += length
    found.calls[names[at]] += length
    found.hops[piece.hops] += length
    found.rows[place] = chain[at]
    found.threads.add(piece.thread)


def _named(walker: Walker, chain: list[int], stall: Stall) -> tuple[str, int]:
    """Return the class of the innermost range that has one, and its place; else the innermost one that is large."""
    for at in range(len(chain) - 1, -1, -1):
        if found := class_of(walker.name(chain[at])):
            return found, at
    ranges = walker.timeline.ranges
    large = [at for at, row in enumerate(chain) if ranges.end[row] - ranges.start[row] >= LARGE * stall.length]
    return HOST_WORK, large[-1] if large else 0


def _cause(walker: Walker, key: tuple[int, str, str], total: _Sum, lost: Lost) -> Cause:
    process, kind, _ = key
    stalls = [lost.stalls[place] for place in total.lost]
    call = total.calls.most_common(1)[0][0] if total.calls else ""
    path = total.paths.most_common(1)[0][0] if total.paths else ()
    hops = total.hops.most_common(1)[0][0] if total.hops else 0
    late = Counter(stall.process for stall in stalls)
    found = Cause(process, kind, call, path, sum(total.lost.values()), stalls, late, hops)
    found.growth = _growth(walker, total, lost)
    if kind == "ipc":
        _tell_from_serialisation(walker, found, total)
    return found


def _tell_from_serialisation(walker: Walker, cause: Cause, total: _Sum) -> None:
    """A call that takes longer the larger its object is, or that computes instead of waiting, turns the object into bytes."""
    if waits(cause.call):
        cause.basis = "it waits for a message, and no call that sent it was recorded"
    if waits(cause.call) or not sends(cause.call):
        return
    ranges = walker.timeline.ranges
    system = any((ranges.kind[walker.view(thread).rows] == Kind.SYSTEM).any() for thread in total.threads)
    grows = cause.growth is not None and cause.growth.last_s > 1.5 * cause.growth.first_s
    if grows:
        cause.kind, cause.basis = (
            "serialisation",
            "the call takes longer the larger its object is; a message within a machine hardly does",
        )
    elif system:
        cause.kind, cause.basis = "serialisation", "the thread computes inside the call, and is in no call of the system"
    else:
        cause.basis = "it sends; whether the transport or the serialisation takes the time, the capture does not tell"


def _growth(walker: Walker, total: _Sum, lost: Lost) -> Growth | None:
    """Fit a line through the time lost per stall, over sizes where the capture has them, else over the time of the capture."""
    places = sorted(total.rows)
    if len(places) < FEWEST_FOR_GROWTH:
        return None
    seconds = np.array([total.lost[place] for place in places]) / 1e9
    sizes = np.array([_size(walker, total.rows[place]) for place in places])
    has_sizes = bool(np.isfinite(sizes).all() and np.ptp(sizes) > 0)
    x = sizes if has_sizes else np.array([lost.stalls[place].start for place in places]) / 1e9
    if np.ptp(x) == 0 or np.ptp(seconds) == 0:
        return None
    slope, offset = np.polyfit(x, seconds, 1)
    explained = float(np.corrcoef(x, seconds)[0, 1] ** 2)
    if slope <= 0 or explained < EXPLAINS:
        return None
    low, high = (max(0.0, float(offset + slope * edge)) for edge in (x.min(), x.max()))
    points = tuple(zip(x.tolist(), seconds.tolist(), strict=True))
    return Growth("size" if has_sizes else "time", explained, low, high, points[:: max(1, len(points) // 400)])


def _size(walker: Walker, row: int) -> float:
    """Return what a call is about: its own size, batch × length in a name around it, or the largest size inside or beside."""
    timeline = walker.timeline
    view = walker.view(int(timeline.ranges.thread[row]))
    chain = view.chain(int(np.searchsorted(view.rows, row)))[::-1]
    for place in chain:
        own, named = timeline.ranges.size[view.rows[place]], size_in(walker.name(int(view.rows[place])))
        if np.isfinite(own) or named is not None:
            return float(own) if np.isfinite(own) else float(named or 0)
    for place in chain[:2]:  # inside the call, then beside it: an object is sent by the call after the one that packs it
        first, last = np.searchsorted(view.start, (view.start[place], view.end[place]))
        inside = timeline.ranges.size[view.rows[first:last]]
        if np.isfinite(inside).any():
            return float(np.nanmax(inside))
    return float("nan")
