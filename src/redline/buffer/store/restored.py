"""Groups of the store as they were when they came, so that a later process can count those of an earlier one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from redline.buffer.store.columns import SECONDS
from redline.buffer.store.earlier import as_dicts
from redline.buffer.store.stored_groups import Run
from redline.types import Failure, FinishReason, ToolCall, Trajectory, TrajectoryGroup, Turn, VersionSpan
from redline.types.numbers import in_float32


def restored_group(run: Run) -> TrajectoryGroup:
    """The rows of one group. Rewards and seconds come back as float32, failures by their text, turns without theirs; no
    routing."""
    rows = as_dicts(run.batch.slice(run.first, run.last - run.first))
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
        reward=in_float32(row["reward"]),
        reward_parts={part["name"]: in_float32(part["value"]) for part in row["reward_parts"]},
        failure=None if row["failure"] is None else Failure(stage, reason),
        turns=[_turn(turn, row["finish_reason"]) for turn in row["turns"]],
        attempt=row["attempt"],
        role=row["role"],
        score_s=_seconds(row["score_s"]),
        truncated=bool(row["truncated"]),
        retries=row["retries"] or 0,
    )


def _turn(turn: Mapping[str, Any], finish_reason: str) -> Turn:
    """`finish_reason` is the sequence's, for turns that were stored without one."""
    calls = json.loads(turn["tool_calls"] or "[]")
    seconds: dict[str, Any] = {name: _seconds(turn[name]) for name in SECONDS}
    return Turn(
        text="",
        start=turn["start"],
        end=turn["end"],
        versions=VersionSpan(turn["oldest_version"], turn["newest_version"]),
        finish_reason=FinishReason(turn["finish_reason"] or finish_reason),
        tool_calls=[ToolCall(call["name"], call["arguments"]) for call in calls if "name" in call],
        problem=next((call["problem"] for call in calls if "problem" in call), ""),
        switches=[(token, version) for token, version in json.loads(turn["switches"] or "[]")],
        **seconds,
    )


def _seconds(value: float | None) -> float:
    return math.nan if value is None else value
