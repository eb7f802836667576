"""What `redline env check NAME KEY=VALUE` names."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import ROOT

from redline.errors import ConfigError
from redline.lab.environments.made import Made, read_params, seed_of


def test_parameters_are_read_as_those_of_a_recipe() -> None:
    assert read_params(["rate=1e-2", "sizes=[1, 2]", "name='1e-2'"]) == {"rate": 0.01, "sizes": [1, 2], "name": "1e-2"}


@pytest.mark.parametrize(
    ("given", "reason", "hint"),
    [
        ("day=2024-01-01", "day is datetime", "put it in quotes"),
        ("day=2024-13-01", "not valid YAML", "put the value in quotes"),
        ("levels={1: easy}", "levels has the key 1", "put the key in quotes"),
        ("sizes=[", "not valid YAML", "quote the value"),
        ("rollouts.group_size=4", "without a section", "is changed in its file"),
        ("7=1", "is not of the form KEY=VALUE", "for example"),
    ],
)
def test_parameters_that_a_recipe_cannot_have_are_refused(given: str, reason: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        read_params([given])
    assert hint in caught.value.hint


def test_parameters_for_a_recipe_that_has_no_environment_are_refused() -> None:
    recipe = str(ROOT / "recipes" / "smoke.yaml")
    Made(recipe).make()
    with pytest.raises(ConfigError, match="names no environment that takes largest"):
        Made(recipe, {"largest": 5}).make()


def test_a_recipe_is_checked_with_its_own_seed(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("run: {seed: 7}\nmodel: {path: builtin:tiny}\nrollouts: {environment: {name: guess_number}}\n")
    assert (seed_of(str(recipe), None), seed_of(str(recipe), 3), seed_of("guess_number", None)) == (7, 3, 0)
