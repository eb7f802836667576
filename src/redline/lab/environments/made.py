"""An environment by its name, or that of a recipe, made as often as it is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.config import Config, load_recipe
from redline.config.as_json import refuse_what_json_changes
from redline.config.load import parse_yaml
from redline.config.sections.environment import EnvironmentConfig
from redline.environments.single_turn import SingleTurn
from redline.environments.stepped import Stepped
from redline.errors import ConfigError, TaskError
from redline.launch.environments import make_environment, task_source
from redline.ports import Environment, Game, TaskSource
from redline.rollouts import make_task_source

RECIPES = (".yaml", ".yml")


@dataclass(slots=True, frozen=True)
class Made:
    """What `redline env check NAME KEY=VALUE` names."""

    name: str
    """A name of `redline env list`, `module:Class`, or a recipe's file."""
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    overrides: Sequence[str] = ()
    """`SECTION.KEY=VALUE` of a recipe."""

    @property
    def recipe(self) -> Config | None:
        """The recipe that it names; None where it names an environment."""
        return recipe_of(self.name, self.overrides)

    def make(self) -> Environment:
        """A new environment, made as a run makes it. Raises RedlineError where that does not work."""
        config = self.recipe
        if config is None:
            return make_environment(EnvironmentConfig(name=self.name, params=dict(self.params)), self.seed)
        if config.rollouts.environment.name is None:
            assert config.rollouts.task is not None, "a recipe has tasks or an environment"
            if self.params:
                what = f"{self.name} names no environment that takes {', '.join(self.params)}"
                raise ConfigError(what, "leave it out; a key of the recipe has its section in front: run.seed=3")
            return SingleTurn(make_task_source(config.rollouts.task, self.seed).score)  # type: ignore[arg-type]
        params = {**config.rollouts.environment.params, **self.params}
        return make_environment(config.rollouts.environment.model_copy(update={"params": params}), self.seed)

    def game(self) -> Game | None:
        """A new game, where that is what it is."""
        environment = self.make()
        game: Game | None = environment.game_class.make() if isinstance(environment, Stepped) else None
        return game

    def tasks(self, environment: Environment) -> TaskSource:
        """Where its tasks come from: its recipe, or itself."""
        config = self.recipe
        if config is not None:
            return task_source(config, None if isinstance(environment, SingleTurn) else environment)
        if not all(callable(getattr(environment, method, None)) for method in ("train", "held_out")):
            raise TaskError(
                f"{self.name} brings no tasks of its own",
                "name a recipe that has its tasks instead, or give it the methods `train(index)` and `held_out(count)`",
            )
        return environment  # type: ignore[return-value] # nobody asks it for `score`


def named(name: str, words: Sequence[str], seed: int | None) -> Made:
    """What a command line names. Behind a recipe, words with a section replace its values, as for every other verb; all others
    are parameters of the environment. The seed is the one given, else that of the recipe, else 0. Raises ConfigError."""
    overrides = [word for word in words if _is_override(word)] if name.endswith(RECIPES) else []
    params = read_params([word for word in words if word not in overrides])
    recipe = recipe_of(name, overrides)
    return Made(name, params, seed if seed is not None else recipe.run.seed if recipe else 0, overrides)


def recipe_of(name: str, overrides: Sequence[str] = ()) -> Config | None:
    """The recipe whose file `name` is, with its overrides; None where it is none. Raises ConfigError for one that is not there
    or is wrong."""
    return load_recipe(Path(name), overrides) if name.endswith(RECIPES) else None


def _is_override(word: str) -> bool:
    key, equals, _ = word.partition("=")
    return bool(equals) and "." in key and all(part.isidentifier() for part in key.split(".")[:2])


def read_params(overrides: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` words as keyword arguments, read as the `params` of a recipe are. Raises ConfigError."""
    params: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if _is_override(override):
            raise ConfigError(
                f"{override!r}: parameters of the environment are given here, without a section",
                "leave it out, or name a recipe in place of the environment",
            )
        if not equals or not key.isidentifier():
            raise ConfigError(f"{override!r} is not of the form KEY=VALUE", "for example largest=100")
        params[key] = parse_yaml(text, repr(override))
    try:
        return refuse_what_json_changes(params)
    except ValueError as error:
        reason, _, fix = str(error).partition("; ")
        raise ConfigError(reason, fix) from None
