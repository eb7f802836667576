"""Run folders with trajectories of chosen lengths, for tests of what replays them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from support.fakes import trajectory

from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.config import resolve, validate
from redline.telemetry import RunFolder
from redline.types import TrajectoryGroup

PROMPT = [5, 6, 7]


def write_recorded(path: Path, steps: Sequence[Sequence[Sequence[int]]]) -> Path:
    """A run over letters; step → group → tokens that each attempt sampled."""
    path.mkdir()
    folder = RunFolder(path)
    recipe = {
        "run": {"device": "cpu", "num_threads": 1, "seed": 3},
        "model": {"path": "builtin:tiny", "dtype": "float32"},
        "rollouts": {
            "task": {"kind": "import", "path": "redline.lab.material.tasks:Letters"},
            "groups_per_step": len(steps[0]),
            "group_size": len(steps[0][0]),
            "max_new_tokens": 64,
            "evaluation": {"num_tasks": 0},
        },
    }
    config = resolve(validate(recipe, "a test")).config
    folder.config.write_text(json.dumps(config.model_dump(mode="json")))
    store, number = TrajectoryStore(folder.trajectories), 0
    for version, groups in enumerate(steps):
        numbers = range(number, number + len(groups))
        store.begin(numbers, version)
        for own, lengths in zip(numbers, groups, strict=True):
            attempts = [trajectory(PROMPT, [9] * length, version=version) for length in lengths]
            advantages = np.linspace(-1, 1, len(lengths), dtype=np.float32)
            store.add(TrajectoryGroup(f"letters/{own}", attempts, advantages, own))
        store.lease(numbers, version)
        store.trained(numbers, version)
        number += len(groups)
    store.close()
    return path
