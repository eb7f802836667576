"""How long a step takes, measured: by the tokens that go through the network, and whether they are verified.

    plain       a token of each row, as without speculation
    verifying   the rows' newest tokens and their drafts

Sizes are put into bins. A verifying step of a size that was not tried yet counts as a plain one of as many rows, where that was
measured, or else as the next smaller one that was tried, or as a plain one of its own rows: it is tried, and then known. The
fastest of the last few of a bin counts, for both kinds: what a busy machine takes longer says nothing of the next one. What
took long by bad luck alone, and is not tried again for that, is forgotten when nothing was verified for long. Where plain steps
took longer than verifying ones of as many tokens do, as on a machine that was busy then, one is due.
"""

from __future__ import annotations

import math
import time
from collections import deque
from typing import NamedTuple

MEMORY = 9
"""Steps of a bin that are remembered."""
ENOUGH = 2
"""Steps of a bin after which it counts."""
MEASURE_EVERY = 1024
"""Verifying steps after which a plain one is due, so that the comparison stays one with today."""
FORGET_AFTER = 4096
"""Measurements of plain steps in a row, after which what verifying took is forgotten."""
TOO_LONG = 1.25
"""How many times as long as a verifying step of as many tokens a plain one may seem to take, before it is measured again."""
MEASURE_AGAIN_EVERY = 32
"""Verifying steps after which that may be due."""
NEAR = 2
"""A plain step of so many times the rows, or of one part in so many, stands for one that was not measured."""


class Timed(NamedTuple):
    """What a step of the engine launched, where it did nothing but decode."""

    num_rows: int
    num_steps: int
    num_verified: int
    """Tokens that went into each verifying step; 0 for plain ones."""


class StepClock:
    """Which launch took how long. Where the host runs ahead, it waits in a step for what the step before launched, and the
    device began that when what came before it had ended."""

    def __init__(self) -> None:
        self._launched: Timed | None = None
        self._ended: float | None = None
        """When the results came that were last waited for; None where none were."""

    def step(
        self, timed: Timed | None, began: float, *, runs_ahead: bool, has_waited: bool, was_held_up: bool = False
    ) -> tuple[float, int, int, int] | None:
        """A step has ended that began at a moment of `time.perf_counter` and launched this. Returns seconds, rows, steps and
        verified tokens of the launch that ended in it; None where that is not known, as in a step that was held up by something
        that the next one of its kind is not: a graph was captured."""
        now = time.perf_counter()
        before, since, self._launched = self._launched, self._ended, timed if runs_ahead else None
        self._ended = now if runs_ahead and has_waited else None
        if not runs_ahead:
            return (now - began, *timed) if timed is not None else None
        if before is None or since is None or not has_waited or was_held_up:
            return None
        return (now - since, *before)


class Costs:
    """Seconds of steps."""

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = {}
        self._verifying: dict[int, deque[float]] = {}
        self._num_verified = 0
        """Steps since the last plain one."""
        self._num_plain = 0
        """Measurements since the last verifying one."""

    def add_plain(self, num_rows: int, seconds: float) -> None:
        """A step of this many rows took this long."""
        _put(self._plain, num_rows, seconds)
        self._num_verified = 0
        self._num_plain += 1
        if self._num_plain == FORGET_AFTER:
            self._verifying.clear()

    def add_verifying(self, num_tokens: int, seconds: float, num_steps: int = 1) -> None:
        """A step of this many tokens, drafts included, took this long, in the mean of so many."""
        _put(self._verifying, num_tokens, seconds)
        self._num_verified += num_steps
        self._num_plain = 0

    def needs_plain(self, num_rows: int) -> bool:
        """Whether a plain step must be measured before a verifying one can be compared with it."""
        plain = self.plain(num_rows)
        if plain is None or self._num_verified >= MEASURE_EVERY:
            return True
        return self._num_verified >= MEASURE_AGAIN_EVERY and plain > TOO_LONG * self._verifying_at_least(num_rows)

    def plain(self, num_rows: int) -> float | None:
        """Seconds of a plain step; None where none of about such a size was measured. Of several sizes the next counts, of two
        as near the smaller, which makes speculation look no better than it is."""
        rows = size_bin(num_rows)
        near = [size for size in self._plain if rows <= size * NEAR and size <= rows * NEAR and self._is_known(size)]
        if not near:
            return None
        return min(self._plain[min(near, key=lambda size: (max(size / rows, rows / size), size))])

    def _is_known(self, size: int) -> bool:
        return len(self._plain[size]) >= ENOUGH

    def verifying(self, num_rows: int, num_tokens: int) -> float:
        """Seconds of a verifying step, where a plain one of its rows was measured. It never counts as faster than a smaller
        one, nor as slower than a larger one, which would be noise."""
        plain, own, at_most = self.plain(num_rows), size_bin(num_tokens), self._verifying_at_least
        assert plain is not None
        known = self._known_verifying()
        if own in known:
            return max(plain, at_most(own))
        smaller = [at_most(size) for size in known if num_rows < size < own]
        return min(max(plain, self.plain(num_tokens) or 0.0, *smaller), max(plain, at_most(own)))

    def fastest_verifying(self, num_tokens: int) -> float:
        """Seconds of the fastest of the last few verifying steps of such a size, of which there was one at least."""
        return min(self._verifying[size_bin(num_tokens)])

    def _known_verifying(self) -> dict[int, float]:
        return {size: min(times) for size, times in self._verifying.items() if len(times) >= ENOUGH}

    def _verifying_at_least(self, size: int) -> float:
        """Seconds of the fastest verifying step of so many tokens or more."""
        return min((seconds for other, seconds in self._known_verifying().items() if other >= size), default=math.inf)


def size_bin(size: int) -> int:
    """1, 2, 3, 4, 6, 8, 12, 16, …: the smallest of these that is no smaller."""
    power = 1 << (size - 1).bit_length()
    return power * 3 // 4 if power >= 4 and size <= power * 3 // 4 else power


def _put(bins: dict[int, deque[float]], size: int, seconds: float) -> None:
    bins.setdefault(size_bin(size), deque(maxlen=MEMORY)).append(seconds)
