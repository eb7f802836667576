"""Groups of the store as the trainer wants them: flat values and offsets, and views of the mapped files where they can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from redline.types import UNKNOWN_EXPERT, Flat, Pieces, TrainBatch, VersionSpan


@dataclass(slots=True, frozen=True)
class StoredGroups:
    """T tokens of S sequences of attempts at some tasks. The arrays may be read-only."""

    indices: tuple[int, ...]
    tokens: Flat
    """int32[T], as it lies in the files."""
    loss_mask: np.ndarray
    """bool[T]."""
    logprobs: Flat
    """float32[T], as it lies in the files."""
    routing: Flat | None
    """uint8, as `TrainBatch.routing`, as it lies in the files where all sequences have it."""
    offsets: np.ndarray
    """int64[S + 1], from 0: `cu_seqlens`."""
    group_offsets: np.ndarray
    """int64[groups + 1]: the sequences of each group."""
    attempts: np.ndarray
    """int32[S]: which attempt of its group each belongs to."""
    advantages: np.ndarray
    """float32[S]."""
    failed: np.ndarray
    """bool[S]."""
    versions: VersionSpan
    """The oldest and the newest version of all sequences."""
    num_runs: int
    """Pieces that lie in one place."""


@dataclass(slots=True, frozen=True)
class Run:
    """Rows of a segment that are wanted one after the other."""

    batch: pa.RecordBatch
    first: int
    last: int

    def values(self, name: str) -> np.ndarray:
        """The values of a column of lists, end to end."""
        column = self.batch.column(name)
        offsets = self.offsets(name)
        return column.values.to_numpy()[offsets[0] : offsets[-1]]

    def offsets(self, name: str) -> np.ndarray:
        """int64[rows + 1], from the beginning of the segment."""
        return self.batch.column(name).offsets.to_numpy()[self.first : self.last + 1]

    def column(self, name: str) -> np.ndarray:
        return self.batch.column(name).to_numpy()[self.first : self.last]

    @property
    def routing_width(self) -> int:
        """Bytes of `routing` for each token; 0 where no row has any."""
        if "routing" not in self.batch.schema.names:  # an earlier version's
            return 0
        kept, tokens = np.diff(self.offsets("routing")), np.diff(self.offsets("token_ids"))
        return int((kept // tokens).max())

    def routing(self, width: int) -> np.ndarray:
        """uint8[tokens · width]: a view where every row has it, else a copy, filled up."""
        tokens = np.diff(self.offsets("token_ids"))
        kept = np.diff(self.offsets("routing")) if self.routing_width else np.zeros_like(tokens)
        if (kept == tokens * width).all():
            return self.values("routing")
        assert (kept[kept > 0] == (tokens * width)[kept > 0]).all(), "rows of one run have one network"
        filled = np.full(int(tokens.sum()) * width, UNKNOWN_EXPERT, dtype=np.uint8)
        filled[np.repeat(kept > 0, tokens * width)] = self.values("routing") if self.routing_width else 0
        return filled

    @property
    def first_of_each_role(self) -> np.ndarray:
        """bool[rows]: the first sequence of an attempt and role, for rows of one group."""
        is_first = np.zeros(self.last - self.first, dtype=bool)
        attempts = self.column("attempt")
        named = "role" in self.batch.schema.names
        roles = self.batch.column("role")[self.first : self.last].to_pylist() if named else [""] * len(attempts)
        seen = {pair: place for place, pair in reversed(list(enumerate(zip(attempts.tolist(), roles, strict=True))))}
        is_first[list(seen.values())] = True
        return is_first

    @property
    def failed(self) -> np.ndarray:
        """bool[rows]: the failure is there."""
        column = self.batch.column("failure")
        if not column.null_count:
            return np.ones(self.last - self.first, dtype=bool)
        bits = np.frombuffer(column.buffers()[0], dtype=np.uint8)[self.first // 8 : -(-self.last // 8)]
        return np.unpackbits(bits, bitorder="little")[self.first % 8 :][: self.last - self.first].astype(bool)


def stored_groups(indices: Sequence[int], sizes: Sequence[int], runs: Sequence[Run]) -> StoredGroups:
    """`sizes` are the sequences of each group; the runs hold them in that order."""
    lengths = [np.diff(run.offsets("token_ids")) for run in runs]
    oldest = min(int(run.column("oldest_version").min()) for run in runs)
    newest = max(int(run.column("newest_version").max()) for run in runs)
    return StoredGroups(
        indices=tuple(indices),
        tokens=_as_it_lies([run.values("token_ids") for run in runs]),
        loss_mask=_joined([run.values("loss_mask").view(np.bool_) for run in runs]),
        logprobs=_as_it_lies([run.values("logprobs") for run in runs]),
        routing=_routing(runs),
        offsets=_offsets(_joined(lengths)),
        group_offsets=_offsets(np.asarray(sizes, dtype=np.int64)),
        attempts=_joined([run.column("attempt") for run in runs]),
        advantages=_joined([run.column("advantage") for run in runs]),
        failed=_joined([run.failed for run in runs]),
        versions=VersionSpan(oldest, newest),
        num_runs=len(runs),
    )


def pack_stored(groups: StoredGroups, version: int, *, keep_no_signal: bool) -> TrainBatch:
    """The batch of `version`, its tokens those of the store.

    A sequence of an attempt that failed is not trained on, and neither is one whose advantage is 0, unless `keep_no_signal`. To
    leave it out of the tokens would mean to copy all others; instead its loss mask is cleared, which costs a byte per token,
    and the trainer computes no sequence without a trained token. What is masked for want of signal counts in the means, and
    what failed does not.
    """
    kept_S = ~groups.failed & (keep_no_signal | (groups.advantages != 0))
    kept_T = np.repeat(kept_S, np.diff(groups.offsets))
    counted_S = ~groups.failed
    chosen_S = np.add.reduceat(groups.loss_mask, groups.offsets[:-1], dtype=np.int64) * counted_S
    return TrainBatch(
        tokens=groups.tokens,
        cu_seqlens=groups.offsets,
        group_offsets=groups.group_offsets,
        loss_mask=groups.loss_mask if kept_S.all() else groups.loss_mask & kept_T,
        old_logprobs=groups.logprobs,
        routing=groups.routing,
        advantages=np.where(kept_S, groups.advantages, np.float32(0)),
        group_sequences=np.add.reduceat(counted_S, groups.group_offsets[:-1], dtype=np.int64),
        group_tokens=np.add.reduceat(chosen_S, groups.group_offsets[:-1]),
        versions=groups.versions,
        version=version,
        indices=groups.indices,
        num_attempts=_num_attempts(groups, counted_S),
    )


def _num_attempts(groups: StoredGroups, counted_S: np.ndarray) -> int:
    group_S = np.repeat(np.arange(len(groups.indices)), np.diff(groups.group_offsets))
    width = int(groups.attempts.max(initial=0)) + 1
    return len(np.unique((group_S * width + groups.attempts)[counted_S]))


def _routing(runs: Sequence[Run]) -> Flat | None:
    """None where no sequence has any."""
    width = max(run.routing_width for run in runs)
    return _as_it_lies([run.routing(width) for run in runs]) if width else None


def _as_it_lies(arrays: Sequence[np.ndarray]) -> Flat:
    return arrays[0] if len(arrays) == 1 else Pieces(arrays)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
