"""An environment by its name, made as often as it is wanted."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from redline.config.installation import how_to_install, missing_packages
from redline.environments.registry import ENVIRONMENTS
from redline.errors import ConfigError, RedlineError, TaskError, boundary
from redline.ports import Environment, Game, TaskSource


@dataclass(slots=True, frozen=True)
class Made:
    """What `redline env check NAME KEY=VALUE` names."""

    name: str
    """Of `redline env list`, or `module:Class`."""
    params: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def make(self) -> Environment:
        """A new environment, made as a run makes it. Raises RedlineError where that does not work."""
        return self._made()

    def game(self) -> Game | None:
        """A new game, where that is what it is."""
        return None

    def tasks(self, environment: Environment) -> TaskSource:
        """Where its tasks come from."""
        if not all(callable(getattr(environment, method, None)) for method in ("train", "held_out")):
            raise TaskError(
                f"{self.name} brings no tasks of its own", "give it the methods `train(index)` and `held_out(count)`"
            )
        return environment  # type: ignore[return-value] # nobody asks it for `score`

    def _made(self) -> Any:
        factory = self._factory()
        with boundary() as caught:
            made = factory(seed=self.seed, **self.params)
        if isinstance(caught.error, RedlineError):
            raise caught.error
        if caught.error is not None:
            raise TaskError(f"{self.name} could not be made: {type(caught.error).__name__}: {caught.error}") from caught.error
        return made

    def _factory(self) -> Callable[..., Any]:
        module, _, name = self._path().partition(":")
        if str(Path.cwd()) not in sys.path:
            sys.path.append(str(Path.cwd()))
        found: Callable[..., Any] | None = None
        with boundary() as caught:
            found = getattr(importlib.import_module(module), name)
        if found is not None:
            return found
        raise TaskError(f"{self.name}: {caught.error}") from caught.error

    def _path(self) -> str:
        if ":" in self.name:
            return self.name
        if self.name not in ENVIRONMENTS:
            near = difflib.get_close_matches(self.name, ENVIRONMENTS, n=1)
            hint = f"did you mean {near[0]}?" if near else "`redline env list` prints all; your own is module:Class"
            raise ConfigError(f"there is no environment {self.name!r}", hint)
        shipped = ENVIRONMENTS[self.name]
        if shipped.extra and (missing := missing_packages(shipped.extra)):
            raise ConfigError(f"{self.name} needs {' and '.join(missing)}", how_to_install(shipped.extra))
        return shipped.path


def read_params(overrides: Sequence[str]) -> dict[str, Any]:
    """`KEY=VALUE` words as keyword arguments; values are YAML."""
    params: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.isidentifier():
            raise ConfigError(f"{override!r} is not of the form KEY=VALUE", "for example largest=100")
        try:
            params[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"{override!r}: not valid YAML", "quote the value") from error
    return params
