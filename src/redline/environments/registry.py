"""The environments that ship, by name. Nothing is imported here: `redline env list` needs none of their packages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Shipped:
    """An environment that a recipe may name."""

    path: str
    """`package.module:Class`, called as `Class(seed=..., **params)`; an `Environment`, or a `Game` that is made anew for each
    attempt."""
    what: str
    """One line for a list."""
    extra: str | None = None
    """The extra that brings what it imports."""


ENVIRONMENTS: dict[str, Shipped] = {
    "calculator": Shipped(
        "redline.environments.calculator:Calculator", "sums too large for the head, and a calculator to call"
    ),
    "code": Shipped(
        "redline.environments.code.environment:Code", "programs for built-in problems, run in a sandbox against tests"
    ),
    "code_rows": Shipped(
        "redline.environments.code.environment:CodeRows", "the same for tasks of rollouts.task, whose rows have a field `tests`"
    ),
    "diplomacy": Shipped(
        "redline.environments.diplomacy.environment:Diplomacy", "self-play of seven powers on the standard map", "diplomacy"
    ),
    "guess_number": Shipped("redline.environments.guess_number:GuessNumber", "guess a number with the hints higher and lower"),
    "gymnasium": Shipped(
        "redline.environments.gymnasium:Gymnasium",
        "any gymnasium environment of named or numbered actions, as text",
        "gymnasium",
    ),
    "openenv": Shipped(
        "redline.environments.openenv:OpenEnvGame",
        "an OpenEnv environment in this process: params.environment",
        "openenv",
    ),
    "openenv_server": Shipped(
        "redline.environments.openenv:OpenEnvServer", "an OpenEnv environment that runs as a server: params.url", "openenv"
    ),
    "textarena": Shipped(
        "redline.environments.textarena:TextArena", "any game of TextArena by its id, alone or as self-play", "textarena"
    ),
    "verifiers": Shipped(
        "redline.environments.verifiers:Verifiers", "an environment of verifiers, as it is: params.env", "verifiers"
    ),
}
