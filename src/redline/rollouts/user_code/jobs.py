"""What threads that call the user's code work at: jobs of several calls each, and for how long how many of them waited."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from redline.errors import TaskError, boundary
from redline.rollouts.user_code.coroutines import EventLoop
from redline.rollouts.user_code.permits import Permit, Permits
from redline.telemetry.stalls.calls import Call

Work = Callable[[], Any]


@dataclass(slots=True, frozen=True)
class UserFunction:
    """A function of the user's: what it is called, and how long and how often it may be called."""

    stage: str
    """The stage of its failures: `reward`."""
    name: str
    """`score`."""
    limit_s: float | None
    """Seconds that a call may last; None waits for ever."""
    limit_key: str
    """The recipe's key for it."""
    loop: EventLoop = field(default_factory=EventLoop)
    """Runs coroutines that the calls wait for."""
    permits: Permits | None = None
    """Shared by all that call the function; the code that shares them says when to `try_again`."""

    @property
    def hint(self) -> str:
        return f"give what it waits for a limit of its own, or raise {self.limit_key} (null waits for ever)"


@dataclass(slots=True, frozen=True)
class ThreadKind:
    """What threads that make calls are called, and how their time is."""

    name: str
    """The first thread's, and its lane's; the others are `rewards-2`, `rewards-3`, …"""
    most: int = 1
    """Threads that may call at once."""
    busy: str = ""
    """The span of a thread at work; `user.score`, after the function, where it is empty."""
    idle: str = "wait.for_calls"
    """The span of a thread without work."""
    prepare: Callable[[], None] = lambda: None
    """Called first in each thread."""


@dataclass(slots=True, eq=False)
class Job:
    """Calls that belong together, such as those that score one group."""

    index: int
    """Names the job to `cancel`."""
    begin: Callable[[], Sequence[Work]]
    """Returns the calls. Runs in a thread of the calls."""
    end: Callable[[Sequence[Any]], Any]
    """Makes the result of what came of the calls, in their order. Runs in a thread of the calls."""
    deliver: Callable[[Any], None]
    """Gets the result. Runs in a thread of the calls, which holds the lock."""
    most: int = 1
    """Threads that may make its calls at once."""
    is_callers: bool = False
    """A caller takes what comes of its calls, and nothing is made of them."""
    for_thread: int | None = None
    """The thread that waits for it at present."""
    calls: Sequence[Work] | None = None
    """None until it has begun."""
    is_whole: bool = True
    """No more calls come."""
    computed_s: float = 0.0
    """In its calls so far, of all threads."""
    waited_s: float = 0.0
    late_in_a_row: int = 0
    """Its last calls that did not return in time."""
    computes: bool = False
    """Its calls take more computing than waiting."""
    next: int = 0
    """The first call that no thread has taken."""
    outcomes: dict[int, Any] = field(default_factory=dict)
    """By the place of the call."""
    has_begun: bool = False
    is_ending: bool = False
    is_over: bool = False
    """It was delivered or cancelled."""

    @property
    def wants_a_thread(self) -> bool:
        """Whether calls are left to make, or all are made and nothing has been made of them yet."""
        if self.is_over or self.is_ending:
            return False
        return self.calls is None or self.has_calls or self.is_complete

    @property
    def has_calls(self) -> bool:
        """Whether calls are left that can be made now: those that compute only once no more come."""
        return self.calls is not None and self.next < len(self.calls) and (self.is_whole or not self.computes)

    @property
    def is_complete(self) -> bool:
        """Whether something came of each of its calls."""
        return self.is_whole and self.calls is not None and len(self.outcomes) == len(self.calls)


class Worker:
    """A thread, and the call that it makes."""

    thread: threading.Thread

    def __init__(self) -> None:
        self.job: Job | None = None
        self.place = 0
        """Which of the job's calls it is at."""
        self.call: Call | None = None
        self.permit: Permit | None = None
        """The permit of the call that it makes or made last."""
        self.is_left = False
        """It was left behind: what comes of its call is not wanted, and it ends."""


class Load:
    """For how long how much was to be computed."""

    QUIET = -1
    """Stands for a time in which nothing could be computed, however much waited."""

    def __init__(self) -> None:
        self._seconds: defaultdict[int, float] = defaultdict(float)
        self._count = 0
        self._since = time.perf_counter()

    def change(self, count: int) -> None:
        """So much is to be computed from now on."""
        now = time.perf_counter()
        self._seconds[self._count] += now - self._since
        self._count, self._since = count, now

    def take(self) -> tuple[float, ...]:
        """Seconds by how much it was, from nothing on, since this was last asked."""
        self.change(self._count)
        seconds, self._seconds = self._seconds, defaultdict(float)
        return tuple(seconds[count] for count in range(max(seconds) + 1))


def new_thread(name: str, work: Callable[[], None], ended: Callable[[Exception | None], None]) -> threading.Thread:
    """A thread that lives no longer than the process. `ended` is called last in it, whatever happens, with the error that
    `work` raised, or None."""

    def run() -> None:
        error: Exception | None = TaskError(
            "a task or its reward ended the thread of the rollouts", "let it raise no SystemExit"
        )
        try:
            with boundary() as caught:
                work()
            error = caught.error
        finally:
            ended(error)

    return threading.Thread(target=run, name=name, daemon=True)
