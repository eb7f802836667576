"""Requests that are under way in an engine of another process, and what has come of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping, Sequence

from redline.errors import EngineError
from redline.types import Delta

Event = tuple[int, Delta | EngineError]


class UnderWay:
    """Requests by number. Any thread may use it: one submits and takes, another delivers."""

    def __init__(self) -> None:
        self._missing: dict[int, int] = {}
        """Number → completions that have not come."""
        self._asked: dict[int, float] = {}
        """Number → when it was sent, in seconds of `time.monotonic`."""
        self._sampled: dict[int, dict[int, int]] = {}
        self._events: list[Event] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        """Whether anything is to come, or has come and was not taken."""
        return bool(self._missing or self._events)

    def __contains__(self, number: int) -> bool:
        """Whether completions of a request are to come."""
        return number in self._missing

    def add(self, number: int, count: int) -> None:
        """Expect so many completions of a request."""
        with self._lock:
            self._missing[number] = count

    def sent(self, numbers: Iterable[int]) -> None:
        """Note that requests were sent now."""
        with self._lock:
            self._asked |= dict.fromkeys(numbers, time.monotonic())

    def drop(self, number: int) -> bool:
        """Forget a request and what has come of it. Returns whether it was under way."""
        with self._lock:
            self._events = [event for event in self._events if event[0] != number]
            return self._forget(number)

    def deliver(self, pieces: Sequence[Event]) -> None:
        """Keep pieces until they are taken; those of requests that were dropped meanwhile are left out."""
        with self._lock:
            for number, piece in pieces:
                if number not in self._missing:
                    continue
                self._events.append((number, piece))
                self._missing[number] -= isinstance(piece, EngineError) or piece.completion is not None
                if isinstance(piece, EngineError) or not self._missing[number]:
                    self._forget(number)

    def take(self) -> list[Event]:
        """Return what has come since the last call. Does not block."""
        with self._lock:
            events, self._events = self._events, []
        return events

    def note_sampled(self, counts: Iterable[tuple[int, Iterable[tuple[int, int]]]]) -> None:
        """Note how far each sequence is: number → index → tokens."""
        with self._lock:
            for number, sampled in counts:
                if number in self._missing:
                    self._sampled[number] = dict(sampled)

    def sampled(self, number: int) -> Mapping[int, int]:
        """Index of each completion that is not finished → tokens it had when that was last noted."""
        return self._sampled.get(number, {})

    @property
    def oldest(self) -> tuple[int, float]:
        """How many requests were sent and have not been answered, and the seconds since the oldest of them was sent."""
        with self._lock:
            return len(self._asked), time.monotonic() - min(self._asked.values()) if self._asked else 0.0

    def _forget(self, number: int) -> bool:
        self._sampled.pop(number, None)
        self._asked.pop(number, None)
        return self._missing.pop(number, None) is not None
