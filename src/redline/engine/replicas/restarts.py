"""Lost engines are started again, each in a thread of its own, and wait to be taken in.

an engine is lost ──► begin ──► restart, again with pauses where that fails ──► slot.fresh ──► take_in: it gets work
                                └── more often than it may be ──► `end`: why everything ends
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redline.engine.replicas.slots import Replica, Slot, engines_of
from redline.errors import EngineLostError, RedlineError

WATCH_S = 0.25
"""Seconds between two looks at whether an engine that has nothing to do is lost."""
MAX_PAUSE_S = 30.0
"""Longest pause before an engine that does not come up is started again."""


@dataclass(slots=True, frozen=True)
class Recovery:
    """One engine that was lost and came back."""

    name: str
    why: str
    noticed: float
    """When the loss was noticed, in seconds of `time.monotonic`."""
    seconds: float
    """From there until it could take requests again, at the current version."""


@dataclass(slots=True, frozen=True)
class RestartRule:
    """How an engine is started again, and how often."""

    restart: Callable[[int], Replica]
    """Ends what is left of the engine at this index, starts it again, brings it to the current version and returns it. Blocks,
    and is called in a thread of its own."""
    max_restarts: int
    """Times that one engine is started again; then everything ends."""
    tell: Callable[[str], None] = lambda text: None
    """Gets a sentence about each loss and recovery."""


class Restarts:
    """Starts lost engines again. Any thread may call it."""

    def __init__(self, slots: Sequence[Slot], rule: RestartRule, arrived: threading.Event) -> None:
        """`arrived` is set when an engine is back, and when everything ends."""
        self._slots, self._rule, self._arrived = slots, rule, arrived
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self.end: EngineLostError | None = None
        """Why everything ends; None while it goes on."""
        self.recoveries: list[Recovery] = []
        """Every engine that was lost and came back, oldest first."""
        threading.Thread(target=self._watch, name="replicas-watch", daemon=True).start()

    def begin(self, slot: Slot, why: str) -> None:
        """Begin to start an engine again, unless that is under way. Does not block."""
        with self._lock:
            if slot.restarting_since is not None or self._closed.is_set():
                return
            slot.restarting_since = time.monotonic()
        arguments = (slot, why, slot.restarting_since)
        threading.Thread(target=self._bring_back, args=arguments, name=f"{slot.name} restart", daemon=True).start()

    def take_in(self, slot: Slot) -> None:
        """Give a place to the engine that has come back, once the lost one has left it."""
        with self._lock:
            if slot.fresh is not None and slot.engine is None:
                slot.engine, slot.fresh, slot.restarting_since = slot.fresh, None, None

    def close(self) -> None:
        """Start nothing again, and end the connections to all engines."""
        with self._lock:
            self._closed.set()
            engines = engines_of(self._slots)
        for engine in engines:
            engine.close()

    def _watch(self) -> None:
        """Notice the loss of an engine that nobody steps."""
        while not self._closed.wait(WATCH_S):
            for slot in self._slots:
                engine = slot.engine
                if engine is not None and engine.why_lost is not None:
                    self.begin(slot, f"{engine.name} is lost: {engine.why_lost}")

    def _bring_back(self, slot: Slot, why: str, noticed: float) -> None:
        """Start an engine again until it is there, or was started as often as it may be."""
        self._rule.tell(f"{why}; it is started again" if slot.restarts < self._rule.max_restarts else why)
        for attempt in itertools.count():
            slot.restarts += 1
            if slot.restarts > self._rule.max_restarts:
                self._give_up(why)
                return
            if self._closed.wait(min(MAX_PAUSE_S, 2.0**attempt - 1)):
                return
            try:
                engine = self._rule.restart(slot.index)
            except Exception as error:  # whatever it is, waiting for ever would not mend it
                why = error.message if isinstance(error, RedlineError) else f"{slot.name}: {type(error).__name__}: {error}"
                continue
            self._returned(slot, engine, Recovery(slot.name, why, noticed, time.monotonic() - noticed))
            return

    def _give_up(self, why: str) -> None:
        count = self._rule.max_restarts
        times = f"it was started again {count} times" if count else "it is not started again"
        self.end = EngineLostError(f"{why}; {times}", "mend the reason, or raise placement.max_restarts")
        self._arrived.set()

    def _returned(self, slot: Slot, engine: Replica, recovery: Recovery) -> None:
        with self._lock:
            if self._closed.is_set():
                engine.close()
                return
            slot.fresh = engine
            self.recoveries.append(recovery)
        self._rule.tell(f"{slot.name} is back after {recovery.seconds:.1f} s")
        self._arrived.set()
