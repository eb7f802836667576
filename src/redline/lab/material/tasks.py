"""Tasks that any model can get better at, for benchmarks that need a reward and not a language."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from redline.types import Task

ODD = frozenset("13579")


class Letters:
    """Write letters: the reward is their share of the answer. Attempts nearly always differ, so every group has signal."""

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed

    def train(self, index: int) -> Task:
        return Task(f"letters/{index}", [{"role": "user", "content": f"Letters, {index} of {self._seed}:"}])

    def held_out(self, count: int) -> Sequence[Task]:
        return [self.train(-1 - index) for index in range(count)]

    def score(self, task: Task, text: str) -> Mapping[str, float]:
        return {"letters": sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text))}


class Words:
    """Say odd words, after a prompt of so many tokens: for models whose words are numbers (`random_folders.py`)."""

    def __init__(self, tokens: int, seed: int = 0) -> None:
        self._tokens, self._seed = tokens, seed

    def train(self, index: int) -> Task:
        first = 7919 * (index + self._seed)
        words = " ".join(
            f"w{(first + 104_729 * place) % 100_000}" for place in range(self._tokens - 1)
        )  # one is the template's
        return Task(f"words/{index}", [{"role": "user", "content": words}])

    def held_out(self, count: int) -> Sequence[Task]:
        return [self.train(-1 - index) for index in range(count)]

    def score(self, task: Task, text: str) -> Mapping[str, float]:
        last = [word[-1] for word in text.split() if word[1:].isdecimal()]  # of each number: 512 answers are waited for
        return {"odd": sum(map(ODD.__contains__, last)) / max(1, len(last))}
