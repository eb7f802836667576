"""The endpoint through which weights come in: off unless there is a token of its own for it.

    GET  /weights                    the version, and the name, type and shape of every tensor
    PUT  /weights/7/tensors          a bucket of version 7: a safetensors body, its SHA-256 in the header x-sha256
    POST /weights/7/adopt            {"names": […]}: all that was sent; the engine samples from version 7 between two steps
    POST /weights/6/revert           back to the version before, or drop what was sent

The engine goes on with its old version, whole, until a new one is whole and adopted. One version is put together at a time: the
first bucket of another drops what came of the one before.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import Tensor

from redline.errors import EngineError, ModelError, RedlineError
from redline.serve.middleware import CLIENT_LEFT
from redline.serve.protocol import ApiError
from redline.types import WeightUpdate
from redline.weight_sync.standby import StandbyWeights
from redline.weight_sync.tensor_bytes import DTYPES, unpack

MAX_NAMES_BYTES = 1 << 24
"""The largest list of names."""


class EngineBetweenSteps(Protocol):
    """`redline.engine.EngineSession`, as far as weights need it."""

    @property
    def is_alive(self) -> bool: ...

    async def run(self, action: Callable[[Any], Any]) -> Any:
        """What `action(engine)` returns, called between two steps."""
        ...


class WeightsEndpoint:
    """Takes versions of the weights for one engine."""

    def __init__(
        self, engine: EngineBetweenSteps, live: Mapping[str, Tensor], token: str, max_bytes: int, timeout_s: float
    ) -> None:
        """`live`: the tensors that the engine reads. A body has at most `max_bytes`, and `timeout_s` seconds to arrive."""
        self._engine = engine
        self._standby = StandbyWeights(live)
        self._expected = f"Bearer {token}".encode()
        self._max_bytes, self._timeout_s = max_bytes, timeout_s
        self._turn = asyncio.Lock()
        """Buckets are staged, and versions adopted, one at a time."""

    @property
    def version(self) -> int:
        """The version that the engine samples from."""
        return self._standby.version

    def routes(self) -> list[Route]:
        return [
            Route("/weights", self._show),
            Route("/weights/{version:int}/tensors", self._put, methods=["PUT"]),
            Route("/weights/{version:int}/adopt", self._adopt, methods=["POST"]),
            Route("/weights/{version:int}/revert", self._revert, methods=["POST"]),
        ]

    async def _show(self, request: Request) -> Response:
        self._check_token(request)
        tensors = {
            name: {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape)} for name, tensor in self._standby.live.items()
        }
        return JSONResponse({"version": self.version, "staged": self._standby.staged_version, "tensors": tensors})

    async def _put(self, request: Request) -> Response:
        self._check_token(request)
        body = await self._body(request, self._max_bytes)
        version, said = request.path_params["version"], request.headers.get("x-sha256", "").lower()
        async with self._turn:
            names = await asyncio.to_thread(self._stage, version, body, said)
        return JSONResponse({"version": self.version, "staged": version, "names": names})

    def _stage(self, version: int, body: bytes, said: str) -> list[str]:
        found = hashlib.sha256(body).hexdigest()
        if found != said:
            raise ApiError(422, f"the body's SHA-256 is {found}, and x-sha256 says {said or 'nothing'}", code="wrong_checksum")
        try:
            tensors = unpack(body)
            if version != self._standby.staged_version:
                self._standby.begin(version)
            self._standby.put(tensors)
        except (ModelError, EngineError) as error:
            raise _refused(error) from error
        return list(tensors)

    async def _adopt(self, request: Request) -> Response:
        self._check_token(request)
        names = await self._names(request)
        version = request.path_params["version"]

        def adopt(engine: Any) -> None:
            if not names and self._standby.staged_version is None:  # a version whose bytes are those of the one before
                self._standby.begin(version)
            self._standby.check_staged(version, names)
            self._standby.adopt()
            engine.apply(WeightUpdate(version, tuple(names), 0))
            engine.reset_prefix_cache()  # another run may have sent other weights under this number

        return await self._between_steps(adopt)

    async def _revert(self, request: Request) -> Response:
        self._check_token(request)
        version = request.path_params["version"]

        def revert(engine: Any) -> None:
            self._standby.revert(version)
            if engine.version != version:
                engine.apply(WeightUpdate(version, (), 0))
                engine.reset_prefix_cache()

        return await self._between_steps(revert)

    async def _between_steps(self, action: Callable[[Any], None]) -> Response:
        async with self._turn:
            try:
                await self._engine.run(action)
            except EngineError as error:
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

    async def _names(self, request: Request) -> list[str]:
        try:
            names = json.loads(await self._body(request, MAX_NAMES_BYTES))["names"]
        except (ValueError, KeyError, TypeError) as error:
            raise ApiError(400, 'the body must be JSON: {"names": [...]}', param="names") from error
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ApiError(400, "names must be a list of texts", param="names")
        return names


def _refused(error: RedlineError) -> ApiError:
    """The engine keeps its version; what was sent does not fit."""
    text = f"{error.message}; {error.hint}" if error.hint else error.message
    return ApiError(409, text, code="weights_refused")
