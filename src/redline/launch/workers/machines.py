"""A machine that has joined a run, and the engine that it holds (`joined.py` draws what the two say)."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import redline
from redline.errors import EngineLostError, WireError, WireTimeout
from redline.launch.workers.span_copies import SpanCopies
from redline.launch.workers.spawn import START_S, EngineSpec, wait_for_end
from redline.telemetry.processes import measure_offset
from redline.wire import Connection, Frame

ROLE = "join"
PULSE_S = 2.0
SILENCE_S = 15.0
"""Seconds without a pulse after which the other side is taken for gone."""
ANSWER_S = 10.0
"""Seconds for an answer that takes no work."""


class Machine:
    """One machine that has joined. It holds one engine at a time."""

    def __init__(self, connection: Connection, spans: Path | None) -> None:
        """Blocks until it has said who it is."""
        connection.stall_s = SILENCE_S
        self._connection = connection
        self._about = connection.receive(ANSWER_S).fields
        self.where = f"{self._about['host']} ({connection.name.partition(' ')[0].rpartition(':')[0]})"
        """`node-7 (10.0.0.7)`."""
        connection.name = self.where
        offset = measure_offset(lambda: int(connection.ask("clock", timeout_s=ANSWER_S).fields["ns"]))
        self._spans = SpanCopies(spans, offset)
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._is_taken = False
        self._engine = 0
        """The number of the engine that it holds, or is starting; 0 where it has none."""
        self._address = ""
        self._whys: dict[int, str] = {}
        """Engine → why it ended, or did not start."""

    def refusal(self) -> str | None:
        """Why it cannot be used; None where it can."""
        if self._about["redline"] != redline.__version__:
            return f"redline is {self._about['redline']} on {self.where}, and {redline.__version__} in the run"
        return None

    def take(self) -> bool:
        """Take it for an engine, where it has none."""
        with self._changed:
            if self._is_taken or self._connection.is_closed:
                return False
            self._is_taken = True
            return True

    def start(self, spec: EngineSpec, limit_s: float = START_S) -> int:
        """Have it start an engine and block until that listens. Returns the engine's number. Raises EngineLostError."""
        with self._changed:
            number = self._engine = next(self._numbers)
            self._address = ""
        try:
            self._connection.send("start", {"number": number, "spec": asdict(spec)}, timeout_s=ANSWER_S)
        except WireError as error:
            self._ended(number, error.message)
        with self._changed:
            in_time = self._changed.wait_for(lambda: self._address or number in self._whys, limit_s)
        if not in_time:
            self.kill(number)
            self._whys.setdefault(number, f"it did not listen within {limit_s:g} s")
        if number in self._whys:
            why = f"{spec.name} did not start on {self.where}: {self._whys[number]}"
            raise EngineLostError(why, "mend what it says; the model must be there, or name it with `redline join --model`")
        return number

    @property
    def address(self) -> str:
        return self._address

    def has(self, engine: int) -> bool:
        """Whether it holds this engine."""
        return self._engine == engine

    def why_ended(self, engine: int) -> str:
        """Why an engine ended; empty while it is there."""
        return self._whys.get(engine, "")

    def kill(self, engine: int) -> None:
        """Have it end an engine. Blocks until that is gone, for some seconds: a machine that does not answer is left alone, and
        ends its engine by itself once it hears nothing from here."""
        with suppress(WireError):
            if self.has(engine):
                self._connection.send("kill", {"number": engine}, timeout_s=ANSWER_S)
        with self._changed:
            gone = self._changed.wait_for(lambda: not self.has(engine), ANSWER_S)
        if not gone:
            self._connection.close()

    def pulse(self) -> None:
        """Show it that this process lives. Takes a second at most."""
        with suppress(WireError):
            self._connection.send("pulse", timeout_s=1.0)

    def end(self) -> None:
        """Tell it that the run is over."""
        with suppress(WireError):
            self._connection.send("over", timeout_s=1.0)

    # ── in the thread of its connection ────────────────────────────────────────────────────────────────────────────────

    def hear(self, on_change: Callable[[], None]) -> None:
        """Take what it says until it is gone. Blocks."""
        why = "it has left"
        try:
            while True:
                self._take(self._connection.receive(SILENCE_S))
                on_change()
        except WireTimeout:
            why = f"{self.where} sent no sign of life for {SILENCE_S:g} s"
        except WireError as error:
            why = error.message
        finally:
            self._connection.close()
            self._ended(self._engine, why)

    def _take(self, frame: Frame) -> None:
        fields: dict[str, Any] = frame.fields
        if frame.kind == "started":
            with self._changed:
                if fields["number"] == self._engine:
                    self._address = str(fields["address"])
                self._changed.notify_all()
        elif frame.kind == "ended":
            self._ended(int(fields["number"]), str(fields["why"]))
        elif frame.kind == "spans":
            self._spans.write(str(fields["name"]), int(fields["place"]), bytes(frame.buffers[0]))

    def _ended(self, engine: int, why: str) -> None:
        with self._changed:
            if engine:
                self._whys.setdefault(engine, why)
            if engine == self._engine:
                self._engine, self._is_taken = 0, False
            self._changed.notify_all()


class JoinedEngine:
    """An engine on a machine that has joined. Implements `Spawned`."""

    def __init__(self, machine: Machine, number: int, token: str) -> None:
        self._machine, self._number = machine, number
        self.address, self.token = machine.address, token

    @property
    def where(self) -> str:
        """The machine that it runs on: `node-7 (10.0.0.7)`."""
        return self._machine.where

    def is_alive(self) -> bool:
        return self._machine.has(self._number)

    def kill(self) -> None:
        """End it at once. Returns when it is gone, or its machine does not answer."""
        self._machine.kill(self._number)

    def why_ended(self) -> str:
        """How it ended and the last lines that it wrote; empty while it is alive. Waits a second for one that is ending."""
        wait_for_end(self.is_alive)
        why = self._machine.why_ended(self._number)
        return f"on {self._machine.where}: {why}" if why else ""
