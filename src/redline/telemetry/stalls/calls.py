"""Calls of the user's functions that are under way, so that another thread can look at them.

    with calling("score") as call:
        ...

A call may be made in a thread of its own, for the sake of one that waits for it (`rollouts/user_code/limited_calls.py`): its
lane is that of the one that waits.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from redline.telemetry.stalls.stacks import current_frames, place_of

_running: dict[int, Call] = {}
"""By the thread that makes the call. Each thread changes its own entry only, and `forget_call` one that is not waited for."""
_num_finished = 0


class Call:
    """A call, and a context manager while it lasts."""

    __slots__ = ("began_s", "cancel", "coroutine", "for_thread", "is_given_up", "made_at", "thread_id", "what")

    def __init__(self, what: str, for_thread: int | None = None) -> None:
        self.what = what
        """The name of the function: `score`."""
        self.thread_id = threading.get_ident()
        self.for_thread = for_thread or self.thread_id
        """The thread that waits for it."""
        self.began_s: float | None = time.monotonic()
        """None while it is put off."""
        self.is_given_up = False
        """It is not waited for any more."""
        self.coroutine: Any = None
        """What it waits for, where the function is a coroutine: its stack is not the thread's."""
        self.cancel: Callable[[], object] | None = None
        """Ends that coroutine, and the call with it."""
        self.made_at = ""
        """Where the function is defined, where another process runs it: nothing here knows at which line it is."""

    def __enter__(self) -> Call:
        _running[self.thread_id] = self
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        global _num_finished
        _num_finished += 1  # two threads at once may count one too few: it only has to change
        if _running.get(self.thread_id) is self:
            del _running[self.thread_id]

    def put_off(self) -> None:
        """Count none of its time until `begin`: what makes the call is not there yet. Any thread may."""
        self.began_s = None

    def begin(self) -> None:
        """Count its time from now on. Any thread may."""
        self.began_s = time.monotonic()

    def age_s(self) -> float:
        """Seconds since it began; 0 while it is put off."""
        began_s = self.began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def place(self) -> str:
        """Where it is: `letters.py:17, in score: time.sleep(1)`; of a function that another process runs, where it begins."""
        if self.made_at:
            return self.made_at
        if self.coroutine is not None:
            return place_of(traceback.StackSummary.extract(suspended_frames(self.coroutine)))
        frame = current_frames().get(self.thread_id)
        return place_of(traceback.extract_stack(frame)) if frame else ""


calling = Call


def current_call() -> Call | None:
    """The call that this thread makes."""
    return _running.get(threading.get_ident())


def calls_now() -> list[Call]:
    return list(_running.values())


def num_finished_calls() -> int:
    """A number that changes whenever a call ends."""
    return _num_finished


def forget_call(call: Call) -> None:
    """Forget a call that is not waited for any more: a coroutine is cancelled, and any other call may never end."""
    call.is_given_up = True
    if call.cancel is not None:
        call.cancel()
    if _running.get(call.thread_id) is call:
        del _running[call.thread_id]


def suspended_frames(coroutine: Any) -> Iterator[tuple[FrameType, int]]:
    """From the outermost coroutine to what it waits for."""
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield frame, frame.f_lineno
        coroutine = coroutine.cr_await
