"""How long a step takes, measured: by the tokens that go through the network, and whether they are verified.

    plain       a token of each row, as without speculation
    verifying   the rows' newest tokens and their drafts

Sizes are put into bins. A verifying step of a size that was never tried counts as fast as the next smaller one that was, or as
a plain one: it is tried once, and then known. A median of the last few forgives a step that the machine was busy in.
"""

from __future__ import annotations

from collections import deque
from statistics import median

MEMORY = 9
"""Steps of a bin that are remembered."""
ENOUGH = 2
"""Steps of a bin after which its median counts."""
MEASURE_EVERY = 32
"""Verifying steps after which a plain one is due, so that the comparison stays one with today."""


class Costs:
    """Seconds of steps."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._verifying: dict[int, deque[float]] = {}
        self._num_verified: dict[int, int] = {}
        """By bin of rows, steps since the last plain one."""

    def add_plain(self, num_rows: int, seconds: float) -> None:
        """A step of this many rows took this long."""
        _put(self._plain, num_rows, seconds)
        self._num_verified[size_bin(num_rows)] = 0

    def add_verifying(self, num_rows: int, num_tokens: int, seconds: float) -> None:
        """A step of this many rows, and of this many tokens with their drafts."""
        _put(self._verifying, num_tokens, seconds)
        self._num_verified[size_bin(num_rows)] = self._num_verified.get(size_bin(num_rows), 0) + 1

    def needs_plain(self, num_rows: int) -> bool:
        """Whether a plain step must be measured before a verifying one can be compared with it."""
        found = size_bin(num_rows)
        return len(self._plain.get(found, ())) < ENOUGH or self._num_verified[found] >= MEASURE_EVERY

    def plain(self, num_rows: int) -> float | None:
        """Seconds of a plain step; None where none of such a size was measured."""
        found = self._plain.get(size_bin(num_rows))
        return median(found) if found else None

    def verifying(self, num_rows: int, num_tokens: int) -> float:
        """Seconds of a verifying step, where a plain one of its rows was measured. It never counts as faster than a smaller
        one, which would be noise."""
        plain = self.plain(num_rows)
        assert plain is not None
        sizes = [size for size in self._verifying if size <= size_bin(num_tokens) and size >= size_bin(num_rows)]
        return max([plain, *(median(self._verifying[size]) for size in sizes)])


def size_bin(size: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, …: the smallest of these that is no smaller."""
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


def _put(bins: dict[int, deque[float]], size: int, seconds: float) -> None:
    bins.setdefault(size_bin(size), deque(maxlen=MEMORY)).append(seconds)
