"""How a new version of the weights gets to the engines: hold → write → publish → receive → verify → resume.

    trainer, loop             weight_sync                        transport          engine
    ─────────────             ───────────                        ─────────          ──────
    with writing(): ────────► hold ───────────────────────────────────────────────► ends its step, waits
      optimizer writes          (only where storage is shared)
    end of writing() ───────► wait until the device has written
    publish(weights) ───────► plan: what the engine lacks
                              publish, receive ────────────────► move
                              verify ──────────────────────────► verify
    engine.apply(update) ───► hold, unless held ───────────────────────────────────► ends its step, waits
                              ─────────────────────────────────► adopt
                              apply ───────────────────────────────────────────────► notes the version
                              resume ──────────────────────────────────────────────► goes on, under the new version

who waits   for whom                                                                  until
trainer     an engine that shares its weights, before it overwrites them              the engine's step ends
loop        the transport, and once more an engine that was not held                  the bytes are verified; its step ends
engine      the trainer, while it overwrites weights they share; the protocol         resume
catch_up    an update under way; the trainer's next write waits for it                the update is applied; it has the weights

An engine that shares storage with the trainer is held from the first write until `resume`: in between the weights are no
version of the policy. One that does not goes on sampling from its old version until `apply`, so that it stands still for
`adopt` alone. An engine of another process holds itself in `adopt`, which gives it the weights and the version together.

When a part fails, its error goes to the caller, and no engine is given the new version:

- `hold` raises what ended the engine's thread. Nothing has been written.
- An error inside `writing` leaves an engine that shares storage held: part of its weights may be new. Another engine does not
  notice.
- `move` or `verify` raises: there is no `WeightUpdate` to apply. Every engine keeps its old version, whole, and
  goes on sampling from it, unless it shares storage: then it stays held.
- `adopt` raises (an engine has ended, its probe failed): `revert` brings every engine back to the old version, and they go on.
- `apply` raises: the engine stays held.

A held engine samples no token from weights that were not verified, unless the thread that holds it steps it: in lockstep that
is the loop's, which the error ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from redline.errors import WeightSyncError
from redline.telemetry import span
from redline.types import Completion, GenerateRequest, WeightSet, WeightUpdate
from redline.weight_sync.plan import plan_transfer
from redline.weight_sync.transport import Transport
from redline.weight_sync.verify import Probe
from redline.wire import Connection

CATCH_UP_S = 600.0
"""How long an engine that was started again waits for an update under way."""


class HeldEngine(Protocol):
    """The engine as the protocol needs it: `engine.session.EngineSession`."""

    def hold(self) -> None:
        """Block until the engine is between two steps. It stays there until `resume` was called as often as `hold`."""
        ...

    def apply(self, update: WeightUpdate) -> None: ...

    def resume(self) -> None: ...

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]: ...


class WeightProtocol:
    """Takes engines from version to version. Implements `ports.WeightSync`."""

    def __init__(
        self,
        transport: Transport,
        engine: HeldEngine,
        wait_for_device: Callable[[], None] = lambda: None,
        probe: Callable[[], Probe] | None = None,
    ) -> None:
        """`wait_for_device` blocks until the device has done all that the calling thread gave it. `probe` computes what the
        trainer makes of a fixed prompt now; every engine must come to the same before a version becomes visible."""
        self._transport = transport
        self._engine = engine
        self._wait_for_device = wait_for_device
        self._probe = probe
        self._held_since: float | None = None
        self._write_s = 0.0
        """How long the trainer wrote its weights last."""
        self._verified: int | None = None
        """The version that may be applied."""
        self._expected: Probe | None = None
        """What the trainer makes of the version that was published last."""
        self._version_there: int | None = None
        """The version that the engines sample from."""
        self._current: WeightSet | None = None
        """The weights of that version."""
        self._is_quiet = True
        """Whether the trainer's tensors are those of the version that the engines have."""
        self._changed = threading.Condition()
        self.engine = SyncedEngine(engine, self)
        """What the loop applies updates to."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open while the trainer overwrites its weights. Blocks until no engine that shares them is in a step, and none is
        being brought to the present version."""
        with self._changed:
            self._is_quiet = False
        if self._transport.shares_storage:
            self._hold()
        began = time.perf_counter()
        yield
        self._wait_for_device()
        self._write_s = time.perf_counter() - began

    def publish(self, weights: WeightSet) -> WeightUpdate:
        """Bring the weights to the engines, and block until it is proven that they have them. They go on with their old version
        until the update that is returned is applied."""
        with span("weight_sync.publish", version=weights.version), self._changed:
            self._verified = None
            self._is_quiet = False
            plan = plan_transfer(weights, self._version_there)
            try:
                bytes_moved = self._transport.move(plan, weights) if plan.names else 0
                self._transport.verify(weights)
                if plan.names:
                    self._expected = self._probe() if self._probe is not None else None
            except BaseException:
                if plan.names:
                    self._transport.revert(weights.version)
                raise
            self._verified, self._current = weights.version, weights
            return WeightUpdate(weights.version, plan.names, bytes_moved)

    def apply(self, update: WeightUpdate) -> None:
        """Have the engines sample from the version that was published last, and let them go on. Where one cannot adopt it, all
        go on with the old version and its error is raised."""
        assert update.version == self._verified, f"version {update.version} was not verified"
        self._hold()
        with span("engine.update_weights"), self._changed:
            if update.changed:
                self._adopt(update.version)
            self._engine.apply(update)
            self._version_there = update.version
            self._is_quiet = True
            self._changed.notify_all()
            pause_s = self._resume()
        own_s = self._transport.pause_s if update.changed else None
        update.seconds.update(self._transport.parts if update.changed else {}, pause=pause_s if own_s is None else own_s)
        if self._transport.shares_storage:  # the pause holds it
            update.seconds["write"] = min(self._write_s, pause_s)
        self._write_s = 0.0

    def catch_up(self, channel: Connection, timeout_s: float = CATCH_UP_S) -> int:
        """Bring one engine that joins, or was started again, to the version that the others have, and have it prove that as in
        every update. Blocks until an update under way is applied, and keeps the trainer from writing meanwhile. Returns the
        version."""
        with self.at_rest(channel.name, timeout_s) as weights, span("weight_sync.catch_up"):
            self._transport.catch_up(channel, weights, self._expected)
            return weights.version

    @contextmanager
    def at_rest(self, who: str, timeout_s: float = CATCH_UP_S) -> Iterator[WeightSet]:
        """Open while somebody reads the weights that the engines have. Blocks until an update under way is applied, and keeps
        the trainer from writing meanwhile."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._is_quiet, timeout_s):
                why = f"{who} cannot join: the weights were being changed for {timeout_s:g} s"
                raise WeightSyncError(why, "look at why the trainer's update does not end")
            if self._current is None:
                raise WeightSyncError(f"{who} cannot join before the first version", "let it join afterwards")
            yield self._current

    def close(self) -> None:
        """Let go of what the transport has opened in the engines."""
        with self._changed:
            self._transport.close()

    def _adopt(self, version: int) -> None:
        try:
            self._transport.adopt(self._expected)
        except BaseException:
            self._verified = None
            self._transport.revert(version)
            if not self._transport.shares_storage:
                self._resume()
            raise

    def _hold(self) -> None:
        if self._held_since is None:
            self._engine.hold()
            self._held_since = time.perf_counter()

    def _resume(self) -> float:
        """Let the engine go on. Returns for how long it was held."""
        assert self._held_since is not None
        pause_s, self._held_since = time.perf_counter() - self._held_since, None
        self._engine.resume()
        return pause_s


class SyncedEngine:
    """The engine as the loop has it: an update goes through the protocol. Implements `ports.Engine`."""

    def __init__(self, engine: HeldEngine, protocol: WeightProtocol) -> None:
        self._engine = engine
        self._protocol = protocol

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        return self._engine.generate(requests)

    def apply(self, update: WeightUpdate) -> None:
        self._protocol.apply(update)
