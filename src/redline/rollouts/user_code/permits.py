"""Which thread may call a function of the user's now: shared by all threads that call it, so that one rule holds."""

from __future__ import annotations

import threading
import time

MAX_LATE_IN_A_ROW = 3
"""So many calls that do not return say that the next one would not either: none is made until `try_again`."""

MAX_STUCK = 64
"""Calls that were given up and still run, each in a thread of its own that may compute: with more of them the run ends."""


class Permits:
    """Lets at most `most` calls be under way at once, and counts those that did not return in time."""

    def __init__(self, most: int | None = None, dead_after_s: float | None = None) -> None:
        """Without `most` there is no limit. A call that lasts for `dead_after_s` seconds is taken for dead: the next one does
        not wait for it any longer. None waits for ever."""
        self._most, self._dead_after_s = most, dead_after_s
        self._changed = threading.Condition()
        self._taken: list[Permit] = []
        """The oldest first."""
        self.late_in_a_row = 0
        """The last calls, by whichever threads, that did not return in time."""
        self._stuck: list[threading.Thread] = []

    def take(self) -> Permit:
        """Block until a call may begin. The permit lasts until its `end`."""
        with self._changed:
            while self._most is not None and len(self._taken) >= self._most:
                self._wait_for(self._taken[0])
            permit = Permit(self)
            self._taken.append(permit)
            return permit

    def _wait_for(self, oldest: Permit) -> None:
        """Wait until some permit ends, but not for one whose call is dead."""
        if self._dead_after_s is None:
            self._changed.wait()
            return
        left_s = oldest.began + self._dead_after_s - time.monotonic()
        if left_s > 0:
            self._changed.wait(left_s)
        else:
            self._taken.remove(oldest)

    def end(self, permit: Permit) -> None:
        with self._changed:
            if permit in self._taken:
                self._taken.remove(permit)
                self._changed.notify()

    def was_late(self, thread: threading.Thread) -> None:
        """A call was given up; its thread is left behind."""
        with self._changed:
            self.late_in_a_row += 1
            self._stuck.append(thread)

    @property
    def num_stuck(self) -> int:
        """Calls that were given up and have not returned since."""
        with self._changed:
            self._stuck = [thread for thread in self._stuck if thread.is_alive()]
            return len(self._stuck)

    def returned(self) -> None:
        self.late_in_a_row = 0

    def try_again(self) -> None:
        """Forget the late ones: a new step or a new batch tries anew."""
        with self._changed:
            self.late_in_a_row = 0


class Permit:
    """The right to make one call."""

    def __init__(self, permits: Permits) -> None:
        self._permits = permits
        self.began = time.monotonic()

    def end(self) -> None:
        """Let the next call begin. Ends once, by the call that returns or by who gave it up; the second changes nothing."""
        self._permits.end(self)
