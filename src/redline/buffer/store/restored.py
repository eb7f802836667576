"""Groups of the store as they were when they came, so that a later process can count those of an earlier one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from redline.buffer.store.stored_groups import Run
from redline.types import Failure, FinishReason, Trajectory, TrajectoryGroup, VersionSpan


def restored_group(run: Run) -> TrajectoryGroup:
    """The rows of one group. Rewards come back as float32, failures by their text."""
    rows = run.batch.slice(run.first, run.last - run.first).to_pylist()
    return TrajectoryGroup(
        task_id=rows[0]["task_id"],
        trajectories=[_trajectory(row) for row in rows],
        advantages=run.column("advantage").copy(),
        index=rows[0]["group"],
    )


def _trajectory(row: Mapping[str, Any]) -> Trajectory:
    stage, _, reason = (row["failure"] or "").partition(": ")
    return Trajectory(
        token_ids=np.array(row["token_ids"], dtype=np.int32),
        loss_mask=np.array(row["loss_mask"], dtype=np.bool_),
        logprobs=np.array(row["logprobs"], dtype=np.float32),
        versions=VersionSpan(row["oldest_version"], row["newest_version"]),
        finish_reason=FinishReason(row["finish_reason"]),
        text=row["text"],
        reward=row["reward"],
        reward_parts={part["name"]: part["value"] for part in row["reward_parts"]},
        failure=None if row["failure"] is None else Failure(stage, reason),
    )
