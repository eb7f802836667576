"""`redline train` with environments of other packages, each unchanged. Every package has an environment of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

SMALL = {
    "run": {"steps": 2, "name": "small"},
    "model": {"path": "builtin:tiny"},
    "rollouts": {"groups_per_step": 2, "group_size": 4, "max_new_tokens": 8, "evaluation": {"num_tasks": 2}},
}
GUESS = """
import verifiers as vf
from datasets import Dataset

class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        return [{"role": "user", "content": "No. Again?"}]

def length(completion):
    return len(completion[0]["content"]) / 10

def load_environment():
    rows = Dataset.from_list([{"question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(20)])
    return Guess(dataset=rows, rubric=vf.Rubric(funcs=[length]), max_turns=3)
"""


def trained(folder: Path, name: str, params: dict[str, Any], *overrides: str) -> list[dict[str, Any]]:
    """The rows of metrics of a run."""
    recipe = SMALL | {"rollouts": {**SMALL["rollouts"], "environment": {"name": name, "params": params}}}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    command = [sys.executable, "-m", "redline", "train", "recipe.yaml", *overrides]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [metrics] = folder.glob("runs/*/metrics.jsonl")
    return [json.loads(line) for line in metrics.read_text().splitlines()]


@pytest.mark.parametrize("overrides", [(), ("buffer.max_lag=1",)], ids=["lockstep", "beside the trainer"])
def test_an_environment_of_verifiers_trains(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    pytest.importorskip("verifiers.envs")
    (tmp_path / "three_guesses.py").write_text(GUESS)
    rows = trained(tmp_path, "verifiers", {"env": "three_guesses"}, *overrides)
    assert len(rows) == 2
    assert all(row["rollouts/failures"] == 0 for row in rows)
    collected = [row for row in rows if row["rollouts/groups"]]  # beside the trainer a step may find them all made
    assert sum(row["rollouts/groups"] for row in collected) >= 4
    assert all(row["rollouts/reward_length_mean"] > 0 for row in collected)


def test_an_environment_of_openenv_trains_in_process(tmp_path: Path) -> None:
    pytest.importorskip("openenv.core")
    command = [sys.executable, "-c", "from openenv.cli.__main__ import main; main()", "init", "my_echo"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    path = "my_echo.server.my_echo_environment:MyEchoEnvironment"
    rows = trained(tmp_path, "openenv", {"environment": path, "instructions": "Say something.", "max_steps": 2})
    assert len(rows) == 2
    assert all(row["rollouts/failures"] == 0 and row["rollouts/reward_mean"] > 0 for row in rows)
