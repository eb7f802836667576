"""The trajectories of a run, to look at: its groups, and the rows of their attempts. Reading only; the run may go on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from redline.buffer.store.columns import SCHEMA, Rows
from redline.buffer.store.earlier import as_dicts, as_of_now
from redline.buffer.store.group_store import GroupState
from redline.buffer.store.index import DamagedIndexError, GroupIndex, GroupRow, index_files
from redline.buffer.store.segments import DamagedSegmentError, read_segment, segment_files
from redline.errors import RunFolderError
from redline.telemetry.files.durable import read_json

_OWN = ("group", "checksum", "begun_version")
"""Columns of an attempt that its group has already, or that say nothing to a person."""
_NOT_IN_TABLE = ("version", "checksum", "begun_version")
"""Columns of the store's own book-keeping; `step` and `state` say what they say."""


@dataclass(slots=True, frozen=True)
class LetGo:
    """Groups whose attempts are no longer there; what became of them is still in the index."""

    groups: int
    why: str

    @property
    def sentence(self) -> str:
        return f"trajectories/ holds the newest groups; the attempts of {self.groups:,} older ones were let go, {self.why}."


@dataclass(slots=True, frozen=True)
class StoredText:
    """One sequence of an attempt."""

    task_id: str
    token_ids: np.ndarray
    """int32, prompts included."""
    turns: list[dict[str, Any]]
    """As in the columns of the store: the policy sampled the tokens from `start` to `end`, until `finish_reason`."""


class StoredRun:
    """The trajectories of a run, to look at. Steps count from 1, as in `metrics.jsonl`."""

    def __init__(self, folder: Path) -> None:
        """`folder` is the run's. Raises `RunFolderError` where it has no trajectories."""
        self._run, self._folder = folder, folder / "trajectories"
        if not index_files(self._folder):
            raise RunFolderError(
                f"{folder}: no trajectories to show",
                f"redline repair {folder}"
                if segment_files(self._folder)
                else "it kept none (buffer.max_bytes: 0), or they were not copied",
            )

    def groups(self, *, step: int | None = None, index: int | None = None) -> list[GroupRow]:
        """Return the groups by index: all, those that a step was trained on, or one."""
        wanted: tuple[Any, ...] = ()
        if index is not None:
            wanted = ("group_index = ?", index)
        elif step is not None:
            wanted = ("trained_version = ? AND state = 'trained'", step - 1)
        with self._index() as database:
            found = list(database.rows(*wanted))
        if not found and index is not None:
            raise RunFolderError(f"{self._run}: no group {index}", f"list them with: redline show {self._run}")
        if not found and step is not None:
            raise RunFolderError(
                f"{self._run}: nothing was trained at step {step}", f"steps count from 1: redline show {self._run}"
            )
        return found

    def newest(self, before: int | None = None) -> Iterator[GroupRow]:
        """Give all groups that are complete, the newest first, one at a time: all, or those before an index."""
        with self._index() as index:
            yield from index.newest(before)

    def trained_steps(self) -> list[int]:
        """Return the steps that were trained on groups whose attempts are still there."""
        with self._index() as index:
            versions = index.trained_steps({file.number for file in segment_files(self._folder)})
        return [version + 1 for version in versions]

    def sampled_steps(self) -> list[int]:
        """Return the steps whose policy began groups that are still there."""
        with self._index() as index:
            versions = index.begun_versions({file.number for file in segment_files(self._folder)})
        return [version + 1 for version in versions]

    def sampled(self, step: int) -> list[GroupRow]:
        """Return the groups that the policy of a step began and that are complete, trained on or not, by index."""
        with self._index() as index:
            return list(index.rows("begun_version = ? AND segment IS NOT NULL", step - 1))

    def table(self, step: int | None = None) -> pa.Table:
        """Return one row per sequence that is still stored, with the `step` that trained on it and the `state` of its group: of
        all groups, or of those that one step was trained on. Large columns are mapped from the files, not copied."""
        stretches: list[_Stretch] = []
        for group, rows in self._rows(self.groups(step=step), must_be_intact=True):
            if rows is None:
                continue
            if stretches and stretches[-1].reaches(group, rows.batch):
                stretches[-1].groups.append(group)
            else:
                stretches.append(_Stretch(rows.batch, [group]))
        return pa.Table.from_batches([stretch.with_groups() for stretch in stretches], schema=TABLE_SCHEMA)

    @contextmanager
    def _index(self) -> Iterator[GroupIndex]:
        try:
            index = GroupIndex(self._folder, "ro")
            try:
                yield index
            finally:
                index.close()
        except DamagedIndexError as error:
            raise self._damaged(error) from error

    def let_go(self) -> LetGo | None:
        """What is no longer there, and why; None where all is."""
        with self._index() as index:
            groups = index.count_outside({file.number for file in segment_files(self._folder)})
        return LetGo(groups, self.why_let_go()) if groups else None

    def why_let_go(self) -> str:
        """Which key of the recipe lets old attempts go, in words."""
        buffer = read_json(self._run / "config.json").get("buffer")
        wanted = buffer if isinstance(buffer, dict) else {}
        max_bytes, max_age = wanted.get("max_bytes"), wanted.get("max_age_steps")
        reasons = [f"buffer.max_bytes = {max_bytes:,}"] if max_bytes else []
        reasons += [f"buffer.max_age_steps = {max_age:,}"] if max_age else []
        return f"as {' and '.join(reasons)} asks for" if reasons else "and no key of config.json says why"

    def attempts(self, groups: Iterable[GroupRow]) -> Iterator[tuple[GroupRow, list[dict[str, Any]] | None]]:
        """Each group with the rows of its attempts; None where its segment was evicted, nothing while it is in flight."""
        for group, batch in self._batches(groups, must_be_intact=True):
            if batch is None:
                yield group, None if group.num_attempts else []
            else:
                yield group, [_attempt(row) for row in as_dicts(batch)]

    def with_failures(self, groups: Iterable[GroupRow]) -> Iterator[GroupRow]:
        """Those of which an attempt failed; tokens are not read for that."""
        for group, batch in self._batches(groups):
            if batch is not None and batch.column("failure").null_count < batch.num_rows:
                yield group

    def lengths(self, groups: Iterable[GroupRow]) -> Iterator[tuple[GroupRow, tuple[np.ndarray, np.ndarray] | None]]:
        """Each group with the tokens of its attempts, all and those that the policy chose, int64 each; None as for
        `attempts`."""
        for group, batch in self._batches(groups):
            if batch is None:
                yield group, None
                continue
            mask = batch.column("loss_mask")
            offsets = mask.offsets.to_numpy()
            values = mask.values.to_numpy()[offsets[0] : offsets[-1]]
            chosen = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
            yield group, (np.diff(offsets), np.diff(chosen[offsets - offsets[0]]))

    def texts(self, groups: Iterable[GroupRow]) -> Iterator[tuple[GroupRow, list[StoredText]]]:
        """Each group that is still stored with the tokens of its sequences. They are views of the files: nothing is copied."""
        for group, batch in self._batches(groups, must_be_intact=True):
            if batch is not None:
                rows = as_of_now(batch)
                tokens = (value.values.to_numpy() for value in rows.column("token_ids"))
                turns, tasks = rows.column("turns").to_pylist(), rows.column("task_id").to_pylist()
                yield group, [StoredText(*each) for each in zip(tasks, tokens, turns, strict=True)]

    def _batches(self, groups: Iterable[GroupRow], *, must_be_intact: bool = False) -> Iterator[tuple[GroupRow, Any]]:
        """Give each group with its own rows; None where there are none."""
        for group, rows in self._rows(groups, must_be_intact=must_be_intact):
            yield group, None if rows is None else rows.batch.slice(group.first_row, group.num_rows)

    def _rows(self, groups: Iterable[GroupRow], *, must_be_intact: bool) -> Iterator[tuple[GroupRow, Rows | None]]:
        """Give each group with all rows of its segment, which is mapped and not read; None where it is gone. Rows that must be
        intact are compared with their checksum: an offset that leads nowhere would take the process with it."""
        paths = self._paths()
        mapped: dict[int, Rows] = {}
        for group in groups:
            if group.segment in paths and group.segment not in mapped and not paths[group.segment].exists():
                paths = self._paths()  # a run that goes on has given its open segment another name, or let an old one go
            if group.segment is None or group.segment not in paths:
                yield group, None
                continue
            try:
                if group.segment not in mapped:
                    mapped = {group.segment: Rows(read_segment(paths[group.segment]))}
                if must_be_intact and not mapped[group.segment].is_intact(group.first_row, group.end_row):
                    raise DamagedSegmentError(f"{paths[group.segment]}: group {group.index} is not what was written")
            except DamagedSegmentError as error:
                raise self._damaged(error) from error
            yield group, mapped[group.segment]

    def _paths(self) -> dict[int, Path]:
        return {file.number: file.path for file in segment_files(self._folder)}

    def _damaged(self, error: Exception) -> RunFolderError:
        return RunFolderError(f"the trajectories are damaged: {error}", f"save what is intact with: redline repair {self._run}")


def step_of(group: GroupRow) -> int | None:
    """Return the step, from 1, that trained on a group or has it in its batch; None where there is none."""
    return None if group.trained_version is None else group.trained_version + 1


@dataclass(slots=True, frozen=True)
class _Stretch:
    """Groups whose rows follow each other in one segment: one chunk of a table, where each by itself would be thousands."""

    batch: pa.RecordBatch
    """The whole segment."""
    groups: list[GroupRow]

    def reaches(self, group: GroupRow, batch: pa.RecordBatch) -> bool:
        """Return whether the rows of `group` come next."""
        return batch is self.batch and self.groups[-1].end_row == group.first_row

    def with_groups(self) -> pa.RecordBatch:
        """Return the rows, in the order of `TABLE_SCHEMA`, with what became of its group beside each."""
        sizes = [group.num_rows for group in self.groups]
        steps = [step_of(group) if group.state == GroupState.TRAINED else None for group in self.groups]
        places = pa.array(np.repeat(np.arange(len(sizes)), sizes))
        of_group = {
            "step": pa.array(steps, pa.int64()).take(places),
            "state": pa.array([group.state.value for group in self.groups], pa.string()).take(places),
        }
        rows = as_of_now(self.batch.slice(self.groups[0].first_row, sum(sizes)))
        columns = [of_group[name] if name in of_group else rows.column(name) for name in TABLE_SCHEMA.names]
        return pa.RecordBatch.from_arrays(columns, schema=TABLE_SCHEMA)


TABLE_SCHEMA = pa.schema(
    [("step", pa.int64()), ("state", pa.string()), *(field for field in SCHEMA if field.name not in _NOT_IN_TABLE)]
)


def _attempt(row: dict[str, Any]) -> dict[str, Any]:
    row["reward_parts"] = {part["name"]: part["value"] for part in row["reward_parts"]}
    return {name: value for name, value in row.items() if name not in _OWN}
