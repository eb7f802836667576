"""A process on a node of a Ray cluster, as the process that asked for it sees it.

Calls to its actor carry numbers and lines of text, never tensors. Each is bounded: an actor that does not answer is taken for
dead, so that nothing here waits for ever.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from redline.errors import RedlineError
from redline.launch.workers.ray_cluster import Bundle
from redline.launch.workers.ray_host import Job, ProcessHost

ANSWER_S = 60.0
"""Seconds after which an actor that has not answered is taken for dead. Ray itself gives up a silent node after about 30; an
answer takes a millisecond, on a busy node perhaps seconds."""
START_S = 300.0
"""Seconds for an actor to begin: Ray may have to start a node for it."""
LINES_KEPT = 15
"""Lines of stderr that a reason shows."""


class ActorGoneError(RedlineError):
    """An actor ended, or did not answer in time."""


class HostedProcess:
    """One process on a node."""

    def __init__(self, name: str, bundle: Bundle) -> None:
        """Begin an actor in the bundle and return at once. `name` is what messages call the process."""
        self.name = name
        self._actor = bundle.begin(ProcessHost)
        self.host, self.address = "?", ""
        """Name and address of its node, once `meet` has returned."""
        self.pid = 0
        """Its process id there, once it has started."""
        self.code: int | None = None
        """Its exit code; None while it is alive, and where its actor is gone."""
        self.gone = ""
        """Why its actor is gone; empty while that answers."""
        self.was_ended = False
        """Whether `end` has ended it."""
        self._err: deque[str] = deque(maxlen=LINES_KEPT)
        self._asked: Any = None
        self._asked_at = 0.0

    @property
    def is_alive(self) -> bool:
        """Whether it has neither ended nor lost its node, as far as `news` has told."""
        return self.code is None and not self.gone

    @property
    def where(self) -> str:
        """`rank 1 on node-7 (10.0.0.7)`."""
        return f"{self.name} on {self.host} ({self.address})" if self.address else self.name

    def call(self, method: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Call the actor and return its answer. Raises `ActorGoneError` where it ended or is silent for `timeout_s`."""
        return self._answer(getattr(self._actor, method).remote(*arguments), timeout_s)

    def meet(self, timeout_s: float = START_S) -> dict[str, str]:
        """Block until the actor has begun; return what it says of its node."""
        about: dict[str, str] = self.call("describe", timeout_s=timeout_s)
        self.host, self.address = about["host"], about["address"]
        return about

    def start(self, job: Job) -> None:
        """Start the process."""
        self.pid = int(self.call("start", job))

    def why_ended(self) -> str:
        """A sentence on why it ended, with the last lines that it wrote; empty while it is alive."""
        if self.is_alive:
            return ""
        return "\n".join([f"{self.where} {self.gone or _ended(self.code or 0)}", *(f"  | {line}" for line in self._err)])

    def send_signal(self, number: int) -> None:
        """Send a signal to the process. Does not block, and does nothing where its actor is gone."""
        with suppress(Exception):
            self._actor.signal.remote(number)

    def end(self, why: str) -> None:
        """End it at once, where it is alive, and remember why. Does not block."""
        if self.is_alive:
            self.was_ended, self.gone = True, f"was ended: {why}"
            self.kill()

    def kill(self) -> None:
        """End process and actor at once. Does not block."""
        import ray

        with suppress(Exception):  # the actor is dead already, or the cluster gone
            ray.kill(self._actor)

    def question(self) -> Any:
        """The call under way that asks the actor for news."""
        if self._asked is None:
            self._asked, self._asked_at = self._actor.news.remote(), time.monotonic()
        return self._asked

    def hear(self) -> list[tuple[str, str]]:
        """What the actor answered to `question`; afterwards `code` or `gone` says whether the process has ended."""
        asked, self._asked = self._asked, None
        try:
            news = self._answer(asked, ANSWER_S)
        except ActorGoneError:
            return []
        for kind, what in news:
            if kind == "err":
                self._err.append(what)
            elif kind == "end":
                self.code = what
        return [(kind, what) for kind, what in news if kind != "end"]

    def lose_if_silent(self) -> None:
        """Take the process for dead where its actor has not answered `question` for `ANSWER_S` seconds."""
        if self._asked is not None and time.monotonic() - self._asked_at > ANSWER_S:
            self._lost(f"did not answer for {ANSWER_S:g} s; its node may be gone")

    def _answer(self, asked: Any, timeout_s: float) -> Any:
        import ray

        try:
            return ray.get(asked, timeout=timeout_s)
        except ray.exceptions.GetTimeoutError:
            raise self._lost(f"did not answer for {timeout_s:g} s") from None
        except ray.exceptions.RayActorError as error:
            raise self._lost(in_one_line(error)) from None

    def _lost(self, reason: str) -> ActorGoneError:
        self.gone = reason
        self.kill()
        return ActorGoneError(f"{self.where} {reason}")


def news_of(processes: Sequence[HostedProcess], wait_s: float = 1.0) -> Iterator[tuple[HostedProcess, str, str]]:
    """Yield what the processes wrote, line by line: process, `out` or `err`, line. Blocks until one has news, or for `wait_s`
    seconds; afterwards each process's `code` or `gone` says whether it has ended."""
    import ray

    asked = {process.question(): process for process in processes if process.is_alive}
    if not asked:
        return
    ray.wait(list(asked), timeout=wait_s)  # one of them; and all that have answered meanwhile
    ready, silent = ray.wait(list(asked), num_returns=len(asked), timeout=0)
    for question in silent:
        asked[question].lose_if_silent()
    for question in ready:
        for kind, line in asked[question].hear():
            yield asked[question], kind, line


def _ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def in_one_line(error: Exception) -> str:
    """Ray's reason in one line: its messages go on for pages."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = ("modulenotfounderror", "node died", "was killed", "died")
    told = next((line for what in telling for line in lines if what in line.lower()), lines[0] if lines else "")
    return f"lost its actor: {told[:300]}"
