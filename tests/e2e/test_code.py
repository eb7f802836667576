"""Programs as answers, from the recipe to the metrics: a run that learns through the sandbox, one with built-in problems."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.code_attacks import tree

import redline

pytestmark = pytest.mark.slow


def recipe(folder: Path, **rollouts: Any) -> dict[str, Any]:
    return {
        "run": {"name": "code", "folder": str(folder / "runs"), "steps": 1},
        "model": {"path": "builtin:tiny"},
        "rollouts": {"groups_per_step": 8, "group_size": 8, "max_new_tokens": 8, "evaluation": {"num_tasks": 0}, **rollouts},
        "trainer": {"learning_rate": 3.0e-3},
    }


def test_a_model_learns_what_a_program_in_the_sandbox_rewards(tmp_path: Path) -> None:
    """The "language" is one that a random model can write: a file with an `e` in it prints yes."""
    rows = [{"prompt": f"Write an e, {n}.", "tests": [{"stdin": "", "stdout": "yes"}]} for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ["sh", "-c", "grep -q '[e-h]' answer.txt && echo yes"]
    environment = {"name": "code_rows", "params": {"command": command, "file": "answer.txt"}}
    task = {"kind": "file", "path": str(tmp_path / "rows.jsonl"), "answer_field": None}
    config = recipe(tmp_path, task=task, environment=environment)
    run = redline.train(config, {"run.steps": 12})
    rewards = [row["rollouts/reward_mean"] for row in run.metrics().to_pylist()]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.5, rewards
    assert all(row["failure"] is None for row in run.trajectories().to_pylist())


def test_built_in_problems_are_played_in_several_turns_and_nothing_is_left(tmp_path: Path) -> None:
    environment = {"name": "code", "params": {"max_turns": 2, "time_s": 2}}
    config = recipe(tmp_path, environment=environment, evaluation={"num_tasks": 2})
    before = set(tree(os.getpid()))
    run = redline.train(config, {"rollouts.groups_per_step": 2, "rollouts.group_size": 2})
    rows = run.trajectories().to_pylist()
    assert all(row["failure"] is None for row in rows)
    assert {len(row["turns"]) for row in rows} == {2}
    (metrics,) = run.metrics().to_pylist()
    assert {"rollouts/reward_passed_mean", "rollouts/reward_runs_mean"} <= metrics.keys()
    assert set(tree(os.getpid())) <= before
