"""TextArena's games, unchanged, by their ids: alone, or as self-play in which each player is a role.

    observation of player 0 ──► policy.say(role="player_0") ──► env.step ──► observation of player 1 ──► …  ──► rewards

Each player has a conversation of his own. Where an observation goes on from the last one, only what is new is said, so that the
conversation keeps its tokens; where it does not (a board that is drawn again), a new conversation begins.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import textarena

from redline.environments.drawn import seeded_task
from redline.errors import ConfigError, boundary, in_words
from redline.ports import Policy, Score
from redline.types import Message, Task

PARAMS = "rollouts.environment.params"


class TextArena:
    """One game of TextArena, by its id. Implements `ports.Environment` and brings its own tasks: one for each seed.

    A player's reward is what the game gives it at its end. Games compute in the event loop, where they take well under a
    millisecond a move, and draw from Python's one source of random numbers: each attempt has a state of its own for it."""

    def __init__(
        self,
        env_id: str,
        seed: int = 0,
        players: int = 1,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        """`kwargs` go to `textarena.make`."""
        if env_id not in textarena.envs.registration.ENV_REGISTRY:
            raise ConfigError(
                f"textarena has no game {env_id!r}", f"set {PARAMS}.env_id to one of its ids, such as GuessTheNumber-v0"
            )
        self._id, self._seed, self._players, self._kwargs = env_id, seed, players, dict(kwargs or {})
        self._refuse_what_cannot_begin()

    def _refuse_what_cannot_begin(self) -> None:
        with boundary() as caught:
            _Game(self._id, self._kwargs, self._players, 0)
        if caught.error is not None:
            raise ConfigError(
                f"textarena: {self._id} with {self._players} player(s) does not begin: {in_words(caught.error)}",
                f"set {PARAMS}.players to how many play it, and {PARAMS}.kwargs to what textarena.make takes for it",
            ) from caught.error

    def train(self, index: int) -> Task:
        return seeded_task(self._id, self._seed, "train", index)

    def held_out(self, count: int) -> list[Task]:
        return [seeded_task(self._id, self._seed, "held_out", index) for index in range(count)]

    async def play(self, task: Task, policy: Policy) -> Score | Mapping[str, Score]:
        game = _Game(self._id, self._kwargs, self._players, int(task.data["seed"]))
        sides = [_Side() for _ in range(self._players)]
        while not game.is_done:
            player, observation = game.observation()
            side = sides[player]
            turn = await policy.say(side.asked(observation), role=self._role(player))
            side.said(turn.message, turn.text)
            game.step(turn.text)
        rewards = game.rewards()
        if self._players == 1:
            return rewards.get(0, 0.0)
        return {self._role(player): rewards.get(player, 0.0) for player in range(self._players)}

    def _role(self, player: int) -> str:
        return f"player_{player}" if self._players > 1 else ""


class _Game:
    """A game under way, with its own random numbers."""

    def __init__(self, env_id: str, kwargs: Mapping[str, Any], players: int, seed: int) -> None:
        self._state: Any = random.Random(seed).getstate()
        self.is_done = False
        with self._own_random():
            self._env = textarena.make(env_id, **kwargs)
            self._env.reset(num_players=players, seed=seed)

    def observation(self) -> tuple[int, str]:
        """Who is to move, and what he sees."""
        with self._own_random():
            player, seen = self._env.get_observation()
        return int(player), seen if isinstance(seen, str) else "\n".join(str(message) for _, message, *_ in seen)

    def step(self, action: str) -> None:
        with self._own_random():
            self.is_done, _ = self._env.step(action=action)

    def rewards(self) -> dict[int, float]:
        """By player, at the end."""
        with self._own_random():
            rewards, _ = self._env.close()
        return {int(player): float(reward) for player, reward in (rewards or {}).items()}

    @contextmanager
    def _own_random(self) -> Iterator[None]:
        others = random.getstate()
        random.setstate(self._state)
        try:
            yield
        finally:
            self._state = random.getstate()
            random.setstate(others)


class _Side:
    """What one player was shown and has said."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._seen = ""
        self._last = ""

    def asked(self, observation: str) -> list[Message]:
        """The conversation up to an observation."""
        new = observation
        if self._seen and observation.startswith(self._seen):
            new = _without_echo(observation[len(self._seen) :], self._last)
        else:
            self._messages = []
        self._seen = observation
        self._messages = [*self._messages, {"role": "user", "content": new.strip() or "Your move."}]
        return self._messages

    def said(self, message: Message, text: str) -> None:
        self._messages = [*self._messages, message]
        self._last = text.strip()


def _without_echo(new: str, said: str) -> str:
    """What is new to a player, without the line that repeats what he said himself."""
    line, separator, rest = new.lstrip("\n").partition(said)
    is_echo = separator and line.startswith("[") and "\n" not in line and (not rest or rest[0] in "\n]")
    return rest.removeprefix("]") if said and is_echo else new
