"""Groups that say which they are, and group stores that hold some."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.fakes import trajectory

from redline.buffer.store.group_store import GroupStore
from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.types import Failure, FinishReason, Trajectory, TrajectoryGroup, VersionSpan

SIGNAL = (1.0, -1.0)


def attempts(version: int = 6) -> list[Trajectory]:
    """One of every kind: all fields set, cut short in two turns, failed."""
    right = trajectory(
        [1, 2], [3, 4, 5], version=version, text="ünïcode 🙂\n", reward=1.25, reward_parts={"correct": 1.0, "format": 0.5}
    )
    two_turns = trajectory(
        [1, 2], [9, 9, 9], versions=VersionSpan(version - 1, version), finish_reason=FinishReason.LENGTH, text=""
    )
    two_turns.loss_mask[3] = False
    failed = trajectory([7], [8, 8], version=version, failure=Failure("reward", "ValueError: no number"))
    return [right, two_turns, failed]


def numbered(number: int, advantages: Sequence[float] = SIGNAL, *, version: int = 0, **fields: Any) -> TrajectoryGroup:
    """Attempts of 1, 2, 3, … tokens that say which group they are of."""
    made = [
        trajectory(range(10, 13), [100 + number] * (i + 1), version=version, reward=float(a), **fields)
        for i, a in enumerate(advantages)
    ]
    return TrajectoryGroup(f"task/{number}", made, np.array(advantages, dtype=np.float32), number)


def filled(folder: Path, num_groups: int, **settings: Any) -> TrajectoryStore:
    store = TrajectoryStore(folder, **settings)
    store.begin(range(num_groups), 0)
    for number in range(num_groups):
        store.add(numbered(number))
    return store


def make_resumable(store: GroupStore) -> None:
    """Checkpoint 5, and everything that may have happened since."""
    sampled = {0: 3, 1: 5, 2: 5, 3: 6, 4: 5, 5: 7, 6: 5, 7: 4}
    store.begin(range(10), 3)
    for number, version in sampled.items():
        store.add(numbered(number, version=version))
    for number, version in {0: 4, 1: 5, 3: 6}.items():
        store.lease([number], version)
        store.trained([number], version)
    store.lease([2], 7)
    store.drop([6, 7], "stale")


def ready_numbers(store: GroupStore) -> list[int]:
    return [info.index for info in store.ready()]


def num_segments(store: TrajectoryStore) -> int:
    return len(list(store.folder.glob("segment-*.arrow")))


def without_seconds(row: dict[str, Any]) -> dict[str, Any]:
    """A row of a segment without what differs from run to run: how long things took, and the checksum over that."""
    turns = [{key: value for key, value in turn.items() if not key.endswith("_s")} for turn in row["turns"]]
    return {key: value for key, value in row.items() if key not in ("checksum", "score_s")} | {"turns": turns}
