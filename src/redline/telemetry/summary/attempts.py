"""How the attempts went that arrived during a step: rewards, turns, failures and seconds, for its row of metrics.

Rewards are counted once for each role of each attempt, everything else once for each attempt, however many sequences it has. An
attempt that failed has no reward: it counts among the failures, and in no mean of rewards.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from redline.telemetry.summary.percentiles import latency_metrics, phase_metrics
from redline.types import FinishReason, Trajectory, TrajectoryGroup, by_attempt

MAX_PARTS = 64
"""Parts of rewards that have a metric in a row."""
FEW_PARTS = 8
"""So many have one in any case."""


def attempt_metrics(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """The metrics of a step that its attempts alone decide."""
    attempts = [own for group in groups for own in group.attempts]
    return {
        **reward_metrics("rollouts", [own for group in groups for own in by_attempt(group.trajectories, by_role=True)]),
        "rollouts/groups": len(groups),
        "rollouts/groups_with_signal": sum(group.has_signal for group in groups),
        "rollouts/attempts": len(attempts),
        "rollouts/cut_off": sum(group.num_cut_off for group in groups),
        **_failure_metrics([own[0] for own in attempts]),
        "rollouts/stopped_fraction": _mean([all(reason == FinishReason.STOP for reason in _endings(own)) for own in attempts]),
        **length_metrics("rollouts", attempts),
        **_expected_lengths(groups),
        "rollouts/sequences_mean": _mean([len(own) for own in attempts]),
        **_turn_metrics(attempts),
        **latency_metrics(groups),
        **phase_metrics(groups),
    }


def length_metrics(section: str, attempts: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """How long the attempts were, and how many of them a limit ended, from the sequences of each."""
    return {
        f"{section}/truncated_fraction": _mean([_is_truncated(own) for own in attempts]),
        f"{section}/completion_tokens_mean": _mean([sum(t.num_completion_tokens for t in own) for own in attempts]),
    }


def _expected_lengths(groups: Sequence[TrajectoryGroup]) -> dict[str, float]:
    """How well the lengths of earlier attempts at the tasks foretold these. Attempts that sampled nothing do not count."""
    found = [(group.expected_tokens, [length for length in group.lengths if length]) for group in groups]
    known = [(expected, sum(lengths) / len(lengths)) for expected, lengths in found if expected is not None and lengths]
    error = {"rollouts/expected_error": _mean([abs(e - m) / m for e, m in known])} if known else {}
    return {"rollouts/expected_fraction": _mean([group.expected_tokens is not None for group in groups]), **error}


def reward_metrics(section: str, by_role: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    """Means of the rewards, of their parts and of each role, from the sequences of each role of each attempt."""
    scored = [own[0] for own in by_role if own[0].failure is None]
    roles = sorted({t.role for t in scored if t.role})
    return {
        f"{section}/reward_mean": _mean([t.reward for t in scored]),
        **_part_means(section, scored),
        **{f"{section}/role_{role}_reward_mean": _mean([t.reward for t in scored if t.role == role]) for role in roles},
        f"{section}/reward_std": _std([t.reward for t in scored]),
    }


def _part_means(section: str, scored: Sequence[Trajectory]) -> dict[str, float]:
    """A part that an attempt does not have counts as 0, among the roles of which some have it. Where there are many parts,
    those that one attempt alone has are only counted: names that are new every time would make metrics for ever."""
    roles: dict[str, set[str]] = {}
    counts = Counter(name for t in scored for name in t.reward_parts)
    shown = {name for name, count in counts.most_common(MAX_PARTS) if count > 1 or len(counts) <= FEW_PARTS}
    for t in scored:
        for name in shown & t.reward_parts.keys():
            roles.setdefault(name, set()).add(t.role)
    left_out = {f"{section}/parts_left_out": len(counts) - len(shown)} if len(counts) > len(shown) else {}
    return left_out | {
        f"{section}/reward_{name}_mean": _mean([t.reward_parts.get(name, 0.0) for t in scored if t.role in roles[name]])
        for name in sorted(roles)
    }


def _failure_metrics(attempts: Sequence[Trajectory]) -> dict[str, float]:
    """One sequence of each attempt."""
    stages = Counter(t.failure.stage for t in attempts if t.failure is not None)
    return {
        "rollouts/failures": stages.total(),
        **{f"rollouts/failures_{stage}": count for stage, count in sorted(stages.items())},
        "rollouts/retries": sum(t.retries for t in attempts),
        "rollouts/truncated": sum(t.truncated for t in attempts),
    }


def _turn_metrics(attempts: Sequence[Sequence[Trajectory]]) -> dict[str, float]:
    turns = [sum(len(t.turns) for t in own) for own in attempts]
    calls = [sum(len(turn.tool_calls) for t in own for turn in t.turns) for own in attempts]
    bad = sum(bool(turn.problem) for own in attempts for t in own for turn in t.turns)
    tools = {"rollouts/tool_calls_mean": _mean(calls), "rollouts/bad_tool_calls": bad} if any(calls) or bad else {}
    return {"rollouts/turns_mean": _mean(turns), "rollouts/turns_max": max(turns, default=math.nan), **tools}


def _endings(attempt: Sequence[Trajectory]) -> list[FinishReason]:
    """Why each reply of an attempt ended; where none is known, why its sequences did."""
    return [turn.finish_reason for t in attempt for turn in t.turns] or [t.finish_reason for t in attempt]


def _is_truncated(attempt: Sequence[Trajectory]) -> bool:
    """Whether a limit ended a reply, or the attempt had used up its budget."""
    return attempt[0].truncated or FinishReason.LENGTH in _endings(attempt)


def _std(values: Sequence[float]) -> float:
    """Exactly 0 where all values are equal; NaN where there are none."""
    return (float(np.std(values)) if len(set(values)) > 1 else 0.0) if values else math.nan


def _mean(values: Sequence[float]) -> float:
    """NaN where there are no values, which a row of metrics has as null."""
    return sum(values) / len(values) if values else math.nan
