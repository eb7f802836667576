"""`redline simulate` on a run of a real process: replayed, it takes what it took."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.processes import only_run, succeed, write_letters

SLOW = """
import time
from letters import Letters


class Slow(Letters):
    def score(self, task, text):
        time.sleep(0.01)
        return len(text) % 3
"""


@pytest.mark.slow
def test_a_run_whose_rewards_take_long_is_replayed_with_them_and_answers_what_longer_ones_cost(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    task = {"kind": "import", "path": "slow:Slow", "folder": "."}
    write_letters(tmp_path, run={"steps": 10}, rollouts={"task": task, "evaluation": {"num_tasks": 0}})
    succeed("train", "letters.yaml", cwd=tmp_path)
    folder = only_run(tmp_path).path
    answer = json.loads(succeed("simulate", folder, "environments=3", "--json", cwd=tmp_path))
    assert abs(answer["error"]) < 0.05
    rewards_s = 32 * 0.01  # one after the other, where the source does not say that several may be computed at once
    assert answer["simulated"]["step_s"] - answer["replayed"]["step_s"] > 1.8 * rewards_s
