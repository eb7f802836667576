"""The HTTP side: routes, authentication, errors in OpenAI's shape, server-sent events, clients that leave early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic_core import from_json
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from redline.errors import BrokenModelError, EngineError
from redline.serve.answers import Json
from redline.serve.calls import Served, make_call
from redline.serve.generation import RunningEngine, answer, chunks
from redline.serve.metrics import CONTENT_TYPE, ServerMetrics
from redline.serve.middleware import CLIENT_LEFT, Measured, NeedsKey
from redline.serve.protocol import ApiError, ChatRequest, CompletionRequest, read_request

Result = TypeVar("Result")


@dataclass(slots=True, frozen=True)
class Api:
    """The endpoints over one engine."""

    engine: RunningEngine
    served: Served
    metrics: ServerMetrics

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    async def models(self, request: Request) -> Response:
        shared = {"object": "model", "created": self.served.created, "owned_by": "redline"}
        shared["max_model_len"] = self.served.max_positions
        entries = [
            {"id": name, **shared, "parent": self.served.name if adapter else None}
            for name, adapter in self.served.models.items()
        ]
        return JSONResponse({"object": "list", "data": entries})

    async def health(self, request: Request) -> Response:
        if self.engine.is_alive:
            return JSONResponse({"status": "ok"})
        reason = f"the engine has stopped: {self.engine.failure or 'it was asked to'}"
        return JSONResponse({"status": "failed", "reason": reason}, status_code=503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(self.engine.stats), headers={"content-type": CONTENT_TYPE})

    async def _generate(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        call = make_call(read_request(kind, await _json_body(request)), self.served)
        parts = (call, self.engine, self.served.vocabulary, self.metrics)
        if not call.body.stream:
            return JSONResponse(await _while_connected(request, answer(*parts)))
        pieces = chunks(*parts)
        # What is wrong with the request shows before its first chunk, while it can still be an HTTP status.
        first = await _while_connected(request, anext(pieces))
        return EventStream(first, pieces)

    async def error(self, request: Request, error: Exception) -> Response:
        """Any error as an answer."""
        known = self._as_api_error(error)
        return JSONResponse(known.body, status_code=known.status)

    def _as_api_error(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, BrokenModelError):
            return ApiError(500, _on_one_line(error))
        if isinstance(error, EngineError):
            is_running = self.engine.is_alive and self.engine.failure is None  # it dies a moment after it says why
            return ApiError(400 if is_running else 503, _on_one_line(error))
        if isinstance(error, HTTPException):
            return ApiError(error.status_code, error.detail)
        return ApiError(500, "the server failed; its log says why")


def make_app(engine: RunningEngine, served: Served, api_key: str | None = None) -> Starlette:
    """The whole application; with an `api_key`, everything but /health needs it."""
    metrics = ServerMetrics()
    api = Api(engine, served, metrics)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/health", api.health),
            Route("/metrics", api.show_metrics),
        ],
        middleware=[Middleware(Measured, metrics), *([Middleware(NeedsKey, api_key)] if api_key else [])],
        exception_handlers=dict.fromkeys((ApiError, EngineError, HTTPException, Exception), api.error),
    )


# ── bodies in ──────────────────────────────────────────────────────────────────────────────────────────────────────────


async def _json_body(request: Request) -> Any:
    # A page in a browser may send a form to this port without asking, but never JSON.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
    try:
        return from_json(await request.body())  # unlike json, it refuses half of a surrogate pair
    except ClientDisconnect as error:
        raise ApiError(CLIENT_LEFT, "the client left") from error
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


async def _while_connected(request: Request, work: Awaitable[Result]) -> Result:
    """What `work` gives; a client that leaves first cancels it."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(CLIENT_LEFT, "the client left")
        return working.result()
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# ── answers out ────────────────────────────────────────────────────────────────────────────────────────────────────────


class EventStream(StreamingResponse):
    """Server-sent events. However the response ends, so does the generator of its chunks."""

    def __init__(self, first: Json, rest: AsyncGenerator[Json]) -> None:
        super().__init__(_events(first, rest), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._rest = rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._rest):
            await super().__call__(scope, receive, send)


async def _events(first: Json, rest: AsyncGenerator[Json]) -> AsyncGenerator[str]:
    yield _event(first)
    try:
        async for chunk in rest:
            yield _event(chunk)
    except EngineError as error:  # it had accepted the request, so this is no mistake of the client
        yield _event(ApiError(500, _on_one_line(error)).body)
    yield "data: [DONE]\n\n"


def _event(content: Json) -> str:
    # ASCII: some clients take a line separator of Unicode for the end of the event.
    return f"data: {json.dumps(content, allow_nan=False, separators=(',', ':'))}\n\n"


def _on_one_line(error: EngineError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message
