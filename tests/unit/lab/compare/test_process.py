"""The recipe that a side of a comparison runs."""

from __future__ import annotations

import json
from pathlib import Path

from redline.lab.compare.process import _recipe


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
