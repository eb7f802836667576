"""Calls of the user's code that last much longer than those before them."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from redline.telemetry.stalls.calls import Call, calls_now

CALL_S = 20.0
"""A call may always last this long; before any has ended, no longer."""
TIMES_LONGEST = 3
"""And this many times the longest that returned by itself."""


class SlowCalls:
    """Finds them, each once. Knows by itself how long calls take, of those that were seen at work."""

    def __init__(self, after_s: float | None) -> None:
        """`after_s` is how long any call may last; None goes by those before it."""
        self._after_s = after_s
        self._seen: dict[Call, float] = {}
        """Those that were at work at the last look, and for how long."""
        self._longest_s: defaultdict[str, float] = defaultdict(float)
        self._told: set[Call] = set()

    @property
    def is_one_told(self) -> bool:
        """One that was found has not ended."""
        return bool(self._told)

    def limit_s(self, what: str) -> float:
        return self._after_s if self._after_s is not None else max(CALL_S, TIMES_LONGEST * self._longest_s[what])

    def look(self, calls: Sequence[Call]) -> Call | None:
        """One that is at work, and lasts too long; None where there is none that was not found before."""
        now = {call: call.age_s() for call in calls}
        for call in self._seen.keys() - now.keys():
            if not call.is_given_up:
                self._longest_s[call.what] = max(self._longest_s[call.what], self._seen[call])
        self._seen = now
        self._told &= now.keys()
        for call, age_s in now.items():
            if age_s >= self.limit_s(call.what) and call not in self._told:
                self._told.add(call)
                return call
        return None


@contextmanager
def saying_what_hangs(every_s: float = 1.0) -> Iterator[None]:
    """Print a line to stderr for each call that lasts too long: for the time before there is a run, which has a watchdog."""
    over = threading.Event()

    def look() -> None:
        slow_calls = SlowCalls(None)
        while not over.wait(every_s):
            if (call := slow_calls.look(calls_now())) is not None:
                with suppress(OSError, ValueError):  # nobody may be reading
                    print(f"`{call.what}` has not returned for {call.age_s():.0f} s, at {call.place()}", file=sys.stderr)

    threading.Thread(target=look, name="slow calls", daemon=True).start()
    try:
        yield
    finally:
        over.set()
