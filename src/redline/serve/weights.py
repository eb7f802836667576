"""The endpoint through which weights come in: off unless there is a token of its own for it.

    GET  /weights                    the version, its digest, and the name, type and shape of every tensor
    GET  /weights/current            the version and its digest alone
    PUT  /weights/7/tensors          a bucket of version 7: a safetensors body, its SHA-256 in the header x-sha256, and in the
                                     header x-sender who puts this version together
    POST /weights/7/adopt            the engine samples from version 7 between two steps; the body says what was sent
    POST /weights/6/revert           back to version 6, the one before, or drop what was sent; the body may say whose: sender

The engine goes on with its old version, whole, until a new one is whole and adopted. One version is put together at a time, by
one sender: the first bucket of another drops what came before. The body of `adopt` is

    names     the tensors that were sent
    sender    the x-sender of their buckets
    base      the digest of the version that the other tensors are of; null where all were sent
    digest    a name for what the engine samples from afterwards, which the sender makes of all its tensors' bytes

A server that was started again has no digest, and one that somebody else has given weights has another: by this a sender
notices that the server no longer samples from what it was sent.

Versions of two runs may have one number. A `revert` that names the sender of what it takes back goes back where the engine
samples from that, else drops what this sender has sent, and nobody else's; one that names none is told by the number alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from redline.errors import EngineError, ModelError, RedlineError, TornWeightsError
from redline.serve.middleware import CLIENT_LEFT
from redline.serve.requests.protocol import ApiError
from redline.types import WeightUpdate
from redline.weight_sync.second_set import SecondSet, Take
from redline.weight_sync.tensor_bytes import DTYPES, unpack

MAX_NAMES_BYTES = 1 << 24
"""The largest list of names."""
MAX_VERSION_DIGITS = 18


class EngineBetweenSteps(Protocol):
    """`redline.engine.EngineSession`, as far as weights need it."""

    @property
    def is_alive(self) -> bool: ...

    async def run(self, action: Callable[[Any], Any]) -> Any:
        """What `action(engine)` returns, called between two steps."""
        ...

    def fail(self, error: RedlineError) -> None:
        """Take no further step; every later call raises this error."""
        ...


@dataclass(slots=True, frozen=True)
class Adoption:
    """What a sender says it has sent."""

    names: list[str]
    sender: str = ""
    base: str | None = None
    digest: str | None = None


class WeightsEndpoint:
    """Takes versions of the weights for one engine."""

    def __init__(
        self, engine: EngineBetweenSteps, live: Mapping[str, Tensor], token: str, max_bytes: int, timeout_s: float
    ) -> None:
        """`live`: the tensors that the engine reads. A body has at most `max_bytes`, and `timeout_s` seconds to arrive."""
        self._engine = engine
        self._second = SecondSet(live)
        self._expected = f"Bearer {token}".encode()
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._sender = ""
        """Who puts the staged version together."""
        self._digest: str | None = None
        """The digest of the weights that the engine samples from; None where no sender has given one."""
        self._digest_before: str | None = None
        """The digest of the weights that `revert` goes back to."""
        self._adopted_from: str | None = None
        """The sender of what the engine samples from; None where nobody has sent it, or it was taken back."""
        self._turn = asyncio.Lock()
        """Buckets are staged, and versions adopted, one at a time."""

    @property
    def version(self) -> int:
        """The version that the engine samples from."""
        return self._second.version

    def routes(self) -> list[Route]:
        return [
            Route("/weights", self._show),
            Route("/weights/current", self._show_current),
            Route("/weights/{version}/tensors", self._put, methods=["PUT"]),
            Route("/weights/{version}/adopt", self._adopt, methods=["POST"]),
            Route("/weights/{version}/revert", self._revert, methods=["POST"]),
        ]

    async def _show(self, request: Request) -> Response:
        self._check_token(request)
        tensors = {
            name: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)} for name, tensor in self._second.live.items()
        }
        return JSONResponse({**self._current, "staged": self._second.coming, "tensors": tensors})

    async def _show_current(self, request: Request) -> Response:
        self._check_token(request)
        return JSONResponse(self._current)

    @property
    def _current(self) -> dict[str, Any]:
        return {"version": self.version, "digest": self._digest}

    async def _put(self, request: Request) -> Response:
        self._check_token(request)
        version, said = _version(request), request.headers.get("x-sha256", "").lower()
        body = await self._body(request, self._max_bytes)
        async with self._turn:
            names = await asyncio.to_thread(self._stage, version, request.headers.get("x-sender", ""), body, said)
        return JSONResponse({"version": self.version, "staged": version, "names": names})

    def _begin(self, version: int, sender: str) -> None:
        """Drop what came of another version, or from another sender."""
        if (version, sender) != (self._second.coming, self._sender):
            self._second.begin(version)
            self._sender = sender

    def _stage(self, version: int, sender: str, body: bytes, said: str) -> list[str]:
        found = hashlib.sha256(body).hexdigest()
        if found != said:
            raise ApiError(422, f"the body's SHA-256 is {found}, and x-sha256 says {said or 'nothing'}", code="wrong_checksum")
        try:
            tensors = unpack(body)
            self._begin(version, sender)
            self._second.put(tensors)
        except (ModelError, EngineError) as error:
            raise _refused(error) from error
        return list(tensors)

    async def _adopt(self, request: Request) -> Response:
        self._check_token(request)
        version, asked = _version(request), await self._adoption(request)

        def adopt(engine: Any) -> None:
            self._check(version, asked)
            self._second.adopt(_noted_by(engine))
            self._digest_before, self._digest, self._adopted_from = self._digest, asked.digest, asked.sender

        return await self._between_steps(adopt)

    def _check(self, version: int, asked: Adoption) -> None:
        """Raise EngineError unless what is staged, with what the engine reads, is what the sender means."""
        if not asked.names and self._second.coming is None:  # a version whose bytes are those of the one before
            self._begin(version, asked.sender)
        self._second.check_whole(version, asked.names)
        if asked.sender != self._sender:
            raise EngineError(f"another sender has begun to send a version {version}", "let one run at a time send weights")
        missing = self._second.live.keys() - set(asked.names)
        if asked.base is None and missing:
            why = f"version {version} is not whole: {len(missing)} tensors were not sent, among them {min(missing)}"
            raise EngineError(why, "send every tensor, or say which version the others are of (base)")
        if asked.base is not None and asked.base != self._digest:
            why = f"version {version} builds on weights that the engine does not have"
            raise EngineError(why, "another sender has replaced them, or the server was started again: send every tensor")

    async def _revert(self, request: Request) -> Response:
        self._check_token(request)
        version, sender = _version(request), await self._sender_to_revert(request)

        def revert(engine: Any) -> None:
            if version != self.version if sender is None else sender == self._adopted_from:
                self._second.revert(version, _noted_by(engine))
                self._digest, self._adopted_from = self._digest_before, None
            elif sender in (None, self._sender):
                self._second.give_up()

        return await self._between_steps(revert)

    async def _between_steps(self, action: Callable[[Any], None]) -> Response:
        def act(engine: Any) -> None:
            try:
                action(engine)
            except TornWeightsError as error:
                self._engine.fail(error)
                raise

        async with self._turn:
            try:
                await self._engine.run(act)
            except (EngineError, TornWeightsError) as error:
                if not self._engine.is_alive:
                    raise
                raise _refused(error) from error
        return JSONResponse({"version": self.version})

    # ── what comes in ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").encode("latin-1")
        if not hmac.compare_digest(given, self._expected):
            raise ApiError(
                401,
                "missing or wrong token for weights: send Authorization: Bearer TOKEN",
                code="invalid_weights_token",
                headers={"www-authenticate": "Bearer"},
            )

    async def _body(self, request: Request, most: int) -> bytes:
        too_large = ApiError(
            413,
            f"the body is larger than {most} bytes; send smaller buckets (serve.max_weights_bytes is the limit)",
            code="request_too_large",
            headers={"connection": "close"},
        )
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > most:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._timeout_s):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_large
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {self._timeout_s:g} s") from error
        except ClientDisconnect as error:
            raise ApiError(CLIENT_LEFT, "the client left") from error
        return bytes(body)

    async def _sender_to_revert(self, request: Request) -> str | None:
        """Whose version is to be taken back; None where the body does not say."""
        try:
            said = json.loads(await self._body(request, MAX_NAMES_BYTES) or b"{}")
            sender = said.get("sender")
        except (ValueError, AttributeError) as error:
            raise ApiError(400, 'the body must be JSON: {"sender": ...}', param="sender") from error
        if not isinstance(sender, str | None):
            raise ApiError(400, "sender must be a text", param="sender")
        return sender

    async def _adoption(self, request: Request) -> Adoption:
        try:
            said = json.loads(await self._body(request, MAX_NAMES_BYTES))
            asked = Adoption(**said)
        except (ValueError, TypeError) as error:
            raise ApiError(400, 'the body must be JSON: {"names": [...], ...}', param="names") from error
        if not isinstance(said["names"], list) or not all(isinstance(name, str) for name in said["names"]):
            raise ApiError(400, "names must be a list of texts", param="names")
        if not all(said.get(key) is None or isinstance(said[key], str) for key in ("sender", "base", "digest")):
            raise ApiError(400, "sender, base and digest must be texts", param="sender")
        return asked


def _version(request: Request) -> int:
    """The version of a path. Raises ApiError for one that is no number, or that no policy will ever have."""
    text = request.path_params["version"]
    if not (text.isascii() and text.isdecimal() and len(text) <= MAX_VERSION_DIGITS):
        raise ApiError(404, "no such version: a version is a number")
    return int(text)


def _noted_by(engine: Any) -> Take:
    """Have the engine note a version. It forgets its prompts: another run may have sent other weights under this number."""

    def take(version: int, names: tuple[str, ...], nbytes: int) -> None:
        engine.apply(WeightUpdate(version, names, nbytes))
        engine.reset_prefix_cache()

    return take


def _refused(error: RedlineError) -> ApiError:
    """The engine keeps its version; what was sent does not fit."""
    text = f"{error.message}; {error.hint}" if error.hint else error.message
    return ApiError(409, text, code="weights_refused")
