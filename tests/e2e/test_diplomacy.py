"""A recipe plays Diplomacy, and a game can be played again from what the run has stored."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("diplomacy")

from support.paths import ROOT

import redline
from redline.environments.diplomacy.environment import Diplomacy
from redline.environments.states import write_states
from redline.models.files.tiny import write_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The smallest model, with room for the prompts: they are a token per byte."""
    folder = tmp_path / "model"
    write_tiny_model(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 8192}))
    return folder


def test_a_run_plays_from_states_and_its_game_is_played_again(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    states = tmp_path / "diplomacy.states"
    write_states(states, Diplomacy(warm_up=6), 8)
    run = redline.train(
        ROOT / "recipes" / "diplomacy.yaml",
        {
            "run.folder": str(tmp_path / "runs"),
            "run.steps": 1,
            "model.path": str(model),
            "rollouts.groups_per_step": 2,
            "rollouts.group_size": 2,
            "rollouts.environment.params": {"states": str(states), "phases": 2, "show_map": False, "tokens_per_order": 2},
            "rollouts.evaluation.num_tasks": 1,
        },
    )
    rows = run.trajectories().to_pylist()
    assert {row["attempt"] for row in rows} == {0, 1}
    assert all(row["failure"] is None for row in rows)
    assert all(len(row["turns"]) == 1 for row in rows)
    program = load(ROOT / "benchmarks" / "diplomacy" / "show_game.py")
    group = rows[0]["group"]
    phases = list(program.played_again(run, group, program.stored_rows(run, group, 1)))
    assert len(phases) == 2
    assert sum(len(phase.replies) for phase in phases) == sum(row["group"] == group and row["attempt"] == 1 for row in rows)
    program.check_rewards(phases, program.stored_rows(run, group, 1))
    program.print_table(phases[0])
    assert phases[0].position.phase in capsys.readouterr().out


def load(path: Path):  # type: ignore[no-untyped-def] # a module
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
