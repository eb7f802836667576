"""Guess a number: the policy guesses, the game says higher or lower, a few times."""

from __future__ import annotations

import re

from redline.environments.drawn import drawn
from redline.errors import ConfigError
from redline.types import Reaction, Task

NUMBER = re.compile(r"-?\d+")


class GuessNumber:
    """Knows a number from 1 to `largest` and answers `guesses` guesses at it. Implements `ports.Game` and brings its own tasks.

    A reply's first number is the guess; a reply without one is a guess that is lost. The reward is the part `correct`: 1 where
    the number was found, else 0. There are no more games than numbers, so that held-out tasks are further draws of the same
    ones: they measure how well it is played."""

    def __init__(
        self,
        seed: int = 0,
        largest: int = 100,
        guesses: int = 7,
        question: str = "Guess my number from 1 to {largest}. Say only a number.",
        higher: str = "higher",
        lower: str = "lower",
    ) -> None:
        """`question` is what the policy sees first, `higher` and `lower` are the hints; each may be any text in the language
        that the model knows best."""
        if largest < 1 or guesses < 1:
            raise ConfigError(
                f"guess_number: largest = {largest}, guesses = {guesses}: nothing to guess",
                "set both to 1 or more in rollouts.environment.params",
            )
        self._seed, self._largest, self._guesses = seed, largest, guesses
        self._question, self._higher, self._lower = question, higher, lower
        self._number = self._taken = 0

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, index: int) -> Task:
        return self._task("train", index)

    def held_out(self, count: int) -> list[Task]:
        return [self._task("held_out", index) for index in range(count)]

    def _task(self, part: str, index: int) -> Task:
        number = drawn(self._seed, part, index).randint(1, self._largest)
        question = self._question.format(largest=self._largest, guesses=self._guesses)
        return Task(f"guess_number/{part}/{index}", [{"role": "user", "content": question}], str(number))

    # ── one game ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def reset(self, task: Task) -> str:
        self._number, self._taken = int(task.answer), 0
        return str(task.messages[-1]["content"])

    def step(self, reply: str) -> Reaction:
        self._taken += 1
        found = NUMBER.search(reply)
        # More digits than the largest number has are no guess, and Python reads no more than some thousands.
        guess = int(found.group()) if found and len(found.group()) <= len(str(self._largest)) + 1 else None
        if guess == self._number:
            return Reaction(reward={"correct": 1.0}, done=True)
        if self._taken == self._guesses:
            return Reaction(reward={"correct": 0.0}, done=True)
        if guess is None or not 1 <= guess <= self._largest:
            return Reaction(f"Say a number from 1 to {self._largest}.")
        return Reaction(self._higher if guess < self._number else self._lower)

    def snapshot(self) -> bytes:
        """The state of a game under way."""
        return f"{self._number} {self._taken}".encode()

    def restore(self, state: bytes) -> None:
        """Go on from a state that `snapshot` gave."""
        self._number, self._taken = map(int, state.split())
