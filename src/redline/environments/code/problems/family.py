"""What a family of problems is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(slots=True, frozen=True)
class Function:
    """A problem whose answer is a function."""

    signature: str
    """`name(arguments)`, as the question has it."""
    does: str
    """What it returns, as the end of "Write a Python function … that …"."""
    reference: Callable[..., Any]
    inputs: Sequence[Sequence[Any]]
    """Arguments of each test; they have to be plain data."""

    @property
    def question(self) -> str:
        return f"Write a Python function `{self.signature}` that {self.does}. Answer with one code block."

    def tests(self) -> list[dict[str, Any]]:
        name = self.signature.partition("(")[0]
        calls = [f"{name}({', '.join(map(repr, arguments))})" for arguments in self.inputs]
        return [
            {"call": call, "returns": self.reference(*arguments)} for call, arguments in zip(calls, self.inputs, strict=True)
        ]


@dataclass(slots=True, frozen=True)
class Stream:
    """A problem whose answer is a program that reads standard input."""

    reads: str
    """What stands in the input, as the end of "Write a Python program that reads …"."""
    prints: str
    """What it prints, as the end of "and prints …"."""
    reference: Callable[[str], str]
    inputs: Sequence[str]

    @property
    def question(self) -> str:
        return f"Write a Python program that reads {self.reads} and prints {self.prints}. Answer with one code block."

    def tests(self) -> list[dict[str, Any]]:
        return [{"stdin": given, "stdout": self.reference(given)} for given in self.inputs]


Problem = Function | Stream
Family = Callable[[Random], Problem]
"""Draws a problem: its parameters, and the inputs of its tests."""

WORDS = (
    "amber", "basin", "candle", "drift", "ember", "fable", "garden", "harbor", "island", "jungle", "kettle", "lantern",
    "meadow", "needle", "orchard", "pebble", "quartz", "river", "saddle", "timber", "umbra", "valley", "willow", "yellow",
    "zephyr",
)  # fmt: skip


def numbers(draw: Random, low: int = -50, high: int = 50, least: int = 1, most: int = 9) -> list[int]:
    return [draw.randint(low, high) for _ in range(draw.randint(least, most))]


def lists(draw: Random, count: int = 6, **bounds: int) -> list[tuple[list[int]]]:
    """One list of integers per test."""
    return [(numbers(draw, **bounds),) for _ in range(count)]


def words(draw: Random, least: int = 1, most: int = 6) -> list[str]:
    return [draw.choice(WORDS) for _ in range(draw.randint(least, most))]


def texts(draw: Random, count: int = 6, **bounds: int) -> list[tuple[str]]:
    """One text of several words per test."""
    return [(" ".join(words(draw, **bounds)),) for _ in range(count)]
