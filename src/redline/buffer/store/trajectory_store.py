"""The `trajectories/` folder of a run: every group that was sampled, and what became of it. Implements `GroupStore`.

    trajectories/
      index.sqlite               one row per group: state, versions, reward, where it lies
      segment-000000.arrow       one row per attempt; pyarrow, pandas, DuckDB and `datasets` open it
      segment-000001.open.arrow  the one that groups are added to

Tokens are written before the row that speaks of them. Whenever the process is killed, the index is right, and at most the end
of the open segment is unknown to it; what stands there whole is taken in when the store is opened again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from redline.buffer.store.columns import Mark, group_nodes
from redline.buffer.store.found import found_groups
from redline.buffer.store.group_store import GroupInfo, GroupState
from redline.buffer.store.index import DamagedIndexError, GroupIndex, GroupRow, index_files
from redline.buffer.store.repair import mend
from redline.buffer.store.restored import restored_group
from redline.buffer.store.segment_set import SegmentSet
from redline.buffer.store.segments import SEGMENT_BYTES, DamagedSegmentError, segment_files
from redline.buffer.store.stored_groups import Run, StoredGroups, stored_groups
from redline.errors import RunFolderError
from redline.types import TrajectoryGroup, VersionSpan

SETTLED = (GroupState.TRAINED, GroupState.DROPPED)
UNSETTLED = "state NOT IN ('trained', 'dropped')"
UNDECIDED = """NOT (state = 'trained' AND trained_version < ?)
AND NOT (state = 'dropped' AND (newest_version IS NULL OR newest_version < ?))"""
"""Groups that may be in another state at an earlier version (`_as_of`): few, however long the run."""
BYTES_PER_TOKEN = 9
"""The token, its logprob, and whether it was chosen."""
PORTIONS = 4
"""About as many fill a segment: however many groups come at once, no segment gets much larger than it should."""


@dataclass(slots=True, frozen=True)
class StoredInfo(GroupInfo):
    """What the store knows about a group that is ready."""

    num_tokens: int
    begun_version: int

    @staticmethod
    def of_row(row: GroupRow) -> StoredInfo:
        assert row.oldest_version is not None
        assert row.newest_version is not None
        versions = VersionSpan(row.oldest_version, row.newest_version)
        return StoredInfo(row.index, versions, row.has_signal, row.reward, row.num_tokens, row.begun_version)


class TrajectoryStore:
    """All methods are to be called from one thread at a time."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int | None = None,
        max_age_steps: int | None = None,
        *,
        keep_steps: int = 0,
        segment_bytes: int = SEGMENT_BYTES,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Segments without a group that is still wanted are deleted, the oldest first, while all take more than `max_bytes`,
        or when everything in them is older than `max_age_steps`; the groups of the last `keep_steps` steps always stay, for
        replays and for a run that goes back to a checkpoint. `tell` hears of what a power cut took, which is mended, and
        when the first segment is deleted."""
        self.folder = folder
        self._max_bytes, self._max_age, self._keep_steps = max_bytes, max_age_steps, keep_steps
        self._has_told = False
        folder.mkdir(parents=True, exist_ok=True)
        for scratch in folder.glob(".*.partial"):
            scratch.unlink()
        self._segment_bytes, self._tell = segment_bytes, tell
        self._segments = SegmentSet(folder, segment_bytes)
        self._portion_tokens = segment_bytes // (PORTIONS * BYTES_PER_TOKEN)
        self._rows: dict[int, GroupRow] = {}
        """Those that are not settled."""
        self._ready: dict[int, StoredInfo] = {}
        self._counts: Counter[GroupState] = Counter()
        self._next_index = self._version = 0
        with self._explained():
            self._load()

    # ── groups ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def next_index(self) -> int:
        """The smallest index that was never given out."""
        return self._next_index

    @property
    def counts(self) -> Mapping[str, int]:
        """Groups in each state, over the whole run."""
        return {state: self._counts[state] for state in GroupState}

    @property
    def dropped(self) -> Mapping[str, int]:
        """By the reason, over the whole run."""
        with self._explained():
            return self._index.reasons()

    def begin(self, indices: Sequence[int], version: int) -> None:
        now = time.time()
        known = [self._known(index) for index in indices]
        assert all(row is None or row.state is GroupState.IN_FLIGHT for row in known), f"{indices}: begun before"
        self._put([GroupRow(index, GroupState.IN_FLIGHT, version, now) for index in indices], version)

    def add(self, *groups: TrajectoryGroup) -> None:
        assert len({group.index for group in groups}) == len(groups), "a group twice"
        for some in _portions(groups, self._portion_tokens):
            self._add(some)

    def _add(self, groups: Sequence[TrajectoryGroup]) -> None:
        now = time.time()
        begun = [self._begun(group, now) for group in groups]
        segment, first_row = self._segments.write(group_nodes(groups, [row.begun_version for row in begun]))
        rows = []
        for group, row in zip(groups, begun, strict=True):
            rows.append(_ready_row(group, row, segment, first_row, now))
            first_row = rows[-1].end_row
        self._put(rows, self._version)

    def _begun(self, group: TrajectoryGroup, now: float) -> GroupRow:
        """What is known of a group that comes now."""
        known = self._known(group.index)
        assert known is None or known.state is GroupState.IN_FLIGHT, f"group {group.index} is {known and known.state}"
        return GroupRow(group.index, GroupState.IN_FLIGHT, group.versions.oldest, now) if known is None else known

    def ready(self) -> list[GroupInfo]:
        """By index."""
        return [self._ready[index] for index in sorted(self._ready)]

    def lease(self, indices: Sequence[int], version: int) -> None:
        self._move(indices, version, GroupState.LEASED, GroupState.READY, trained_version=version)

    def trained(self, indices: Sequence[int], version: int) -> None:
        self._mark([self._rows[index] for index in indices], version)
        self._move(indices, version, GroupState.TRAINED, GroupState.LEASED, trained_version=version, settled_at=time.time())
        self._evict()

    def drop(self, indices: Sequence[int], reason: str) -> None:
        self._mark([self._rows[index] for index in indices], Mark.DROPPED)
        origins = (GroupState.IN_FLIGHT, GroupState.READY, GroupState.LEASED)
        self._move(indices, self._version, GroupState.DROPPED, *origins, reason=reason, settled_at=time.time())
        self._evict()

    def read(self, indices: Sequence[int]) -> StoredGroups:
        """In the order asked. Groups that were added one after the other, and are asked for so, are one view of a file."""
        rows = [self._stored(index) for index in indices]
        runs: list[Run] = []
        for row in rows:
            batch = self._segments.map(row)
            if runs and runs[-1].batch is batch and runs[-1].last == row.first_row:
                runs[-1] = replace(runs[-1], last=row.end_row)
            else:
                runs.append(Run(batch, row.first_row, row.end_row))
        return stored_groups(indices, [row.num_rows for row in rows], runs)

    def arrived_after(self, count: int) -> list[TrajectoryGroup]:
        """They lie in the order in which they came; what was evicted since then is left out."""
        with self._explained():
            late = [row for row in self._index.stored_after(count) if row.segment in self._segments]
            return [restored_group(Run(self._segments.map(row), row.first_row, row.end_row)) for row in late]

    def lengths_before(self, version: int, most: int, without: Container[int] = ()) -> list[tuple[str, list[int]]]:
        with self._explained():
            return [_lengths_of(run) for run in self._runs_before(version, most, without)]

    def groups_before(self, version: int, most: int) -> Iterator[TrajectoryGroup]:
        """One after the other: together they may be more than memory has room for."""
        with self._explained():
            for run in self._runs_before(version, most, newest_first=True):
                yield restored_group(run)

    def _runs_before(
        self, version: int, most: int, without: Container[int] = (), *, newest_first: bool = False
    ) -> Iterator[Run]:
        found = self._index.sampled_before(version, most)
        for row in reversed(found) if newest_first else found:
            if row.segment in self._segments and row.index not in without:
                yield Run(self._segments.map(row), row.first_row, row.end_row)

    def resume(self, version: int) -> list[int]:
        """Back to a checkpoint of `version`; `GroupStore.resume` has the rule. What was evicted since is attempted again."""
        again, changed, marks = list[int](), list[GroupRow](), dict[int, list[GroupRow]]()
        before = dict[int, GroupRow]()
        with self._explained():
            for row in self._index.rows(UNDECIDED, version, version):
                now = _as_of(row, version, is_there=row.segment in self._segments)
                if now.state is GroupState.IN_FLIGHT:
                    again.append(row.index)
                if now != row:
                    changed.append(now)
                    before[row.index] = row
                    marks.setdefault(_mark_of(now), []).append(row)
        for mark, marked in marks.items():
            self._mark(marked, mark)
        with self._explained():
            self._index.put(changed)
        self._version = version
        self._remember(changed, before)
        with self._explained():
            self._segments.check_groups(row for row in self._rows.values() if row.is_live)
        return again

    def flush(self) -> None:
        """Everything up to here survives a power cut, not only a kill."""
        flushed = self._segments.flush()
        with self._explained():
            self._index.mark_flushed(*flushed)
            self._index.flush()

    def close(self) -> None:
        self._segments.seal()
        try:
            self.flush()
        finally:
            self._index.close()

    # ── rows ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _known(self, index: int) -> GroupRow | None:
        if index in self._rows or index >= self._next_index:
            return self._rows.get(index)
        return self._index.get(index)

    def _stored(self, index: int) -> GroupRow:
        row = self._known(index)
        assert row is not None, f"there is no group {index}"
        assert row.segment in self._segments, f"group {index} is {row.state}, and its tokens are not here"
        return row

    def _move(self, indices: Iterable[int], version: int, to: GroupState, *origins: GroupState, **changes: object) -> None:
        rows = [self._rows[index] for index in indices]
        for row in rows:
            assert row.state in origins, f"group {row.index} is {row.state}, and cannot become {to}"
        self._put([replace(row, state=to, **changes) for row in rows], version)  # type: ignore[arg-type]

    def _put(self, rows: Sequence[GroupRow], version: int) -> None:
        with self._explained():
            self._index.put(rows)
        self._version = version
        self._remember(rows, self._rows)

    def _remember(self, rows: Iterable[GroupRow], before: Mapping[int, GroupRow]) -> None:
        """Keep what is in memory up with the index."""
        for row in rows:
            old = before.get(row.index)
            if old is not None:
                self._count(old, -1)
            self._count(row, 1)
            self._keep(row)
            self._next_index = max(self._next_index, row.index + 1)

    def _keep(self, row: GroupRow) -> None:
        """In memory, as long as it is not settled."""
        self._rows.pop(row.index, None)
        self._ready.pop(row.index, None)
        if row.state not in SETTLED:
            self._rows[row.index] = row
        if row.state is GroupState.READY:
            self._ready[row.index] = StoredInfo.of_row(row)

    def _count(self, row: GroupRow, change: int) -> None:
        self._counts[row.state] += change
        self._segments.count(row, change)

    # ── segments ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _mark(self, rows: Iterable[GroupRow], value: int) -> None:
        with self._explained():
            self._segments.mark(rows, value)

    def _evict(self) -> None:
        deleted = self._segments.evict(self._version, self._max_bytes, self._max_age, self._keep_steps)
        if deleted and not self._has_told:
            self._has_told = True
            keys = {"buffer.max_bytes": self._max_bytes, "buffer.max_age_steps": self._max_age}
            asked = " and ".join(f"{key} = {value:,}" for key, value in keys.items() if value is not None)
            self._tell(f"the oldest trajectories are deleted from now on, as {asked} asks for; null keeps all")

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (DamagedIndexError, DamagedSegmentError) as error:
            raise RunFolderError(
                f"the trajectories are damaged: {error}", f"save what is intact with: redline repair {self.folder.parent}"
            ) from error

    # ── opening ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _load(self) -> None:
        has_segments = bool(segment_files(self.folder))
        if has_segments and not index_files(self.folder):
            raise DamagedIndexError("the index is missing")
        self._index = GroupIndex(self.folder, "rw" if has_segments else "rwc")
        try:
            self._index.check()
            self._mend()
            counts, totals, self._next_index, self._version = self._index.totals()
            self._counts = Counter(counts)
            self._segments.know(totals)
            for row in self._index.rows(UNSETTLED):
                self._keep(row)
            self._segments.check(segment for segment, found in totals.items() if found.num_live)
            for segment in self._segments.left_open:
                self._take_in(segment)
        except BaseException:
            self._index.close()
            raise

    def _mend(self) -> None:
        """What was written after the last flush, a power cut may have taken from the segments and left in the index. No
        checkpoint knows of it: these groups are attempted again, and nothing is lost. Where more is damaged, it stays so."""
        flushed = self._index.flushed
        if flushed is None:
            return
        segment, row = flushed
        since = self._index.rows("segment > ? OR (segment = ? AND first_row >= ?)", segment, segment, row)
        lost = {row.index for row in self._segments.lost(since)}
        if not lost:
            return
        self._index.close()
        report = mend(self.folder, lost)
        self._index = GroupIndex(self.folder, "rw")
        if report is None:
            return
        self._segments = SegmentSet(self.folder, self._segment_bytes)
        self._tell("trajectories: a power cut took what was written after the last checkpoint; mended:")
        for line in report.lines:
            self._tell(f"  {line}")

    def _take_in(self, segment: int) -> None:
        """A segment that was open when its process ended: what the index does not know yet, and then without the gaps."""
        batch, end_row = self._segments.tail(segment)
        rows = []
        for found in found_groups(batch, end_row):
            known = self._known(found.index)
            is_news = known is None or known.state is GroupState.IN_FLIGHT
            if is_news and found.is_intact and found.mark == Mark.WAITING:
                rows.append(found.row(segment, known))
                end_row = rows[-1].end_row
        self._segments.close_left_open(segment, batch.slice(0, end_row))
        if rows:
            self._put(rows, self._version)


def _portions(groups: Sequence[TrajectoryGroup], most_tokens: int) -> Iterator[list[TrajectoryGroup]]:
    """Runs of them with at most so many tokens, or of a single one."""
    some, num_tokens = list[TrajectoryGroup](), 0
    for group in groups:
        tokens = sum(len(t.token_ids) for t in group.trajectories)
        if some and num_tokens + tokens > most_tokens:
            yield some
            some, num_tokens = [], 0
        some.append(group)
        num_tokens += tokens
    if some:
        yield some


def _ready_row(group: TrajectoryGroup, begun: GroupRow, segment: int, first_row: int, now: float) -> GroupRow:
    versions, num_rows, num_attempts = group.versions, len(group.trajectories), len(group.attempts)
    return replace(
        begun,
        state=GroupState.READY,
        oldest_version=versions.oldest,
        newest_version=versions.newest,
        reward=None if group.reward is None else float(group.reward),
        num_tokens=sum(len(t.token_ids) for t in group.trajectories),
        num_attempts=num_attempts,
        num_sequences=None if num_rows == num_attempts else num_rows,
        has_signal=group.has_signal,
        segment=segment,
        first_row=first_row,
        ready_at=now,
    )


def _as_of(row: GroupRow, version: int, *, is_there: bool) -> GroupRow:
    """A group when the trainer goes back to `version`."""
    begun = GroupRow(row.index, GroupState.IN_FLIGHT, row.begun_version, row.begun_at)
    leased_to = row.trained_version
    if leased_to is not None and leased_to < version and row.state in (GroupState.LEASED, GroupState.TRAINED):
        return replace(row, state=GroupState.TRAINED, settled_at=row.settled_at or time.time())
    if row.newest_version is None:
        return begun if row.state is GroupState.IN_FLIGHT else row
    if row.newest_version > version:
        return begun
    if row.state is GroupState.DROPPED and row.newest_version < version:
        return row
    if not is_there:
        return begun
    return replace(row, state=GroupState.READY, reason=None, trained_version=None, settled_at=None)


def _mark_of(row: GroupRow) -> int:
    """What stands in the segment of a group that a resumed run finds in this state."""
    if row.state is GroupState.TRAINED:
        assert row.trained_version is not None
        return row.trained_version
    return {GroupState.IN_FLIGHT: Mark.FORGOTTEN, GroupState.READY: Mark.WAITING}[row.state]


def _lengths_of(run: Run) -> tuple[str, list[int]]:
    """The task of a group, and the tokens that the policy chose in each attempt."""
    offsets = run.offsets("loss_mask")
    tokens_S = np.add.reduceat(run.values("loss_mask"), offsets[:-1] - offsets[0], dtype=np.int64)
    _, attempt_S = np.unique(run.column("attempt"), return_inverse=True)
    return run.batch.column("task_id")[run.first].as_py(), np.bincount(attempt_S, tokens_S).astype(int).tolist()
