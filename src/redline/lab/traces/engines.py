"""Groups processes into engines: those whose collectives, or whose graph replays, end together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redline.lab.traces.matching import TOLERANCE_NS, Joint, Match, joints, match
from redline.lab.traces.timeline import Timeline

TOGETHER = 0.6
"""Score of a match from which on two processes belong to one engine."""


@dataclass(slots=True, frozen=True)
class Engine:
    """Processes that compute together, tensor-parallel ranks most of the time; or one process alone."""

    index: int
    processes: tuple[int, ...]
    """Into `Timeline.processes`, by rank."""
    joints: tuple[Joint, ...]
    """What each process does with the others."""
    places: np.ndarray
    """int64, events × processes: the place of each common event in `joints`, −1 where a process has not recorded it."""
    has_device: bool

    def meetings(self) -> tuple[np.ndarray, np.ndarray]:
        """Return starts and ends of the common events, events × processes; NaN where a process has not recorded one."""
        start, end = (np.full(self.places.shape, np.nan) for _ in range(2))
        for column, joint in enumerate(self.joints):
            there = self.places[:, column] >= 0
            start[there, column] = joint.start[self.places[there, column]]
            end[there, column] = joint.end[self.places[there, column]]
        return start, end


def engines(timeline: Timeline) -> list[Engine]:
    """Return the engines of a capture, the one with the most processes first. Moves clocks that are apart, and says so."""
    found = joints(timeline)
    active = [p for p in range(len(timeline.processes)) if len(found[p]) or _has_device(timeline, p)]
    groups: list[list[int]] = []
    matches: dict[tuple[int, int], Match] = {}
    for process in active:
        for group in groups:
            one_clock = timeline.processes[group[0]].source == timeline.processes[process].source
            matched = match(found[group[0]], found[process], one_clock=one_clock)
            if matched.score >= TOGETHER:
                matches[group[0], process] = matched
                group.append(process)
                break
        else:
            groups.append([process])
    if moved := {process: -matched.offset_ns for (_, process), matched in matches.items() if matched.offset_ns}:
        timeline.shift(moved)
        for (first, process), matched in matches.items():
            if matched.offset_ns:
                timeline.lacks.append(_moved(timeline, first, process, matched, TOLERANCE_NS[found[first].kind]))
        found = joints(timeline)
    groups = _by_world(timeline, groups)
    groups.sort(key=lambda group: (-len(group), group[0]))
    return [_engine(timeline, index, group, found, matches) for index, group in enumerate(groups)]


def _has_device(timeline: Timeline, process: int) -> bool:
    return bool(len(timeline.work)) and bool((timeline.work_process == process).any())


def _by_world(timeline: Timeline, groups: list[list[int]]) -> list[list[int]]:
    """Join processes that stayed alone and say that they are ranks of one job; that is their word, and is said."""
    alone = [group[0] for group in groups if len(group) == 1 and (timeline.processes[group[0]].world or 1) > 1]
    ranks = [timeline.processes[process].rank for process in alone]
    worlds = {timeline.processes[process].world for process in alone}
    if len(alone) < 2 or len(set(ranks)) != len(ranks) or len(worlds) != 1:
        return groups
    timeline.lacks.append("No collectives show which processes belong together; their ranks say so.")
    return [group for group in groups if group[0] not in alone] + [alone]


def _engine(
    timeline: Timeline, index: int, group: list[int], found: list[Joint], matches: dict[tuple[int, int], Match]
) -> Engine:
    first = group[0]
    order = sorted(group, key=lambda p: (timeline.processes[p].rank is None, timeline.processes[p].rank or 0, p))
    places = np.full((len(found[first]), len(order)), -1, np.int64)
    for column, process in enumerate(order):
        if process == first:
            places[:, column] = np.arange(len(found[first]))
        elif matched := matches.get((first, process)):
            places[matched.first, column] = matched.second
    places = places[(places >= 0).sum(axis=1) > 1]
    has_device = any(_has_device(timeline, process) for process in group)
    return Engine(index, tuple(order), tuple(found[p] for p in order), places, has_device)


def _moved(timeline: Timeline, first: int, process: int, matched: Match, within_ns: int) -> str:
    """Say that a process was moved to the clock of another, by the ends of what they did together."""
    ahead = "ahead of" if matched.offset_ns > 0 else "behind"
    a, b = (timeline.processes[p].label for p in (process, first))
    return (
        f"The clock of {a} is {abs(matched.offset_ns) / 1e6:.1f} ms {ahead} that of {b}, by the ends of {len(matched.first):,} "
        f"common events; its times were corrected, to within {within_ns / 1e3:.0f} µs."
    )
