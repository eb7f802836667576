"""`redline join HOST:PORT`: gives this machine to a run elsewhere, which samples here with an engine of its own.

    join ──► the run says what to hold ──► the process of an engine (`engine_worker.py`) ──► its address goes back
             the run is gone ──► the engine ends; join again, as long as `wait_s` says
             the run is over ──► so is this

The model is read from this machine's own files. The token of the run is that of the engine here: it never crosses the network.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import redline
from redline.errors import ConfigError, WireClosed, WireError, WireTimeout, boundary, in_words
from redline.launch.workers.machines import ANSWER_S, PULSE_S, ROLE, SILENCE_S
from redline.launch.workers.span_copies import SpanSource
from redline.launch.workers.spawn import EngineSpec, LocalProcesses, Spawned
from redline.wire import Connection, Frame, connect

MAX_PAUSE_S = 5.0
"""Longest pause between two tries to reach the run."""


@dataclass(slots=True, frozen=True)
class Hold:
    """How this machine holds an engine: what the run cannot know."""

    model: str | None = None
    """The model's folder here; None is the recipe's own path."""
    device: str | None = None
    """`cpu`, `cuda` or `cuda:1`; None is the device of the recipe, as this process sees it."""
    num_threads: int | None = None
    """Threads of its CPU kernels; None takes all cores."""
    port: int = 0
    """The port that the engine listens on; 0 is any that is free."""

    def applied_to(self, spec: EngineSpec, host: str, spans: Path) -> EngineSpec:
        """The spec as this machine starts it. The engine listens at `host`, and writes its spans into a folder here."""
        model = {**spec.recipe["model"], **({"path": self.model} if self.model else {})}
        return replace(
            spec,
            recipe={**spec.recipe, "model": model},
            device=self.device or spec.device,
            num_threads=self.num_threads or os.cpu_count() or 1,
            host=host,
            port=self.port,
            spans=str(spans),
        )


def check_device(device: str) -> None:
    """Raise ConfigError for what is no device's name, and for a GPU that this process does not see. Imports torch for a GPU."""
    found = re.fullmatch(r"cpu|cuda(?::(\d+))?", device)
    if found is None:
        raise ConfigError(f"--device {device}: there is no such device", "give cpu, cuda, or cuda:1")
    if device == "cpu":
        return
    import torch

    count = torch.cuda.device_count()
    if int(found[1] or 0) >= count:
        seen = f"{count} GPU{'s' * (count > 1)}" if count else "no GPU"
        hint = f"give cpu or cuda:0 to cuda:{count - 1}" if count else "give --device cpu"
        raise ConfigError(f"--device {device}: redline sees {seen} here", f"{hint}; CUDA_VISIBLE_DEVICES may hide others")


def join(address: str, token: str, hold: Hold, wait_s: float, tell: Callable[[str], None]) -> None:
    """Serve the run at `address` until it is over. Blocks. Joins again after every loss of the run; raises WireError where it
    cannot be reached for `wait_s` seconds, and ConfigError where it does not take this machine."""
    while True:
        connection = _connected(address, token, wait_s, tell)
        with connection, tempfile.TemporaryDirectory(prefix="redline-join-") as folder:
            visit = Visit(connection, token, hold, Path(folder), tell)
            try:
                visit.serve()
                tell("the run is over")
                return
            except WireError as error:
                tell(f"the run at {address} is lost: {error.message}; joining again")
            finally:
                visit.close()


def _connected(address: str, token: str, wait_s: float, tell: Callable[[str], None]) -> Connection:
    """Block until the run takes the connection. Raises WireError after `wait_s` seconds, or at once for another token."""
    until, pause_s, told = time.monotonic() + wait_s, 0.2, False
    while True:
        try:
            return connect(address, token, ROLE, ANSWER_S)
        except (WireClosed, WireTimeout) as error:
            if time.monotonic() + pause_s > until:
                hint = "look whether the run is there, at its placement.listen, and at firewalls between the two"
                raise type(error)(f"{error.message}; tried for {wait_s:g} s", hint) from None
            if not told:
                tell(f"{error.message}; trying again for {wait_s:g} s")
                told = True
        time.sleep(pause_s)
        pause_s = min(MAX_PAUSE_S, 2 * pause_s)


class Processes(Protocol):
    """What starts engines: `LocalProcesses`."""

    def spawn(self, spec: EngineSpec, token: str | None = None) -> Spawned: ...

    def close(self) -> None: ...


class Visit:
    """One connection to a run, from joining to its end."""

    def __init__(
        self,
        connection: Connection,
        token: str,
        hold: Hold,
        folder: Path,
        tell: Callable[[str], None],
        processes: Processes | None = None,
    ) -> None:
        """`folder` is for the spans of engines. `processes` starts them, by default on this machine."""
        connection.name, connection.stall_s = "the run", SILENCE_S
        self._connection, self._token, self._hold, self._tell = connection, token, hold, tell
        self._folder, self._spans = folder, SpanSource(folder)
        self._telling = threading.Lock()
        self._processes = processes or LocalProcesses()
        self._engine: Spawned | None = None
        self._is_over = threading.Event()

    def serve(self) -> None:
        """Do what the run asks until it says that it is over. Blocks. Raises WireError where it is lost, ConfigError where it
        does not take this machine."""
        about = {"host": socket.gethostname(), "redline": redline.__version__, "python": platform.python_version()}
        self._connection.send("here", about, timeout_s=ANSWER_S)
        while True:
            frame = self._connection.receive(SILENCE_S)
            if frame.kind == "over":
                if "error" in frame.fields:
                    raise ConfigError(str(frame.fields["error"]), "install the same version on both sides")
                return
            self._answer(frame)

    def close(self) -> None:
        """End the engine, where there is one."""
        self._is_over.set()
        self._processes.close()
        engine = self._engine
        if engine is not None:
            engine.kill()

    def _answer(self, frame: Frame) -> None:
        if frame.kind == "joined":
            self._tell("joined the run")
            threading.Thread(target=self._pulse, name="join pulse", daemon=True).start()
        elif frame.kind == "clock":
            self._connection.send("clock", {"ns": time.perf_counter_ns()}, timeout_s=ANSWER_S)
        elif frame.kind == "start":
            threading.Thread(target=self._start, args=(frame.fields,), name="engine start", daemon=True).start()
        elif frame.kind == "kill" and self._engine is not None:
            self._engine.kill()

    # ── in threads of their own ────────────────────────────────────────────────────────────────────────────────────────

    def _start(self, fields: Mapping[str, Any]) -> None:
        """Start an engine, tell its address, and at last how it ended."""
        number = fields["number"]
        with boundary() as caught:
            engine = self._engine = self._spawned(fields["spec"])
        if caught.error is not None:  # whatever it is, the run must hear of it: it waits
            self._ended(number, in_words(caught.error))
            return
        with suppress(WireError):
            self._connection.send("started", {"number": number, "address": engine.address}, timeout_s=ANSWER_S)
        while engine.is_alive():
            time.sleep(0.05)
        self._ended(number, engine.why_ended())

    def _spawned(self, fields: Mapping[str, Any]) -> Spawned:
        """Start the engine of a spec and block until it listens."""
        spec = self._hold.applied_to(EngineSpec(**fields), self._connection.own_host, self._folder)
        check_device(spec.device)
        self._tell(f"{spec.name} is started, with {spec.recipe['model']['path']}")
        engine = self._processes.spawn(spec, self._token)
        self._tell(f"{spec.name} listens at {engine.address}")
        return engine

    def _ended(self, number: int, why: str) -> None:
        self._engine = None
        self._tell(why.partition("\n")[0])
        with suppress(WireError):
            self._tell_spans()
            self._connection.send("ended", {"number": number, "why": why}, timeout_s=ANSWER_S)

    def _pulse(self) -> None:
        while not self._is_over.wait(PULSE_S):
            try:
                self._connection.send("pulse", timeout_s=SILENCE_S)
                self._tell_spans()
            except WireError:
                return

    def _tell_spans(self) -> None:
        with self._telling:
            for name, place, data in self._spans.changes():
                self._connection.send("spans", {"name": name, "place": place}, [data], timeout_s=SILENCE_S)
