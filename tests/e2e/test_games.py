"""Recipes that play games of other packages, unchanged: in the event loop and in worker processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.paths import ROOT

import redline

pytestmark = pytest.mark.slow

GAMES: dict[str, dict[str, Any]] = {
    "gymnasium": {"run_in": "processes", "workers": 2, "params": {"env_id": "FrozenLake-v1", "max_invalid": 2}},
    "textarena": {"params": {"env_id": "TicTacToe-v0", "players": 2}},
}


@pytest.mark.parametrize("name", GAMES)
def test_a_game_of_another_package_is_trained_on_as_it_is(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    run = redline.train(
        ROOT / "recipes" / "calculator.yaml",
        {
            "run.folder": str(tmp_path),
            "run.steps": 2,
            "model.path": "builtin:tiny",
            "rollouts.environment": {"name": name, **GAMES[name]},
            "rollouts.reward_weights": {},
            "rollouts.groups_per_step": 2,
            "rollouts.group_size": 3,
            "rollouts.evaluation": {"num_tasks": 2},
        },
    )
    rows = run.metrics().to_pylist()
    assert [row["rollouts/attempts"] for row in rows] == [6, 6]
    assert all(row["rollouts/failures"] == 0 for row in rows)
    assert all(row["rollouts/turns_mean"] > 1 for row in rows)
    if name == "textarena":
        assert rows[0]["rollouts/role_player_0_reward_mean"] == -1.0
