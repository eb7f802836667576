"""Weights to a `redline serve --weights-token-env …`, in the words of `serve/weights.py`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from redline.errors import WeightSyncError
from redline.weight_sync.tensor_bytes import DTYPES, in_groups, pack
from redline.weight_sync.transports.http_calls import HttpServer, Json

BUCKET_BYTES = 1 << 28
"""A body is closed once it holds so many bytes."""
OF_OTHERS = ""
"""Stands for the digest of weights that we did not send, after we had sent some. No server gives it."""


@dataclass(slots=True, frozen=True)
class _Left:
    """What a server was left with."""

    version: int
    found: Mapping[str, str]
    """Digests of its tensors, as far as we sent them."""
    digest: str | None
    """The digest of all tensors; None before the first adoption, where we know nothing of them."""


@dataclass(slots=True, frozen=True)
class _Sent:
    """A version under way."""

    left: _Left
    """What the server has once it is adopted."""
    adoption: Json
    after_loss: bool
    """Whether the server had weights of others when it was begun."""


class RedlineServer:
    """One server. Implements `http.WeightServer`."""

    def __init__(self, server: HttpServer, bucket_bytes: int = BUCKET_BYTES) -> None:
        """Ask the server what it has. Raises WeightSyncError where it takes no weights, or not with this token."""
        self._server = server
        self._bucket_bytes = bucket_bytes
        said = server.get("/weights")
        if not {"tensors", "version", "digest"} <= said.keys():
            why = f"{server.url} does not say which weights it has"
            raise WeightSyncError(why, "is it a `redline serve` of this version, started with --weights-token-env?")
        self._forms: dict[str, Any] = said["tensors"]
        self._left = _Left(said["version"], {}, None)
        self._sent: _Sent | None = None
        self._before: _Left | None = None
        """What `revert` goes back to."""
        self._sender = ""
        """As whom the last version was sent: the server knows by it what is taken back."""

    @property
    def version(self) -> int:
        """The version that it samples from."""
        return self._left.version

    def is_lost(self) -> bool:
        return self._left.digest is not None and self._server.get("/weights/current").get("digest") != self._left.digest

    def send(self, version: int, tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> int:
        """Raises WeightSyncError. What the server was left with stays in mind until the adoption: until then one that was
        started again is lost, however much of the new version it has."""
        self._check_form(tensors)
        self._sent, self._before, self._sender = None, self._found_there(), secrets.token_hex(8)
        base = self._before
        changed = {name: tensor for name, tensor in tensors.items() if found[name] != base.found.get(name)}
        sender, digest = self._sender, _digest(found)
        for bucket in in_groups(changed, self._bucket_bytes):
            self._put(version, sender, bucket)
        adoption = {"names": list(changed), "sender": sender, "base": base.digest or None, "digest": digest}
        self._sent = _Sent(_Left(version, dict(found), digest), adoption, base.digest == OF_OTHERS)
        return sum(tensor.nbytes for tensor in changed.values())

    def _found_there(self) -> _Left:
        """What the server has: what it was left with, or weights of which we know the version alone."""
        there = self._server.get("/weights/current")
        if self._left.digest is None:
            return _Left(there["version"], {}, None)
        return self._left if there["digest"] == self._left.digest else _Left(there["version"], {}, OF_OTHERS)

    def _check_form(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise WeightSyncError unless the server has these tensors, in these forms, and no others."""
        hint = "serve the model that the run begins with, in the run's type (--dtype)"
        for name, tensor in tensors.items():
            form = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)}
            if (there := self._forms.get(name)) != form:
                why = f"{name}: the trainer has {form}, {self._server.url} has {there or 'no such tensor'}"
                raise WeightSyncError(why, hint)
        if more := sorted(self._forms.keys() - tensors.keys()):
            why = f"{self._server.url} has {len(more)} tensors that the trainer does not have, among them {more[0]}"
            raise WeightSyncError(why, hint)

    def _put(self, version: int, sender: str, tensors: Mapping[str, Tensor]) -> None:
        parts = pack(tensors)
        digest = hashlib.sha256()
        for part in parts:
            digest.update(part)
        headers = {"Content-Type": "application/octet-stream", "X-Sha256": digest.hexdigest(), "X-Sender": sender}
        said = self._server.call("PUT", f"/weights/{version}/tensors", parts, headers)
        if sorted(said["names"]) != sorted(tensors):
            raise WeightSyncError(f"{self._server.url} took other tensors than were sent", "send them again")

    def verify(self) -> None:
        """The server has compared the digest of every body, and the sum of every tensor on its device."""
        if self._sent is None:
            raise WeightSyncError(f"{self._server.url} did not get all of the weights", "send them again")

    def adopt(self) -> bool:
        """Returns what `send` has found. A server that is started again in between refuses: it has nothing of what was sent, or
        not the weights that the rest is of."""
        sent = self._sent
        assert sent is not None, "nothing was sent"
        self._server.post(f"/weights/{sent.left.version}/adopt", sent.adoption)
        self._left, self._sent = sent.left, None
        return sent.after_loss

    def revert(self) -> None:
        if self._before is None:
            return
        self._server.post(f"/weights/{self._before.version}/revert", {"sender": self._sender})
        self._left, self._sent, self._before = self._before, None, None

    def close(self) -> None:
        """Nothing was written."""


def _digest(found: Mapping[str, str]) -> str:
    """One digest of the digests of all tensors."""
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in sorted(found.items())).encode()).hexdigest()
