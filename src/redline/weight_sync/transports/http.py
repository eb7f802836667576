"""Weights to engines that are servers: `redline serve`, SGLang's and vLLM's.

    trainer                       a server
    move ────── tensors ────────► beside those that it samples from; SGLang and vLLM: into a folder that they can read
    verify ────────────────────── the digests of what arrived
    adopt ──────────────────────► samples from them, between two steps
    revert ─────────────────────► back to the version before

Tensors whose bytes the server has already are not sent.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from torch import Tensor

from redline.errors import WeightSyncError
from redline.telemetry import span
from redline.types import WeightSet
from redline.weight_sync.buckets import form_of
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.tensor_bytes import DTYPES, digests, in_groups, pack
from redline.weight_sync.transports.http_calls import HttpServer
from redline.weight_sync.verify import Probe
from redline.wire import Connection

BUCKET_BYTES = 1 << 28
"""A body is closed once it holds so many bytes."""


Convert = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class WeightServer(Protocol):
    """One server, in the words of its own protocol. `HttpWeights` calls `send`, `verify` and `adopt` in this order, `revert`
    after any of them."""

    def send(self, version: int, tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> int:
        """Bring a version into the server's reach; `found` are the digests of its tensors. Returns the bytes that were sent."""
        ...

    def verify(self) -> None:
        """Raise WeightSyncError unless what was sent is whole, and the server could sample from it."""
        ...

    def adopt(self) -> None:
        """Have the server sample from what was sent."""
        ...

    def revert(self) -> None:
        """Have the server sample from the version before the one that was sent, whether or not that was adopted."""
        ...


class HttpWeights:
    """Brings weights to several servers at once. Implements `Transport`."""

    shares_storage = False

    def __init__(
        self, servers: Sequence[WeightServer], tensors: Mapping[str, Tensor], convert: Convert = lambda tensors: tensors
    ) -> None:
        """`tensors` are the trainer's: those that every update will have. `convert` makes of them what the servers are sent."""
        self._servers, self._convert = list(servers), convert
        self._forms = {name: form_of(name, tensor) for name, tensor in tensors.items()}
        self._moved: int | None = None
        """The version that was sent last."""
        self._is_under_way = False
        """Whether it is not adopted yet."""
        self.parts: dict[str, float] = {}
        """Seconds of each part of the last update."""
        self.pause_s: float | None = None

    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        """Send the version to every server, but for tensors that it has already. Returns the bytes sent."""
        self._check_forms(weights)
        self.parts, self._moved, self._is_under_way = {}, plan.version, True
        with self._part("convert"):
            sent = self._convert(weights.tensors)
        with self._part("gather"):
            host = {name: tensor.detach().cpu() for name, tensor in sent.items()}
        with self._part("serialise"):
            found = digests(host)
        with self._part("transfer"):
            return sum(self._each(lambda server: server.send(plan.version, host, found)))

    def verify(self, weights: WeightSet) -> None:
        self._check_forms(weights)
        if self._is_under_way:
            with self._part("verify"):
                self._each(lambda server: server.verify())

    def adopt(self, probe: Probe | None = None) -> None:
        """Have every server sample from what was sent. Servers compute no probe: they have compared digests."""
        with self._part("load"):
            self._each(lambda server: server.adopt())
        self._is_under_way = False

    def revert(self, version: int) -> None:
        """Every server that can be reached goes back to what it had before `version`."""
        if self._moved == version:
            self._moved, self._is_under_way = None, False
            for server in self._servers:
                with suppress(WeightSyncError):
                    server.revert()

    def catch_up(self, channel: Connection, weights: WeightSet) -> None:
        """Servers are not started by a run; one that was started again is noticed by its version when weights are sent."""
        raise AssertionError("servers have no connection of their own")

    def close(self) -> None:
        """Every call has a connection of its own: there is nothing to let go of."""

    def _check_forms(self, weights: WeightSet) -> None:
        found = {name: form_of(name, tensor) for name, tensor in weights.tensors.items()}
        other = {name for name, _ in found.items() ^ self._forms.items()}
        assert not other, f"other tensors than the servers were told of: {', '.join(sorted(other))}"

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        with span(f"weight_sync.{name}"):
            yield
        self.parts[name] = self.parts.get(name, 0.0) + time.perf_counter() - began

    def _each(self, call: Callable[[WeightServer], Any]) -> list[Any]:
        """What each server gave. All are waited for, so that none is still at work when an error is raised."""
        with ThreadPoolExecutor(max(1, len(self._servers)), thread_name_prefix="http-weights") as pool:
            futures = [pool.submit(call, server) for server in self._servers]
        return [future.result() for future in futures]


class RedlineServer:
    """A `redline serve --weights-token-env …`. Implements `WeightServer`."""

    def __init__(self, server: HttpServer, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Ask the server what it has. Raises WeightSyncError where it takes no weights, or not with this token."""
        self._server = server
        self._bucket_bytes = bucket_bytes
        said = server.get("/weights")
        self._forms: dict[str, Any] = said["tensors"]
        self.version: int = said["version"]
        """The version that it samples from."""
        self._there: dict[str, str] = {}
        """Digests of what it samples from, as far as we sent it."""
        self._sent: tuple[int, dict[str, str], tuple[str, ...]] | None = None
        """The version under way, its digests, and the names of what was sent."""
        self._before: tuple[int, dict[str, str]] | None = None
        """What `revert` goes back to."""

    def send(self, version: int, tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> int:
        self._check_form(tensors)
        if self._server.get("/weights")["version"] != self.version:  # it was started again, with the weights of its model
            self._there = {}
        changed = {name: tensor for name, tensor in tensors.items() if found[name] != self._there.get(name)}
        self._before, self._sent = (self.version, self._there), None
        for bucket in in_groups(changed, self._bucket_bytes):
            self._put(version, bucket)
        self._sent = version, dict(found), tuple(changed)
        return sum(tensor.nbytes for tensor in changed.values())

    def _check_form(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            form = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
            if (there := self._forms.get(name)) != form:
                raise WeightSyncError(
                    f"{name}: the trainer has {form}, {self._server.url} has {there or 'no such tensor'}",
                    "serve the model that the run begins with, in the run's type (--dtype)",
                )

    def _put(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        parts = pack(tensors)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        headers = {"Content-Type": "application/octet-stream", "X-Sha256": digest.hexdigest()}
        said = self._server.call("PUT", f"/weights/{version}/tensors", parts, headers)
        if sorted(said["names"]) != sorted(tensors):
            raise WeightSyncError(f"{self._server.url} took other tensors than were sent", "send them again")

    def verify(self) -> None:
        """The server has compared the digest of every body, and the sum of every tensor on its device."""
        if self._sent is None:
            raise WeightSyncError(f"{self._server.url} did not get all of the weights", "send them again")

    def adopt(self) -> None:
        assert self._sent is not None, "nothing was sent"
        version, found, names = self._sent
        self._server.post(f"/weights/{version}/adopt", {"names": names})
        self.version, self._there, self._sent = version, found, None

    def revert(self) -> None:
        if self._before is None:
            return
        version, there = self._before
        self._server.post(f"/weights/{version}/revert")
        self.version, self._there, self._sent, self._before = version, there, None, None
