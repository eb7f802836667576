"""Groups as a segment alone tells of them: for what the index does not know, and for when there is none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from redline.buffer.store.columns import Mark, Rows
from redline.buffer.store.group_store import GroupState
from redline.buffer.store.index import GroupRow
from redline.buffer.store.stored_groups import Run
from redline.types.numbers import in_float32


@dataclass(slots=True, frozen=True)
class FoundGroup:
    """Rows that belong together, by their group's index."""

    batch: pa.RecordBatch
    index: int
    first: int
    last: int
    is_intact: bool
    mark: int
    """What stands in `version`: the step that trained on it, or a `Mark`."""

    def row(self, segment: int, known: GroupRow | None = None) -> GroupRow:
        """For the index; `known` is what it has of the group already."""
        run, now = Run(self.batch, self.first, self.last), time.time()
        is_trained = self.mark >= 0
        rewards = [in_float32(reward) for reward in run.column("reward")[run.first_of_each_role & ~run.failed]]
        num_rows, num_attempts = self.last - self.first, len(np.unique(run.column("attempt")))
        state = GroupState.TRAINED if is_trained else GroupState.DROPPED if self.mark == Mark.DROPPED else GroupState.READY
        return GroupRow(
            index=self.index,
            state=state,
            begun_version=int(run.column("begun_version")[0]),
            begun_at=now if known is None else known.begun_at,
            reason="not known any more" if state is GroupState.DROPPED else None,
            oldest_version=int(run.column("oldest_version").min()),
            newest_version=int(run.column("newest_version").max()),
            reward=sum(rewards) / len(rewards) if rewards else None,
            num_tokens=int(np.diff(run.offsets("token_ids")).sum()),
            num_attempts=num_attempts,
            num_sequences=None if num_rows == num_attempts else num_rows,
            has_signal=bool((run.column("advantage") != 0).any()),
            segment=segment,
            first_row=self.first,
            ready_at=now,
            trained_version=self.mark if is_trained else None,
            settled_at=None if state is GroupState.READY else now,
        )


def found_groups(batch: pa.RecordBatch, first: int = 0) -> Iterator[FoundGroup]:
    """From row `first` on. A group begins where its rows are counted from 0 again, or the index is another."""
    rows = Rows(batch)
    counter = "sequence" if "sequence" in batch.schema.names else "attempt"  # of a time when each attempt was one row
    indices, sequences, marks = (rows.values(name) for name in ("group", counter, "version"))
    indices, sequences = indices[first:], sequences[first:]
    begins = np.flatnonzero((np.diff(indices, prepend=-1) != 0) | (sequences == 0)) + first
    for start, end in zip(begins, [*begins[1:], batch.num_rows][: len(begins)], strict=True):
        intact = rows.is_intact(int(start), int(end))
        yield FoundGroup(batch, int(indices[start - first]), int(start), int(end), intact, int(marks[start]))
