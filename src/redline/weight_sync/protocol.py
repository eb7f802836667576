"""How a new version of the weights gets to the engine: hold → write → publish → receive → verify → resume.

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

An engine that shares storage with the trainer is held from the first write until `resume`: in between the weights are no
version of the policy. One that does not goes on sampling from its old version until `apply`, so that it stands still for
`adopt` alone.

When a part fails, its error goes to the caller, and the engine is never given the new version:

- `hold` raises what ended the engine's thread. Nothing has been written.
- An error inside `writing` leaves an engine that shares storage held: part of its weights may be new. Another engine does not
  notice.
- `move` or `verify` raises: there is no `WeightUpdate` to apply. The engine keeps its old version, whole, and
  goes on sampling from it, unless it shares storage: then it stays held.
- `apply` raises: the engine stays held.

A held engine samples no token from weights that were not verified, unless the thread that holds it steps it: in lockstep that
is the loop's, which the error ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from redline.telemetry import span
from redline.types import Completion, GenerateRequest, WeightSet, WeightUpdate
from redline.weight_sync.plan import plan_transfer
from redline.weight_sync.transport import Transport


class HeldEngine(Protocol):
    """The engine as the protocol needs it: `engine.session.EngineSession`."""

    def hold(self) -> None:
        """Block until the engine is between two steps. It stays there until `resume` was called as often as `hold`."""
        ...

    def apply(self, update: WeightUpdate) -> None: ...

    def resume(self) -> None: ...

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]: ...


class WeightProtocol:
    """Takes one engine from version to version. Implements `ports.WeightSync`."""

    def __init__(self, transport: Transport, engine: HeldEngine, wait_for_device: Callable[[], None] = lambda: None) -> None:
        """`wait_for_device` blocks until the device has done all that the calling thread gave it."""
        self._transport = transport
        self._engine = engine
        self._wait_for_device = wait_for_device
        self._is_held = False
        self._verified: int | None = None
        """The version that may be applied."""
        self._version_there: int | None = None
        """The version that the engine samples from."""
        self.engine = SyncedEngine(engine, self)
        """What the loop applies updates to."""

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open while the trainer overwrites its weights. Blocks until no engine that shares them is in a step."""
        if self._transport.shares_storage:
            self._hold()
        yield
        self._wait_for_device()

    def publish(self, weights: WeightSet) -> WeightUpdate:
        """Bring the weights to the engine, and block until it is proven that it has them. It goes on with its old version until
        the update that is returned is applied."""
        with span("weight_sync.publish", version=weights.version):
            self._verified = None
            plan = plan_transfer(weights, self._version_there)
            bytes_moved = self._transport.move(plan, weights) if plan.names else 0
            self._transport.verify(weights)
            self._verified = weights.version
            return WeightUpdate(weights.version, plan.names, bytes_moved)

    def apply(self, update: WeightUpdate) -> None:
        """Have the engine sample from the version that was published last, and let it go on."""
        assert update.version == self._verified, f"version {update.version} was not verified"
        self._hold()
        with span("engine.update_weights"):
            if update.changed:
                self._transport.adopt()
            self._engine.apply(update)
            self._version_there = update.version
            self._is_held = False
            self._engine.resume()

    def _hold(self) -> None:
        if not self._is_held:
            self._engine.hold()
            self._is_held = True


class SyncedEngine:
    """The engine as the loop has it: an update goes through the protocol. Implements `ports.Engine`."""

    def __init__(self, engine: HeldEngine, protocol: WeightProtocol) -> None:
        self._engine = engine
        self._protocol = protocol

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        return self._engine.generate(requests)

    def apply(self, update: WeightUpdate) -> None:
        self._protocol.apply(update)
