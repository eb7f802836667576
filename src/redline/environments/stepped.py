"""Plays a `Game` (reset and step, not async) as an `Environment`: one game for each attempt, until it is done.

make ──► reset(task) ──► policy.say ──► step(reply) ──┐        its rewards are added up, part by part
                             ▲                        │
                             └── observation ◄────────┴─► done: the score
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from redline.environments.workers.held import GameClass, Held, Workers
from redline.errors import BudgetError, TaskError
from redline.ports import Environment, Policy, Score
from redline.types import Message, Reaction, Task

METHODS = ("reset", "step")


def is_game(kind: object) -> bool:
    """Whether a class, or anything that makes objects, makes games: it has `reset` and `step`, and no `play`."""
    return not hasattr(kind, "play") and all(callable(getattr(kind, name, None)) for name in METHODS)


def as_environment(game: GameClass, workers: Workers) -> Environment:
    """An environment that plays games of this class with these workers. Where the class has the methods `train` and `held_out`
    of a `TaskSource`, so has the environment: one object is made here for them, and plays nothing."""
    if callable(getattr(game.loaded, "train", None)):
        return SteppedWithTasks(game, workers)
    return Stepped(game, workers)


class Stepped:
    """Implements `ports.Environment`."""

    def __init__(self, game: GameClass, workers: Workers) -> None:
        self._game, self._workers = game, workers

    @property
    def game_class(self) -> GameClass:
        """What it plays."""
        return self._game

    async def play(self, task: Task, policy: Policy) -> Score:
        game = await self._workers.make(self._game)
        try:
            return await _played(game, task, policy)
        finally:
            game.drop()

    @property
    def num_worker_processes(self) -> int | None:
        """Worker processes that take calls now; None where games run in this process."""
        return getattr(self._workers, "num_running", None)

    def close(self) -> None:
        """End the workers. Blocks for some seconds at most."""
        self._workers.close()


class SteppedWithTasks(Stepped):
    """An environment whose game brings its own tasks."""

    def __init__(self, game: GameClass, workers: Workers) -> None:
        super().__init__(game, workers)
        self._tasks = game.make()

    def train(self, index: int) -> Task:
        return cast(Task, self._tasks.train(index))

    def held_out(self, count: int) -> Sequence[Task]:
        return cast(Sequence[Task], self._tasks.held_out(count))


async def _played(game: Held, task: Task, policy: Policy) -> Score:
    messages = as_messages(await game.call("reset", task), "reset")
    rewards: list[Score] = []
    while True:
        try:
            turn = await policy.say(messages)
        except BudgetError:
            if not rewards:
                raise
            return total(rewards)  # what it has up to here
        reaction = _checked(await game.call("step", turn.text))
        rewards.append(reaction.reward)
        if reaction.done:
            return total(rewards)
        messages = [*messages, turn.message, *as_messages(reaction.observation, "step")]


def as_messages(observation: Any, method: str) -> list[Message]:
    """What the policy sees: a text is the user's message, messages are what they are."""
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    if isinstance(observation, Sequence) and observation and all(isinstance(message, Mapping) for message in observation):
        return list(observation)
    raise TaskError(
        f"`{method}` gave {observation!r:.80} to show, which is neither a text nor messages",
        'give a text, or [{"role": "user", "content": "a text"}]',
    )


def total(rewards: Sequence[Score]) -> Score:
    """The sum of an attempt's rewards: of each named part where they have any, else one number. A move that scores nothing may
    give the number 0 beside others' parts."""
    named = [reward for reward in rewards if isinstance(reward, Mapping)]
    if not named:
        return float(sum(cast(float, reward) for reward in rewards))
    if odd := [reward for reward in rewards if not isinstance(reward, Mapping) and reward != 0]:
        raise TaskError(f"`step` gave the reward {odd[0]!r} and, for another move, named parts", "name the part in every move")
    parts: dict[str, float] = {}
    for reward in named:
        for name, value in reward.items():
            parts[name] = parts.get(name, 0.0) + float(value)
    return parts


def _checked(reaction: Any) -> Reaction:
    if isinstance(reaction, Reaction):
        return reaction
    raise TaskError(
        f"`step` returned a {type(reaction).__name__}, not a Reaction",
        "return redline.types.Reaction(observation=..., reward=..., done=...)",
    )
