"""What `redline env check NAME KEY=VALUE` names."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.paths import ROOT

from redline.errors import ConfigError
from redline.lab.environments.made import Made, named, read_params

GUESSING = "run: {seed: 7}\nmodel: {path: builtin:tiny}\nrollouts: {environment: {name: guess_number}}\n"


def test_parameters_are_read_as_those_of_a_recipe() -> None:
    assert read_params(["rate=1e-2", "sizes=[1, 2]", "name='1e-2'"]) == {"rate": 0.01, "sizes": [1, 2], "name": "1e-2"}


@pytest.mark.parametrize(
    ("given", "reason", "hint"),
    [
        ("day=2024-01-01", "day is datetime", "put it in quotes"),
        ("day=2024-13-01", "not valid YAML", "put the value in quotes"),
        ("levels={1: easy}", "levels has the key 1", "put the key in quotes"),
        ("sizes=[", "not valid YAML", "quote the value"),
        ("rollouts.group_size=4", "without a section", "name a recipe in place of the environment"),
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
    recipe.write_text(GUESSING)
    assert [named(*what).seed for what in ((str(recipe), [], None), (str(recipe), [], 3), ("guess_number", [], None))] == [
        7,
        3,
        0,
    ]


def test_values_of_a_recipe_are_replaced_as_for_every_other_verb_and_other_words_are_parameters(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(GUESSING)
    made = named(str(path), ["run.seed=5", "largest=9", "rollouts.environment.params={guesses: 2}"], None)
    assert (made.seed, made.params) == (5, {"largest": 9})
    assert made.recipe is not None
    assert made.recipe.rollouts.environment.params == {"guesses": 2}
    made.make()
    with pytest.raises(ConfigError, match=r"run\.stepz: unknown key"):
        named(str(path), ["run.stepz=5"], None)
    with pytest.raises(ConfigError, match="without a section"):
        named("guess_number", ["run.seed=5"], None)
