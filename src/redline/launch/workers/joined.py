"""Engines on other machines, as the run sees them: each machine joins by itself (`join.py`), and is told what to hold.

    machine ── here: host, version ───────────────►  JoinedEngines
            ◄───────────────────── start: spec ────  spawn
            ── started: address ──────────────────►  the pool connects there, as to any other worker
            ── ended: why ────────────────────────►  the machine is free again: the next start may find it
            ◄───────────────────── kill, over ─────  over: the run has ended, and so does `redline join`

Both sides pulse. A machine that says nothing for `SILENCE_S` seconds is taken for gone; it ends its engine then, since it hears
nothing either, and joins again once it can. More machines than engines may join: they stand by.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from redline.errors import EngineLostError, WireError
from redline.launch.workers.machines import ANSWER_S, PULSE_S, ROLE, JoinedEngine, Machine
from redline.launch.workers.spawn import EngineSpec
from redline.wire import Connection, Listener, listen

REMIND_S = 60.0
"""Seconds after which a run that waits says so again."""
MEET_S = 2.0
"""Seconds for machines that are just joining to hear that the run is over."""


class JoinedEngines:
    """Starts engines on machines that have joined. Implements `Spawner`."""

    def __init__(
        self, address: tuple[str, int], token: str, join_s: float, spans: Path | None, tell: Callable[[str], None]
    ) -> None:
        """Listens at `address` from now on, for machines that know the token. `join_s` is how long a start waits for one."""
        self._token, self._join_s, self._spans, self._tell = token, join_s, spans, tell
        self._listener: Listener = listen(*address, token=token)
        self._changed = threading.Condition()
        self._machines: list[Machine] = []
        """All that are there, in the order in which they joined."""
        self._num_meeting = 0
        """Machines that are connected, and not among them yet."""
        self._is_stopped = self._is_closed = False
        self._listener.answer_each(self._meet)
        threading.Thread(target=self._pulse, name="joined pulse", daemon=True).start()

    @property
    def address(self) -> str:
        """`host:port`, where machines join."""
        return self._listener.address

    def spawn(self, spec: EngineSpec) -> JoinedEngine:
        """Start an engine on a machine that has none, and block until it listens. Raises EngineLostError where no machine has
        joined in time, or the engine does not start there."""
        machine = self._free_machine(spec)
        try:
            return JoinedEngine(machine, machine.start(spec), self._token)
        finally:
            self._wake()

    def stop_starting(self) -> None:
        """Start nothing more. A start that waits for a machine raises EngineLostError."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify_all()

    def close(self) -> None:
        """Tell all machines that the run is over, those too that are just joining: `redline join` ends there. No machine can
        join any more. Blocks for some seconds at most."""
        self.stop_starting()
        self._listener.close()
        with self._changed:
            self._is_closed, machines = True, list(self._machines)
        for machine in machines:
            machine.end()
        with self._changed:
            self._changed.wait_for(lambda: not self._num_meeting, MEET_S)

    def _free_machine(self, spec: EngineSpec) -> Machine:
        """Take a machine that has no engine. Blocks until there is one."""
        until, remind = time.monotonic() + self._join_s, 0.0
        with self._changed:
            while True:
                if self._is_stopped:
                    raise EngineLostError(f"{spec.name} is no longer needed")
                for machine in self._machines:
                    if machine.take():
                        return machine
                left_s = until - time.monotonic()
                if left_s <= 0:
                    why = f"{spec.name}: no machine has joined at {self.address} within {self._join_s:g} s"
                    raise EngineLostError(
                        why, f"start `redline join {self.address}` there; look at firewalls and REDLINE_TOKEN"
                    )
                if time.monotonic() >= remind:
                    self._tell(f"{spec.name} waits for a machine: start `redline join {self.address}` there")
                    remind = time.monotonic() + REMIND_S
                self._changed.wait(min(left_s, 1.0))

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # ── in threads of their own ────────────────────────────────────────────────────────────────────────────────────────

    def _meet(self, connection: Connection) -> None:
        """Take a machine in, and hear of it until it is gone."""
        with connection, suppress(WireError, KeyError, TypeError, ValueError):
            if connection.role != ROLE:
                return
            with self._meeting():
                machine = self._met(connection)
            if machine is None:
                return
            self._tell(f"{machine.where} has joined")
            try:
                machine.hear(on_change=self._wake)
            finally:
                with self._changed:
                    self._machines.remove(machine)
                    self._changed.notify_all()

    @contextmanager
    def _meeting(self) -> Iterator[None]:
        """Inside the block a machine is just joining."""
        with self._changed:
            self._num_meeting += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_meeting -= 1
                self._changed.notify_all()

    def _met(self, connection: Connection) -> Machine | None:
        """Hear who it is, and count it among the machines. Returns None, and tells it, where it cannot be used or the run is
        over."""
        machine = Machine(connection, self._spans)
        if (refusal := machine.refusal()) is not None:
            self._tell(refusal)
            connection.send("over", {"error": refusal}, timeout_s=ANSWER_S)
            return None
        connection.send("joined", timeout_s=ANSWER_S)
        with self._changed:
            if not self._is_closed:
                self._machines.append(machine)
                return machine
        machine.end()
        return None

    def _pulse(self) -> None:
        while not self._is_closed:
            with self._changed:
                machines = list(self._machines)
            for machine in machines:
                machine.pulse()
            time.sleep(PULSE_S)
