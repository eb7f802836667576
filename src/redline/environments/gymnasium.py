"""Gymnasium's environments as games in text: the policy sees what they render as text, and names an action.

Actions are numbers (`Discrete`), which may have names, or texts (`Text`). FrozenLake, CliffWalking, Taxi and Blackjack have
rules and names here; any other environment of such actions works with `rules` and `actions` of the recipe's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import gymnasium
from gymnasium import spaces

from redline.environments.drawn import seeded_task
from redline.errors import ConfigError
from redline.types import Reaction, Task

PARAMS = "rollouts.environment.params"
COLOURED = re.compile(r"\x1b\[([\d;]*)m(.?)\x1b\[0m", re.DOTALL)
MARKS = {"41": "[{}]", "43": "[{}]", "42": "[*]", "34;1": "({})", "35": "<{}>"}
"""What stands for a colour of a rendered cell: colours say where the player is, and a model sees none."""
MOVES = ("left", "down", "right", "up")


@dataclass(slots=True, frozen=True)
class Known:
    """How to explain an environment to a model."""

    rules: str
    actions: Sequence[str]


KNOWN: Mapping[str, Known] = {
    "Blackjack": Known("Blackjack: come closer to 21 than the dealer, and not above.", ("stick", "hit")),
    "CliffWalking": Known(
        "You are x. Reach T. C is a cliff: it costs 100 and brings you back. Each move costs 1.",
        ("up", "right", "down", "left"),
    ),
    "FrozenLake": Known("You are at [ ]. Reach G over the frozen lake F and avoid the holes H.", MOVES),
    "Taxi": Known(
        "[ ] is your taxi, [*] with the passenger in it; (X) is where the passenger waits, <X> the destination. | is a wall.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
    ),
}


class Gymnasium:
    """One environment of gymnasium, by its id. Implements `ports.Game` and brings its own tasks: one for each seed.

    The reward is the sum of the environment's own. A reply without an action is answered with the actions there are; it is no
    move, and `max_invalid` of them in an attempt end it."""

    def __init__(
        self,
        env_id: str,
        seed: int = 0,
        kwargs: Mapping[str, Any] | None = None,
        rules: str | None = None,
        actions: Sequence[str] | None = None,
        max_steps: int = 100,
        max_invalid: int = 3,
    ) -> None:
        """`kwargs` go to `gymnasium.make`. `rules` come first in each attempt; `actions` name the actions from the first on.
        An attempt ends after `max_steps` moves, if its environment has not ended it before."""
        self._id, self._seed = env_id, seed
        self._env = _made(env_id, dict(kwargs or {}))
        known = KNOWN.get(env_id.partition("-")[0], Known("", ()))
        self._rules = known.rules if rules is None else rules
        self._actions = _Actions(self._env.action_space, known.actions if actions is None else actions)
        self._max_steps, self._max_invalid = max_steps, max_invalid
        self._num_steps = self._num_invalid = 0

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, index: int) -> Task:
        return seeded_task(self._id, self._seed, "train", index)

    def held_out(self, count: int) -> list[Task]:
        return [seeded_task(self._id, self._seed, "held_out", index) for index in range(count)]

    # ── one game ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def reset(self, task: Task) -> str:
        self._num_steps = self._num_invalid = 0
        observation, _ = self._env.reset(seed=int(task.data["seed"]))
        self._env.action_space.seed(int(task.data["seed"]))
        return "\n".join(part for part in (self._rules, self._shown(observation), self._actions.in_words) if part)

    def step(self, reply: str) -> Reaction:
        action = self._actions.read(reply)
        if action is None:
            self._num_invalid += 1
            return Reaction(f"No action. {self._actions.in_words}", done=self._num_invalid >= self._max_invalid)
        self._num_steps += 1
        observation, reward, terminated, truncated, _ = self._env.step(action)
        done = bool(terminated or truncated) or self._num_steps >= self._max_steps
        return Reaction(self._shown(observation), float(reward), done)

    def close(self) -> None:
        self._env.close()

    def _shown(self, observation: Any) -> str:
        if self._env.render_mode == "ansi":
            return as_plain_text(str(self._env.render()))
        if self._id.startswith("Blackjack"):
            mine, dealers, has_ace = observation
            return f"You have {mine}{' with an ace that counts 11' if has_ace else ''}, the dealer shows {dealers}."
        return str(observation.tolist() if hasattr(observation, "tolist") else observation)


class _Actions:
    """The actions of an environment, as a model names them."""

    def __init__(self, space: Any, names: Sequence[str]) -> None:
        self._is_text = isinstance(space, spaces.Text)
        if not self._is_text and not isinstance(space, spaces.Discrete):
            raise ConfigError(
                f"gymnasium: actions of the kind {type(space).__name__} cannot be named in text",
                f"set {PARAMS}.env_id to an environment with Discrete or Text actions, or wrap it in a game of your own",
            )
        self._space = space
        self._first = 0 if self._is_text else int(space.start)
        self._count = 0 if self._is_text else int(space.n)
        if len(names) > self._count:
            raise ConfigError(f"gymnasium: {len(names)} names for {self._count} actions", f"shorten {PARAMS}.actions")
        self._names = [name.lower() for name in names]

    @property
    def in_words(self) -> str:
        if self._is_text:
            return ""
        if not self._names:
            return f"Actions: {self._first} to {self._first + self._count - 1}."
        return "Actions: " + ", ".join(f"{self._first + place} {name}" for place, name in enumerate(self._names)) + "."

    def read(self, reply: str) -> Any:
        """The action of a reply: the last that it names, by its name or its number; None where it names none."""
        if self._is_text:
            return reply.strip() if self._space.contains(reply.strip()) else None
        found = None
        for word in re.findall(r"[^\W\d_]+|\d+", reply.lower()):
            if word in self._names:
                found = self._first + self._names.index(word)
            elif word.isdecimal() and len(word) < 10 and self._first <= int(word) < self._first + self._count:
                found = int(word)
        return found


def _made(env_id: str, kwargs: dict[str, Any]) -> Any:
    try:
        if "render_mode" not in kwargs and _renders_text(env_id):
            kwargs = {**kwargs, "render_mode": "ansi"}
        return gymnasium.make(env_id, **kwargs)
    except (gymnasium.error.Error, TypeError, ImportError) as error:
        raise ConfigError(
            f"gymnasium.make({env_id!r}) raised {type(error).__name__}: {error}",
            f"set {PARAMS}.env_id to an id that gymnasium knows (such as FrozenLake-v1) and {PARAMS}.kwargs to what it takes",
        ) from error


@cache
def _renders_text(env_id: str) -> bool:
    env = gymnasium.make(env_id)
    env.close()
    return "ansi" in (env.metadata.get("render_modes") or ())


def as_plain_text(rendered: str) -> str:
    """What an environment renders for a terminal, with marks instead of colours."""
    marked = COLOURED.sub(lambda found: MARKS.get(found[1], "{}").format(found[2]), rendered)
    return re.sub(r"\x1b\[[\d;]*m", "", marked).strip("\n")
