"""Calls to an engine in another process that have not been answered."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Call:
    """One question, and the place of its answer."""

    name: str
    asked: float = field(default_factory=time.monotonic)
    """When, in seconds of `time.monotonic`."""
    answer: Future[Any] = field(default_factory=Future)


class Calls:
    """The calls under way, by number. Any thread may use it."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._under_way: dict[int, Call] = {}
        self._lock = threading.Lock()

    def begin(self, name: str) -> tuple[int, Call]:
        """Note a call, and return it with its number."""
        call = Call(name)
        with self._lock:
            number = next(self._numbers)
            self._under_way[number] = call
        return number, call

    def end(self, number: int) -> None:
        """Forget a call: it was answered, or is no longer waited for."""
        with self._lock:
            self._under_way.pop(number, None)

    def settle(self, number: int, settle: Callable[[Future[Any]], None]) -> None:
        """Answer a call, unless it is no longer waited for."""
        with self._lock:
            call = self._under_way.get(number)
        if call is not None and not call.answer.done():
            settle(call.answer)

    def fail(self, error: Exception) -> None:
        """Answer every call with an error."""
        with self._lock:
            calls = list(self._under_way.values())
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(error)

    def ages(self) -> dict[str, float]:
        """Name of each call → seconds since it was made."""
        now = time.monotonic()
        with self._lock:
            return {call.name: now - call.asked for call in self._under_way.values()}
