"""The recipe that a side of a comparison runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from redline.child import Child
from redline.lab.compare.process import _recipe
from redline.lab.compare.worker import environment_of


def test_a_recipe_that_stops_at_a_target_can_be_compared(tmp_path: Path) -> None:
    """Nothing is evaluated in a comparison, so that there is no target either."""
    values = {
        "model": {"path": "builtin:tiny"},
        "rollouts": {"task": {"kind": "import", "path": "tests:Fake"}, "evaluation": {"every": 5, "stop_at": 0.9}},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(values))
    config = _recipe({"recipe": str(recipe), "overrides": [], "seed": 3})
    assert (config.rollouts.evaluation.num_tasks, config.rollouts.evaluation.stop_at) == (0, None)
    assert config.run.seed == 3


def test_a_side_finds_its_own_source_first_and_then_what_the_user_has_on_his_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, words in (("source", "from the source"), ("user", "from the user")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "shared_name.py").write_text(f"WORDS = {words!r}")
    (tmp_path / "user" / "own_rewards.py").write_text("WORDS = 'mine'")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "user"))
    asks = "import json, own_rewards, shared_name; print(json.dumps([own_rewards.WORDS, shared_name.WORDS]))"
    with Child([sys.executable, "-P", "-c", asks], environment_of(tmp_path / "source")) as child:
        assert child.read() == ["mine", "from the source"]


def test_a_model_of_the_cache_is_found_whatever_the_folder_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache #2: [a]"))
    recipe = tmp_path / "recipe.yaml"
    values = {"model": {"path": "builtin:tiny"}, "rollouts": {"task": {"kind": "import", "path": "tests:Fake"}}}
    recipe.write_text(json.dumps(values))
    config = _recipe({"recipe": str(recipe), "overrides": [], "seed": 3})
    assert Path(config.model.path).parent == tmp_path / "cache #2: [a]" / "redline" / "models"
