"""The engine's end of a transport that copies: frames fill its second set of weights, which it exchanges with the first.

    frame            what it does                                                     reply
    device           nothing                                                          device: its GPU, if it has one
    open             check the names and forms of what is trained, open the link      opened: version
    begin            make room for a version; hold the engine, where asked            ready: version
    bucket           begin to copy part of a bucket, and to sum it                    loaded: with `tell` once there, sums
    sums             nothing                                                          summed: sums of buckets not told yet
    adopt            hold the engine, exchange both sets, probe, go on                adopted: pause in seconds
    revert           exchange back, where it has adopted that version                 reverted: version
    close            let go of the link and of the second set                         closed

The engine samples on while buckets come, unless it was asked to stand still; otherwise it does so for `adopt` alone, in which
the new version and its number become visible together. Afterwards the second set holds the old version whole: a probe that
fails, or another engine that did, brings it back. The trainer's next frame is what confirms an adoption: where the connection
ends before it, nobody knows that this engine has the new version, and it goes back.

The host waits for the device when the sums of buckets are asked for (the trainer then fills their memory again), and for a
probe: once an update of two buckets, however many tensors it has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

from redline.errors import EngineLostError, RedlineError, TornWeightsError, WeightSyncError, WireError, boundary
from redline.telemetry import span
from redline.types import WeightUpdate
from redline.weight_sync.buckets import Form, Layout, Range, form_from_json, lay_out
from redline.weight_sync.second_set import SecondSet, Take
from redline.weight_sync.transports.cuda_ipc import gpu_id
from redline.weight_sync.transports.inlets import Inlet, open_inlet
from redline.weight_sync.verify import BLOCK, block_sums, check_logprobs
from redline.wire import Connection, Frame, error_fields

Logprobs = Callable[[Sequence[int]], Sequence[float] | None]
"""Tokens of a prompt → the logprob of each after the first, under the weights as they are; None where the engine cannot say
now. Waits for the device."""


class UpdatedEngine(Protocol):
    """The engine as the receiver needs it: `engine.session.EngineSession`."""

    def held(self) -> AbstractContextManager[None]: ...

    def apply(self, update: WeightUpdate) -> None: ...

    def fail(self, error: RedlineError) -> None: ...


class ReceivedSet(Protocol):
    """The second set of weights of an engine: of one process (`second_set.py`), or divided among several (`divided.py`)."""

    @property
    def needs_hold(self) -> bool:
        """Whether the engine must stand still while buckets come."""
        ...

    @property
    def version(self) -> int:
        """Whose bytes are live."""
        ...

    @property
    def before(self) -> int | None:
        """The version that it holds since it was exchanged, whole; None where it holds none."""
        ...

    @property
    def coming(self) -> int | None:
        """The version that is being put together."""
        ...

    @property
    def device(self) -> torch.device: ...

    def form(self, name: str) -> Form | None:
        """The form of a tensor that the engine reads, whole; None where it has none of this name."""
        ...

    def begin(self, version: int, layout: Layout) -> None:
        """Make room for a version whose tensors come in these buckets."""
        ...

    def memory(self, index: int) -> Tensor:
        """Where the bytes of a bucket go."""
        ...

    def loaded(self, index: int, ranges: Sequence[Range]) -> None:
        """Called when these bytes of a bucket are there."""
        ...

    def adopt(self, take: Take, check: Callable[[], None]) -> None: ...

    def revert(self, version: int, take: Take) -> None:
        """Go back to the version before, which is this."""
        ...

    def give_up(self) -> None:
        """Forget what came for the version under way."""
        ...

    def drop(self) -> None: ...


class WeightReceiver:
    """Takes an engine from version to version as frames ask for it. Frames come from one connection at a time."""

    def __init__(
        self,
        weights: Mapping[str, Tensor] | ReceivedSet,
        engine: UpdatedEngine,
        logprobs: Logprobs | None = None,
        version: int = 0,
        *,
        rounding: float = 1.0,
    ) -> None:
        """`weights` are the tensors that the engine reads, by the trainer's names, and `version` is theirs; or the second set
        of an engine that does not read them so. `logprobs` computes a probe; `rounding` is how much further than by our own
        kernels it may be from the trainer's."""
        self._second: ReceivedSet = SecondSet(weights, version) if isinstance(weights, Mapping) else weights
        self._engine, self._logprobs, self._rounding = engine, logprobs, rounding
        self._trained: dict[str, Any] = {}
        self._bucket_bytes = 0
        self._layouts: dict[tuple[str, ...], Layout] = {}
        self._inlet: Inlet | None = None
        self._is_confirmed = True
        """Whether the trainer knows which version this engine has."""
        self._held = ExitStack()
        self._held_since: float | None = None
        self._untold: list[Tensor] = []
        """The sums of buckets that were not told yet: int64[] each, on the device."""
        self._seconds = {"load_s": 0.0, "verify_s": 0.0}
        self._device = self._second.device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self._answering = threading.Lock()
        self.num_waits = 0
        """How often the host has waited for the device: where processes share a GPU, each time costs a turn of all of them."""

    @property
    def version(self) -> int:
        """Whose weights are live."""
        return self._second.version

    def serve(self, connection: Connection) -> None:
        """Answer the frames of a connection until it ends. What fails is told to the other side."""
        with suppress(WireError):
            while not connection.is_closed:
                reply = self._answered(connection.receive())
                if reply is None:  # the engine is lost, which the other side hears by the end of the connection
                    connection.close()
                    break
                connection.send(reply.kind, reply.fields)
        with boundary():
            self._end()

    def _answered(self, frame: Frame) -> Frame | None:
        """The reply to a frame; None where the engine was lost over it."""
        reply = Frame("error", {})
        with boundary() as failed:
            reply = self.answer(frame)
        if isinstance(failed.error, EngineLostError):
            self._engine.fail(failed.error)
            return None
        return reply if failed.error is None else Frame("error", error_fields(failed.error))

    def answer(self, frame: Frame) -> Frame:
        """Do what a frame asks, and return the reply. Raises where that failed; the engine then has its old version, whole."""
        answers: dict[str, Callable[..., Frame]] = {
            "device": self._tell_device,
            "open": self._open,
            "begin": self._begin,
            "bucket": self._load,
            "sums": self._tell_sums,
            "adopt": self._adopt,
            "revert": self._revert,
            "close": self._close,
        }
        if frame.kind not in answers:
            raise WeightSyncError(f"{frame.kind!r}: no such frame for weights", "both sides must be of one version")
        with span("weight_sync.receive"), self._answering, torch.no_grad(), self._on_stream():
            self._is_confirmed = True
            return answers[frame.kind](**frame.fields)

    def close(self) -> None:
        """Let go of the link and of the second set. The engine goes on."""
        inlet, self._inlet = self._inlet, None
        self._second.drop()
        self._untold = []
        self._release()
        if inlet is not None:
            inlet.close()

    def _end(self) -> None:
        with self._answering, torch.no_grad(), self._on_stream():
            if not self._is_confirmed:
                self._go_back()
            self.close()

    # ── one frame each ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell_device(self) -> Frame:
        return Frame("device", {"gpu": gpu_id(self._device) if self._device.type == "cuda" else ""})

    def _open(self, link: str, forms: list[Any], bucket_bytes: int, **how: Any) -> Frame:
        trained = {form.name: form for form in map(form_from_json, forms)}
        for name, form in trained.items():
            here = self._second.form(name)
            if here is None:
                raise WeightSyncError(f"the engine has no tensor {name}", "trainer and engine must load one model")
            if here != form:
                raise WeightSyncError(f"the trainer writes {form}, the engine reads {here}", "load one model in one dtype")
        self.close()
        self._trained, self._bucket_bytes, self._layouts = trained, bucket_bytes, {}
        self._inlet = open_inlet(link, how, self._device)
        return Frame("opened", {"version": self.version})

    def _begin(self, version: int, names: list[str], hold: bool = False) -> Frame:
        assert self._inlet is not None, "open comes first"
        key = tuple(names)
        if key not in self._layouts:
            self._layouts = {key: lay_out([self._trained[name] for name in names], self._bucket_bytes)}
        if self._second.needs_hold:
            self._hold()
        self._second.begin(version, self._layouts[key])
        self._untold, self._seconds = [], {"load_s": 0.0, "verify_s": 0.0}
        if hold:
            self._hold()
        return Frame("ready", {"version": self.version})

    def _load(self, index: int, slot: int, ranges: list[Range], tell: bool) -> Frame:
        assert self._inlet is not None, "open comes first"
        memory = self._second.memory(index)
        began = time.perf_counter()
        with span("weight_sync.load"):
            self._inlet.load(slot, memory, ranges)
        loaded = time.perf_counter()
        with span("weight_sync.verify"):
            sums_P = block_sums(memory)
            parts = [sums_P[begin // (8 * BLOCK) : -(-end // (8 * BLOCK))].sum() for begin, end in ranges]
            self._untold.append(torch.stack(parts).sum())
        self._second.loaded(index, ranges)
        self._seconds["load_s"] += loaded - began
        self._seconds["verify_s"] += time.perf_counter() - loaded
        return Frame("loaded", self._tell_sums().fields if tell else {"sums": []})

    def _tell_sums(self) -> Frame:
        untold, self._untold = self._untold, []
        began = time.perf_counter()
        with span("weight_sync.verify"):
            sums = torch.stack(untold).tolist() if untold else []
        self.num_waits += bool(untold)
        self._seconds["verify_s"] += time.perf_counter() - began
        return Frame("summed", {"sums": sums, **self._seconds})

    def _adopt(self, version: int, probe: dict[str, Any] | None = None) -> Frame:
        assert version == self._second.coming, "begin comes first"
        self._hold()
        try:
            with span("weight_sync.resume"), self._failing_where_torn():
                self._second.adopt(self._take, lambda: self._check(probe))
            self._is_confirmed = False
        finally:
            pause_s = self._release()
        return Frame("adopted", {"version": version, "pause_s": pause_s})

    def _revert(self, version: int) -> Frame:
        try:
            if version == self.version and self._second.before is not None:
                self._go_back()
            else:
                self._second.give_up()
        finally:
            self._release()
        return Frame("reverted", {"version": self.version})

    def _close(self) -> Frame:
        self.close()
        return Frame("closed", {})

    # ── the engine ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _hold(self) -> None:
        """Have the engine stand still between two steps, from now on until `_release`. Blocks until it does."""
        if self._held_since is None:
            self._held.enter_context(self._engine.held())
            self._held_since = time.perf_counter()

    def _release(self) -> float:
        """Let the engine go on. Returns for how many seconds it stood still."""
        since, self._held_since = self._held_since, None
        pause_s = time.perf_counter() - since if since is not None else 0.0
        self._held.close()
        return pause_s

    def _go_back(self) -> None:
        """Bring back the version before the live one."""
        before = self._second.before
        if before is not None:
            with self._engine.held(), self._failing_where_torn():
                self._second.revert(before, self._take)
                self._wait()

    @contextmanager
    def _failing_where_torn(self) -> Iterator[None]:
        """The engine takes no further step where its weights are torn."""
        try:
            yield
        except TornWeightsError as error:
            self._engine.fail(error)
            raise

    def _take(self, version: int, names: tuple[str, ...], nbytes: int) -> None:
        self._engine.apply(WeightUpdate(version, names, nbytes))

    def _check(self, probe: dict[str, Any] | None) -> None:
        """Compute the probe with what is live now, or wait at least until it is. Its kernels come after those of the
        exchange."""
        if probe is None or self._logprobs is None:
            self._wait()
            return
        with span("weight_sync.verify"):
            found = self._logprobs(probe["tokens"])
            self.num_waits += 1
            if found is not None:
                check_logprobs(probe["logprobs"], found, self._rounding * probe["tolerance"])

    # ── the device ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Copies run beside the engine's kernels."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _wait(self) -> None:
        self.num_waits += 1
        if self._stream is not None:
            self._stream.synchronize()
