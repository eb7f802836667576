"""Draws built-in problems, and keeps some apart for evaluation: by what the question says, so that none is on both sides."""

from __future__ import annotations

import hashlib
from random import Random

from redline.environments.code.problems import arithmetic, sequences, strings
from redline.environments.code.problems.family import Family, Problem
from redline.types import Task

FAMILIES: list[Family] = [*arithmetic.FAMILIES, *sequences.FAMILIES, *strings.FAMILIES]
_HELD_OUT = 0.15
_MAX_DRAWS = 1000


class BuiltInProblems:
    """Problems without end, of every family in turn."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def train(self, index: int) -> Task:
        for again in range(_MAX_DRAWS):
            problem = _drawn(index + again, f"{self._seed}/{index}/{again}")
            if not is_held_out(problem.question):
                return _task(f"code/{index}", problem)
        raise AssertionError("families without a question to train on")

    def held_out(self, count: int) -> list[Task]:
        """Distinct questions, of the families in turn; fewer than `count` where there are no more."""
        found: dict[str, Task] = {}
        for place in range(_MAX_DRAWS * 4):
            if len(found) == count:
                break
            problem = _drawn(place, f"held out/{place}")
            if is_held_out(problem.question) and problem.question not in found:
                found[problem.question] = _task(f"code/held_out/{len(found)}", problem)
        return list(found.values())


def is_held_out(question: str) -> bool:
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < _HELD_OUT * 2**64


def _drawn(place: int, stream: str) -> Problem:
    """A problem whose tests expect at least two different things: a program that always says the same never passes."""
    draw = Random(stream)
    while True:
        problem = FAMILIES[place % len(FAMILIES)](draw)
        if len({repr(test.get("returns", test.get("stdout"))) for test in problem.tests()}) > 1:
            return problem


def _task(name: str, problem: Problem) -> Task:
    return Task(name, [{"role": "user", "content": problem.question}], data={"tests": problem.tests()})
