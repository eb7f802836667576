"""Groups in memory, for runs that keep no trajectories: a `GroupStore` that ends with the process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redline.buffer.group_store import GroupInfo, GroupState
from redline.types import TrajectoryGroup


@dataclass(slots=True)
class _Entry:
    state: GroupState
    version: int
    """At which it came into its state."""
    group: TrajectoryGroup | None = None
    info: GroupInfo | None = None
    """Both from `add` on."""
    reason: str = ""
    """Why it was dropped."""


class MemoryStore:
    """Implements `GroupStore`."""

    def __init__(self, horizon: int | None = None) -> None:
        """What was trained or dropped more than `horizon` versions ago is let go, and only counted; None keeps everything, so
        that `resume` may go back as far as it likes."""
        self._entries: dict[int, _Entry] = {}
        self._let_go: Counter[GroupState] = Counter()
        self._dropped_and_gone: Counter[str] = Counter()
        self._horizon = horizon
        self._version = 0
        self._next_number = 0

    @property
    def next_number(self) -> int:
        return self._next_number

    @property
    def counts(self) -> Mapping[str, int]:
        found = Counter(entry.state for entry in self._entries.values()) + self._let_go
        return {state: found[state] for state in GroupState}

    @property
    def dropped(self) -> Mapping[str, int]:
        there = Counter(entry.reason for entry in self._entries.values() if entry.state is GroupState.DROPPED)
        return there + self._dropped_and_gone

    def fate(self, number: int) -> tuple[GroupState, str]:
        """The state of a group that was not let go, and why it was dropped if it was."""
        entry = self._entries[number]
        return entry.state, entry.reason

    def begin(self, numbers: Sequence[int], version: int) -> None:
        self._version = version
        for number in numbers:
            known = self._entries.get(number)
            assert number >= self._next_number if known is None else known.state is GroupState.IN_FLIGHT, number
            self._entries[number] = _Entry(GroupState.IN_FLIGHT, version)
        self._next_number = max([self._next_number, *(number + 1 for number in numbers)])

    def add(self, *groups: TrajectoryGroup) -> None:
        for group in groups:
            entry = self._move(group.number, GroupState.READY, GroupState.IN_FLIGHT)
            entry.group, entry.info = group, GroupInfo.of(group)

    def ready(self) -> list[GroupInfo]:
        infos = [entry.info for entry in self._entries.values() if entry.info and entry.state is GroupState.READY]
        return sorted(infos, key=lambda info: info.number)

    def lease(self, numbers: Sequence[int], version: int) -> None:
        self._version = version
        for number in numbers:
            self._move(number, GroupState.LEASED, GroupState.READY)

    def trained(self, numbers: Sequence[int], version: int) -> None:
        self._version = version
        for number in numbers:
            self._move(number, GroupState.TRAINED, GroupState.LEASED)
        self._let_go_of_old()

    def drop(self, numbers: Sequence[int], reason: str) -> None:
        for number in numbers:
            self._move(number, GroupState.DROPPED, GroupState.IN_FLIGHT, GroupState.READY).reason = reason

    def read(self, numbers: Sequence[int]) -> list[TrajectoryGroup]:
        groups = [self._entries[number].group for number in numbers]
        return [group for group in groups if group is not None]

    def arrived_after(self, count: int) -> list[TrajectoryGroup]:
        return []

    def resume(self, version: int) -> list[int]:
        self._version = version
        return [number for number, entry in sorted(self._entries.items()) if _is_attempted_again(entry, version)]

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self._entries.clear()

    def _move(self, number: int, to: GroupState, *origins: GroupState) -> _Entry:
        entry = self._entries[number]
        assert entry.state in origins, f"group {number} is {entry.state}, and cannot become {to}"
        entry.state, entry.version = to, self._version
        return entry

    def _let_go_of_old(self) -> None:
        if self._horizon is None:
            return
        ended = (GroupState.TRAINED, GroupState.DROPPED)
        oldest = self._version - self._horizon
        for number in [n for n, entry in self._entries.items() if entry.state in ended and entry.version < oldest]:
            entry = self._entries.pop(number)
            self._let_go[entry.state] += 1
            if entry.state is GroupState.DROPPED:
                self._dropped_and_gone[entry.reason] += 1


def _is_attempted_again(entry: _Entry, version: int) -> bool:
    """Take one group back to the checkpoint of `version`; True where nothing is left of it but its number."""
    if entry.state in (GroupState.LEASED, GroupState.TRAINED) and entry.version < version:
        entry.state = GroupState.TRAINED
        return False
    if entry.info is None:
        return entry.state is GroupState.IN_FLIGHT
    newest = entry.info.versions.newest
    if newest > version:
        entry.state, entry.group, entry.info, entry.reason = GroupState.IN_FLIGHT, None, None, ""
        return True
    if entry.state is not GroupState.DROPPED or newest == version:
        entry.state, entry.reason = GroupState.READY, ""
    return False
