"""The engine's end of a transport that copies: a second set of weights, exchanged with the first between two steps.

    frame            what it does                                                     reply
    device           nothing                                                          device: its GPU, if it has one
    open             check the names and forms of what is trained, open the link      opened
    begin            make room for the second set (shadow)                            ready
    bucket           copy a bucket into the shadow, sum it there                      loaded: checksum, seconds
    adopt            hold the engine, exchange shadow and live, probe, go on          adopted: pause in seconds
    revert           exchange back, where it has adopted that version                 reverted: version
    close            let go of the link and of the shadow                             closed

The engine samples on while buckets come. It stands still for `adopt` alone, in which the new version and its number become
visible together. After the exchange the shadow holds the old version whole: a probe that fails, or another engine that did,
brings it back. The live tensors stay where they are, since graphs of the device remember addresses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from redline.errors import WeightSyncError, WireError, boundary
from redline.telemetry import span
from redline.types import WeightUpdate
from redline.weight_sync.buckets import Layout, exchange, form_from_json, form_of, lay_out, slots, views
from redline.weight_sync.transports.cuda_ipc import gpu_id
from redline.weight_sync.transports.inlets import Inlet, open_inlet
from redline.weight_sync.verify import check_logprobs, checksum
from redline.wire import Connection, Frame, error_fields

SCRATCH_BYTES = {"cuda": 128 * 2**20, "cpu": 4 * 2**20}
"""Through which live weights and shadow are exchanged, by device: enough that copies, not their launches, take the time."""

Logprobs = Callable[[Sequence[int]], Sequence[float]]
"""Tokens of a prompt → the logprob of each after the first, under the weights as they are."""


class UpdatedEngine(Protocol):
    """The engine as the receiver needs it: `engine.session.EngineSession`."""

    def held(self) -> AbstractContextManager[None]: ...

    def apply(self, update: WeightUpdate) -> None: ...


@dataclass(slots=True)
class _Shadow:
    """The second set of weights, as far as an update moves them."""

    layout: Layout
    buckets: list[Tensor]
    names: tuple[str, ...]
    is_loaded: list[bool] = field(default_factory=list)


class WeightReceiver:
    """Takes an engine from version to version as frames ask for it. Frames come from one connection at a time."""

    def __init__(
        self, tensors: Mapping[str, Tensor], engine: UpdatedEngine, logprobs: Logprobs | None = None, version: int = 0
    ) -> None:
        """`tensors` are those the engine reads, by the trainer's names; `version` is theirs. `logprobs` computes a probe."""
        self._tensors = {name: tensor.detach() for name, tensor in tensors.items()}
        assert all(tensor.is_contiguous() for tensor in self._tensors.values()), "weights lie in one piece each"
        self._engine = engine
        self._logprobs = logprobs
        self.version = version
        """Whose weights are live."""
        self._before: int | None = None
        """The version that the shadow holds since the last `adopt`; None where it holds none."""
        self._trained: dict[str, Any] = {}
        self._bucket_bytes = 0
        self._inlet: Inlet | None = None
        self._shadow: _Shadow | None = None
        device = next(iter(self._tensors.values())).device
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._answering = threading.Lock()

    def serve(self, connection: Connection) -> None:
        """Answer the frames of a connection until it ends. What fails is told to the other side."""
        with suppress(WireError):
            while not connection.is_closed:
                reply = self._answered(connection.receive())
                connection.send(reply.kind, reply.fields)
        self.close()

    def _answered(self, frame: Frame) -> Frame:
        reply = Frame("error", {})
        with boundary() as failed:
            reply = self.answer(frame)
        return reply if failed.error is None else Frame("error", error_fields(failed.error))

    def answer(self, frame: Frame) -> Frame:
        """Do what a frame asks, and return the reply. Raises where that failed; the engine then has its old version, whole."""
        answers: dict[str, Callable[..., Frame]] = {
            "device": self._tell_device,
            "open": self._open,
            "begin": self._begin,
            "bucket": self._load,
            "adopt": self._adopt,
            "revert": self._revert,
            "close": self._close,
        }
        if frame.kind not in answers:
            raise WeightSyncError(f"{frame.kind!r}: no such frame for weights", "both sides must be of one version")
        with self._answering, torch.no_grad(), self._on_stream():
            return answers[frame.kind](**frame.fields)

    def close(self) -> None:
        """Let go of the link and of the shadow."""
        inlet, self._inlet, self._shadow, self._before = self._inlet, None, None, None
        if inlet is not None:
            inlet.close()

    # ── one frame each ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _tell_device(self) -> Frame:
        return Frame("device", {"gpu": gpu_id(self._device) if self._device.type == "cuda" else ""})

    def _open(self, link: str, forms: list[Any], bucket_bytes: int, **how: Any) -> Frame:
        trained = {form.name: form for form in map(form_from_json, forms)}
        for name, form in trained.items():
            if name not in self._tensors:
                raise WeightSyncError(f"the engine has no tensor {name}", "trainer and engine must load one model")
            if form_of(name, self._tensors[name]) != form:
                here = form_of(name, self._tensors[name])
                raise WeightSyncError(f"the trainer writes {form}, the engine reads {here}", "load one model in one dtype")
        self.close()
        self._trained, self._bucket_bytes = trained, bucket_bytes
        self._inlet = open_inlet(link, how, self._device)
        return Frame("opened", {"version": self.version})

    def _begin(self, names: list[str]) -> Frame:
        assert self._inlet is not None, "open comes first"
        self._before = None
        if self._shadow is None or self._shadow.names != tuple(names):
            self._shadow = None  # before the next is made
            layout = lay_out([self._trained[name] for name in names], self._bucket_bytes)
            buckets = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in layout.sizes]
            self._shadow = _Shadow(layout, buckets, tuple(names))
        self._shadow.is_loaded = [False] * len(self._shadow.buckets)
        return Frame("ready", {})

    def _load(self, index: int, slot: int) -> Frame:
        assert self._shadow is not None, "begin comes first"
        assert self._inlet is not None
        bucket = self._shadow.buckets[index]
        began = time.perf_counter()
        with span("weight_sync.load"):
            self._inlet.load(slot, bucket)
            self._wait()
        loaded = time.perf_counter()
        with span("weight_sync.verify"):
            found = int(checksum(bucket))
        self._shadow.is_loaded[index] = True
        return Frame("loaded", {"checksum": found, "load_s": loaded - began, "verify_s": time.perf_counter() - loaded})

    def _adopt(self, version: int, probe: dict[str, Any] | None = None) -> Frame:
        shadow = self._shadow
        assert shadow is not None, "begin comes first"
        assert all(shadow.is_loaded), "every bucket comes first"
        with self._engine.held():
            held = time.perf_counter()
            with span("weight_sync.resume"):
                self._exchange(shadow)
                self._before, before = self.version, self.version
                try:
                    self._take(version, shadow)
                    self._check(probe)
                except BaseException:
                    self._go_back(before, shadow)
                    raise
        return Frame("adopted", {"version": version, "pause_s": time.perf_counter() - held})

    def _revert(self, version: int) -> Frame:
        if self.version == version and self._before is not None and self._shadow is not None:
            with self._engine.held():
                self._go_back(self._before, self._shadow)
        if self._shadow is not None:
            self._shadow.is_loaded = [False] * len(self._shadow.buckets)
        return Frame("reverted", {"version": self.version})

    def _close(self) -> Frame:
        self.close()
        return Frame("closed", {})

    # ── live and shadow ────────────────────────────────────────────────────────────────────────────────────────────────

    def _exchange(self, shadow: _Shadow) -> None:
        live, second = [], []
        for pieces, bucket in zip(shadow.layout.buckets, shadow.buckets, strict=True):
            live += views(pieces, self._tensors)
            second += slots(pieces, bucket)
        exchange(live, second, torch.empty(SCRATCH_BYTES[self._device.type], dtype=torch.uint8, device=self._device))
        self._wait()

    def _take(self, version: int, shadow: _Shadow) -> None:
        self._engine.apply(WeightUpdate(version, shadow.names, shadow.layout.nbytes))
        self.version = version

    def _go_back(self, version: int, shadow: _Shadow) -> None:
        self._exchange(shadow)
        self._take(version, shadow)
        self._before = None

    def _check(self, probe: dict[str, Any] | None) -> None:
        if probe is None or self._logprobs is None:
            return
        with span("weight_sync.verify"):
            found = self._logprobs(probe["tokens"])
            check_logprobs(probe["logprobs"], found, probe["tolerance"])

    # ── the device ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_stream(self) -> AbstractContextManager[Any]:
        """Copies run beside the engine's kernels."""
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()
