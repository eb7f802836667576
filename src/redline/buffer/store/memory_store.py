"""Groups in memory, for runs that keep no trajectories: a `GroupStore` that ends with the process.

With a file, `flush` writes which indices were begun and not trained on, and a resumed run attempts them again. Short answers
overtake long ones: without it the long ones that were under way would never be trained on, and some short ones twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redline.buffer.store.group_store import GroupInfo, GroupState
from redline.errors import RunFolderError
from redline.telemetry.files.durable import write_json
from redline.types import TrajectoryGroup

EARLIER_NAME = "numbers.json"
"""What an earlier version called the file; its `next_index` was `next_number`."""
KEPT_VERSIONS = 16
"""Checkpoints that the file knows of: more than a run keeps, and one of them may be damaged."""
SETTLED = (GroupState.TRAINED, GroupState.DROPPED)


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

    def __init__(self, horizon: int | None = None, under_way: Path | None = None) -> None:
        """What was trained or dropped more than `horizon` versions ago is let go, and only counted; None keeps everything, so
        that `resume` may go back as far as it likes. `under_way` is the file for a run that is resumed by another process."""
        self._under_way = under_way
        self._entries: dict[int, _Entry] = {}
        self._let_go: Counter[GroupState] = Counter()
        self._dropped_and_gone: Counter[str] = Counter()
        self._horizon = horizon
        self._version = 0
        self._next_index = 0

    @property
    def next_index(self) -> int:
        return self._next_index

    @property
    def counts(self) -> Mapping[str, int]:
        found = Counter(entry.state for entry in self._entries.values()) + self._let_go
        return {state: found[state] for state in GroupState}

    @property
    def dropped(self) -> Mapping[str, int]:
        there = Counter(entry.reason for entry in self._entries.values() if entry.state is GroupState.DROPPED)
        return there + self._dropped_and_gone

    def fate(self, index: int) -> tuple[GroupState, str]:
        """The state of a group that was not let go, and why it was dropped if it was."""
        entry = self._entries[index]
        return entry.state, entry.reason

    def begin(self, indices: Sequence[int], version: int) -> None:
        self._version = version
        for index in indices:
            known = self._entries.get(index)
            assert index >= self._next_index if known is None else known.state is GroupState.IN_FLIGHT, f"{index}: begun before"
            self._entries[index] = _Entry(GroupState.IN_FLIGHT, version)
        self._next_index = max([self._next_index, *(index + 1 for index in indices)])

    def add(self, *groups: TrajectoryGroup) -> None:
        for group in groups:
            entry = self._move(group.index, GroupState.READY, GroupState.IN_FLIGHT)
            entry.group, entry.info = group, GroupInfo.of(group)

    def ready(self) -> list[GroupInfo]:
        infos = [entry.info for entry in self._entries.values() if entry.info and entry.state is GroupState.READY]
        return sorted(infos, key=lambda info: info.index)

    def lease(self, indices: Sequence[int], version: int) -> None:
        self._version = version
        for index in indices:
            self._move(index, GroupState.LEASED, GroupState.READY)

    def trained(self, indices: Sequence[int], version: int) -> None:
        self._version = version
        for index in indices:
            self._move(index, GroupState.TRAINED, GroupState.LEASED)
        self._let_go_of_old()

    def drop(self, indices: Sequence[int], reason: str) -> None:
        for index in indices:
            self._move(index, GroupState.DROPPED, GroupState.IN_FLIGHT, GroupState.READY).reason = reason

    def read(self, indices: Sequence[int]) -> list[TrajectoryGroup]:
        groups = [self._entries[index].group for index in indices]
        return [group for group in groups if group is not None]

    def arrived_after(self, count: int) -> list[TrajectoryGroup]:
        return []

    def lengths_before(self, version: int, most: int, without: Container[int] = ()) -> list[tuple[str, list[int]]]:
        return []

    def groups_before(self, version: int, most: int) -> list[TrajectoryGroup]:
        return []

    def resume(self, version: int) -> list[int]:
        if not self._entries:
            self._take_over(version)
        self._version = version
        return [index for index, entry in sorted(self._entries.items()) if _is_attempted_again(entry, version)]

    def flush(self) -> None:
        """Write what a run that goes back to here attempts again."""
        if self._under_way is None:
            return
        unsettled = [index for index, entry in self._entries.items() if entry.state not in SETTLED]
        known = _read_under_way(self._under_way)
        known[self._version + 1] = {"next_index": self._next_index, "unsettled": sorted(unsettled)}
        write_json(self._under_way, {str(version): known[version] for version in sorted(known)[-KEPT_VERSIONS:]})

    def _take_over(self, version: int) -> None:
        """The indices of an earlier process, as they were at the checkpoint of `version`; later ones are forgotten."""
        found = _read_under_way(self._under_way) if self._under_way is not None else {}
        if self._under_way is None or not found:
            return
        known = {key: value for key, value in found.items() if key <= version}
        write_json(self._under_way, {str(key): value for key, value in known.items()})
        if version in known:
            self._next_index = known[version]["next_index"]
            self._entries = {index: _Entry(GroupState.IN_FLIGHT, version) for index in known[version]["unsettled"]}

    def close(self) -> None:
        self._entries.clear()

    def _move(self, index: int, to: GroupState, *origins: GroupState) -> _Entry:
        entry = self._entries[index]
        assert entry.state in origins, f"group {index} is {entry.state}, and cannot become {to}"
        entry.state, entry.version = to, self._version
        return entry

    def _let_go_of_old(self) -> None:
        if self._horizon is None:
            return
        oldest = self._version - self._horizon
        for index in [n for n, entry in self._entries.items() if entry.state in SETTLED and entry.version < oldest]:
            entry = self._entries.pop(index)
            self._let_go[entry.state] += 1
            if entry.state is GroupState.DROPPED:
                self._dropped_and_gone[entry.reason] += 1


def _read_under_way(path: Path) -> dict[int, dict[str, Any]]:
    """Version → the indices at its checkpoint; none where there is no file."""
    path = path if path.exists() else path.with_name(EARLIER_NAME)
    if not path.exists():
        return {}
    try:
        text = path.read_text().replace('"next_number"', '"next_index"')
        return {int(version): dict(indices) for version, indices in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise RunFolderError(
            f"{path}: damaged: {error}", "delete it, and --resume goes on without the groups that were under way"
        ) from error


def _is_attempted_again(entry: _Entry, version: int) -> bool:
    """Take one group back to the checkpoint of `version`; True where nothing is left of it but its index."""
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
