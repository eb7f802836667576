"""Groups → one `TrainBatch`: flat arrays and offsets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redline.types import UNKNOWN_EXPERT, TrainBatch, Trajectory, TrajectoryGroup, VersionSpan, by_attempt


def pack(groups: Sequence[TrajectoryGroup], version: int, *, keep_no_signal: bool) -> TrainBatch:
    """Lay the sequences of all groups end to end. Those of a failed attempt are left out, and so are those whose advantage is
    0, unless `keep_no_signal`: they have no gradient, and only their prompts would be computed for nothing. A group of which
    nothing is left stays, empty: what is left out for want of signal counts in the means, and what failed does not."""
    pairs = [list(zip(g.trajectories, g.advantages, strict=True)) for g in groups]
    kept = [[(t, a) for t, a in group if t.failure is None and (keep_no_signal or a != 0)] for group in pairs]
    trajectories = [t for group in kept for t, _ in group]
    counted = [[t for t in g.trajectories if t.failure is None] for g in groups]
    return TrainBatch(
        tokens=_flat([t.token_ids for t in trajectories], np.int32),
        cu_seqlens=_offsets([len(t.token_ids) for t in trajectories]),
        group_offsets=_offsets([len(group) for group in kept]),
        loss_mask=_flat([t.loss_mask for t in trajectories], np.bool_),
        old_logprobs=_flat([t.logprobs for t in trajectories], np.float32),
        advantages=np.array([a for group in kept for _, a in group], dtype=np.float32),
        group_sequences=np.array([len(group) for group in counted], dtype=np.int64),
        group_tokens=np.array([sum(t.num_completion_tokens for t in group) for group in counted], dtype=np.int64),
        versions=VersionSpan(min(g.versions.oldest for g in groups), max(g.versions.newest for g in groups)),
        version=version,
        num_attempts=sum(len(by_attempt(group)) for group in counted),
        routing=_routing(trajectories),
    )


def _routing(trajectories: Sequence[Trajectory]) -> np.ndarray | None:
    """Those that have none are filled up; None where all have none."""
    known = [t.routing for t in trajectories if t.routing is not None]
    if not known:
        return None
    unknown = np.full((1, known[0].shape[1]), UNKNOWN_EXPERT, dtype=np.uint8)
    each = [unknown.repeat(len(t.token_ids), axis=0) if t.routing is None else t.routing for t in trajectories]
    return _flat([routing.ravel() for routing in each], np.uint8)


def _flat(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype=dtype)


def _offsets(lengths: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
