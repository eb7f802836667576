"""Attempts of several sequences: a game of two roles, played over several turns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from support.fakes import trajectory

from redline.types import Failure, FinishReason, ToolCall, Trajectory, TrajectoryGroup, Turn, VersionSpan

REWARDS = ((1.0, -1.0), (0.0, 0.5), (0.5, 0.5))
"""What white and black got in each attempt that did not fail."""
BROKEN = Failure("environment", "RuntimeError: the board is gone", "board.py:7, in step: raise RuntimeError")


def turn(start: int, end: int, *, version: int = 0, **fields: Any) -> Turn:
    """A reply that took 0.1 s in the queue, 0.2 s of prefill, 0.4 s of decoding, after 0.8 s of the environment."""
    values: dict[str, Any] = {"finish_reason": FinishReason.STOP, "queue_s": 0.1, "prefill_s": 0.2, "decode_s": 0.4}
    values |= {"environment_s": 0.8, "prompt_s": 0.01, "parse_s": 0.02, "versions": VersionSpan(version, version)}
    return Turn(text="", start=start, end=end, **values | fields)


def sequence(turns: Sequence[Turn], length: int, **fields: Any) -> Trajectory:
    """One sequence of `length` tokens, of which those of the turns are chosen by the policy."""
    mask = np.zeros(length, dtype=np.bool_)
    for each in turns:
        mask[each.start : each.end] = True
    return trajectory(range(10, 10 + length), [], loss_mask=mask, turns=turns, **fields)


def game(attempt: int, *, version: int = 0, failure: Failure | None = None, retries: int = 0) -> list[Trajectory]:
    """Three sequences: two of white, of two turns and of one that calls a tool, and one of black that was cut short."""
    white, black = (0.0, 0.0) if failure else REWARDS[attempt]
    common: dict[str, Any] = {"attempt": attempt, "failure": failure, "score_s": 0.5, "retries": retries, "version": version}
    common["truncated"] = attempt == 1
    first = [turn(3, 5, version=version), turn(8, 10, version=version, environment_s=0.4)]
    call = turn(4, 8, version=version, tool_calls=(ToolCall("move", {"to": "e4"}),))
    cut = turn(2, 6, version=version, finish_reason=FinishReason.LENGTH)
    parts = {} if failure else {"won": white}
    return [
        sequence(first, 10, role="white", reward=white, reward_parts=parts, **common),
        sequence([call], 8, role="white", reward=white, reward_parts=parts, **common),
        sequence([cut], 6, role="black", reward=black, finish_reason=FinishReason.LENGTH, **common),
    ]


def played(index: int = 0, *, version: int = 0) -> TrajectoryGroup:
    """Four attempts of three sequences each; the last one failed, the one before had failed once."""
    attempts = [*(game(i, version=version, retries=int(i == 2)) for i in range(3)), game(3, version=version, failure=BROKEN)]
    advantages = [a for white, black in REWARDS for a in (white - 0.5, white - 0.5, black)] + [0.0] * 3
    sequences = [sequence for attempt in attempts for sequence in attempt]
    return TrajectoryGroup(f"game/{index}", sequences, np.array(advantages, dtype=np.float32), index)
