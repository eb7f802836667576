"""Tasks and environments that are slow on purpose, each in one way."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from redline.types import Reaction, Task


def letters(text: str) -> dict[str, float]:
    """The reward of all tasks here: the share of letters. Attempts nearly always differ, so that every group has signal."""
    return {"letters": sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text))}


class Puzzles:
    """Questions with one reply. Implements `ports.TaskSource`."""

    def __init__(
        self,
        seed: int = 0,
        prompt_chars: int = 16,
        task_s: float = 0.0,
        score_s: float = 0.0,
        score_loops: int = 0,
        fails: float = 0.0,
    ) -> None:
        """`task_s` and `score_s` are slept for each task and each score, `score_loops` computed in Python. A share `fails` of
        the scores raises an error."""
        self._seed, self._prompt_chars, self._task_s = seed, prompt_chars, task_s
        self._score_s, self._score_loops, self._fails = score_s, score_loops, fails

    def train(self, index: int) -> Task:
        if self._task_s:
            time.sleep(self._task_s)
        question = f"{index} of {self._seed}: "
        return Task(f"puzzles/{index}", [{"role": "user", "content": question.ljust(self._prompt_chars, "?")}])

    def held_out(self, count: int) -> Sequence[Task]:
        return [Task(f"puzzles/held_out/{i}", [{"role": "user", "content": f"held {i}"}]) for i in range(count)]

    def score(self, task: Task, text: str) -> Mapping[str, float]:
        if self._score_s:
            time.sleep(self._score_s)
        sum(i * i for i in range(self._score_loops))
        if zlib.crc32(text.encode()) % 100 < 100 * self._fails:
            raise ValueError("this score fails on purpose")
        return letters(text)


class Talk:
    """A conversation of some turns, played in the event loop. Implements `ports.Environment` and brings its own tasks."""

    def __init__(
        self,
        seed: int = 0,
        turns: int = 2,
        wait_s: float = 0.0,
        says: int = 8,
        long_turns: int = 0,
        long_says: int = 0,
        long_every: int = 16,
    ) -> None:
        """Before each turn but the first, `wait_s` is awaited and the policy is told `says` characters. Every `long_every`-th
        attempt has `long_turns` turns, and is told `long_says` characters, where these are not 0."""
        self._seed, self._wait_s, self._long_every = seed, wait_s, long_every
        self._usual, self._long = (turns, says), (long_turns or turns, long_says or says)
        self._plays = 0

    def train(self, index: int) -> Task:
        return Task(f"talk/{index}", [{"role": "user", "content": f"{index} of {self._seed}"}])

    def held_out(self, count: int) -> list[Task]:
        return [self.train(-1 - index) for index in range(count)]

    async def play(self, task: Task, policy: Any) -> dict[str, float]:
        self._plays += 1
        turns, says = self._usual if self._plays % self._long_every else self._long
        messages, said = [*task.messages], ""
        for turn in range(turns):
            if turn:
                await asyncio.sleep(self._wait_s)
                messages.append({"role": "user", "content": "?" * says})
            reply = await policy.say(messages)
            messages.append(reply.message)
            said += reply.text
        return letters(said)


class Board:
    """A game whose steps take long. Implements `ports.Game` and brings its own tasks."""

    def __init__(self, seed: int = 0, turns: int = 2, step_s: float = 0.0) -> None:
        self._seed, self._turns, self._step_s = seed, turns, step_s
        self._said: list[str] = []

    def train(self, index: int) -> Task:
        return Task(f"board/{index}", [{"role": "user", "content": f"{index} of {self._seed}"}])

    def held_out(self, count: int) -> list[Task]:
        return [self.train(-1 - index) for index in range(count)]

    def reset(self, task: Task) -> str:
        self._said = []
        return str(task.messages[-1]["content"])

    def step(self, reply: str) -> Reaction:
        if self._step_s:
            time.sleep(self._step_s)
        self._said.append(reply)
        if len(self._said) == self._turns:
            return Reaction(reward=letters("".join(self._said)), done=True)
        return Reaction("and now?")
