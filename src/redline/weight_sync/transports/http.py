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
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from torch import Tensor

from redline.errors import WeightSyncError
from redline.telemetry import span
from redline.types import WeightSet
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.tensor_bytes import DTYPES, digests, in_groups, pack
from redline.weight_sync.transports.http_calls import HttpServer

BUCKET_BYTES = 1 << 28
"""A body is closed once it holds so many bytes."""


class WeightServer(Protocol):
    """One server, in the words of its own protocol. `HttpWeights` calls `send`, `verify` and `adopt` in this order, `revert`
    after any of them."""

    def send(self, version: int, tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> int:
        """Bring a version into the server's reach; `found` are the digests of its tensors. Returns the bytes that were sent."""
        ...

    def verify(self, tensors: Mapping[str, Tensor]) -> None:
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

    def __init__(self, servers: Sequence[WeightServer]) -> None:
        self._servers = list(servers)

    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        with span("weight_sync.gather"):
            host = {name: tensor.detach().cpu() for name, tensor in weights.tensors.items()}
        with span("weight_sync.serialise"):
            found = digests(host)
        with span("weight_sync.transfer"):
            return sum(self._each(lambda server: server.send(plan.version, host, found)))

    def verify(self, weights: WeightSet) -> None:
        with span("weight_sync.verify"):
            self._each(lambda server: server.verify(weights.tensors))

    def adopt(self) -> None:
        with span("weight_sync.load"):
            self._each(lambda server: server.adopt())

    def revert(self) -> None:
        """Every server back to the version before the one that was moved last. Asks all of them, and raises what the first that
        could not said."""
        self._each(lambda server: server.revert())

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

    def verify(self, tensors: Mapping[str, Tensor]) -> None:
        """The server has compared the digest of every body, and the sum of every tensor on its device."""
        self._check_form(tensors)
        if self._sent is None or self._sent[1].keys() != tensors.keys():
            raise WeightSyncError(f"{self._server.url} was sent other tensors", "send them again")

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
