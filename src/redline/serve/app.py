"""The HTTP side: routes, authentication, errors in OpenAI's shape, server-sent events, clients that leave early."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Collection, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from redline.errors import BrokenModelError, EngineBusyError, EngineError, EngineMemoryError
from redline.serve.answers.documents import Json
from redline.serve.answers.generation import SMALL_ANSWER, RunningEngine, answer, chunks
from redline.serve.metrics import CONTENT_TYPE, ServerMetrics
from redline.serve.middleware import CLIENT_LEFT, Measured, NeedsKey, OwnHost
from redline.serve.pace import Pace
from redline.serve.requests.admission import Admission, Place
from redline.serve.requests.bodies import parsed_body, read_body
from redline.serve.requests.calls import Call, Served, check_model, make_call, num_characters
from redline.serve.requests.limits import BodyLimits, ServeLimits, body_limits, check_values
from redline.serve.requests.protocol import ApiError, ChatRequest, CompletionRequest, read_request
from redline.serve.requests.uploads import Uploads
from redline.serve.weights import WeightsEndpoint

SMALL_PROMPT = 1024
"""Characters that are tokenised on the event loop; more go to a thread, where the tokenizer lets others run."""
TOKENISERS = 2
"""Threads that tokenise: more would take cores from the engine."""

Result = TypeVar("Result")


@dataclass(slots=True, frozen=True)
class Api:
    """The endpoints over one engine."""

    engine: RunningEngine
    served: Served
    metrics: ServerMetrics
    limits: ServeLimits
    body_limits: BodyLimits
    admission: Admission
    uploads: Uploads
    pace: Pace
    tokenisers: ThreadPoolExecutor
    weights: WeightsEndpoint | None
    """Where weights come in; None where they do not."""

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model(name) for name in self.served.models]})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._model(check_model(request.path_params["model"], self.served)))

    def _model(self, name: str) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "redline",
            "max_model_len": self.served.max_positions,
            "parent": self.served.name if self.served.models[name] else None,
            **self._version,
        }

    @property
    def _version(self) -> Json:
        return {} if self.weights is None else {"version": self.weights.version}

    async def health(self, request: Request) -> Response:
        reason = None
        if not self.engine.is_alive:
            reason = f"the engine has stopped: {self.engine.failure or 'it was asked to'}"
        elif (step_s := self.engine.step_s) > self.limits.step_timeout_s:
            limit = f"{self.limits.step_timeout_s:g} s (serve.step_timeout_s)"
            reason = f"a step of the engine has lasted {step_s:.0f} s, longer than the limit of {limit}"
        if reason is None:
            return JSONResponse({"status": "ok", **self._version})
        return JSONResponse({"status": "failed", "reason": reason}, status_code=503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(self.metrics.text(self.engine.stats), headers={"content-type": CONTENT_TYPE})

    async def _generate(self, request: Request, kind: type[ChatRequest] | type[CompletionRequest]) -> Response:
        self.admission.refuse_beyond(1)  # a full server reads no body
        body = await read_body(request, self.body_limits, self.uploads)
        place = self.admission.enter()
        leaving: Callable[[], None] | None = place.leave
        try:
            call = await self._call(request, kind, body, place)
            parts = (call, place, self.engine, self.served.vocabulary, self.metrics)
            if not call.body.stream:
                content = await _while_connected(request, answer(*parts, self.pace))
                return self._whole(call, content)
            pieces = chunks(*parts)
            # What is wrong with the request shows before its first chunk, while it can still be an HTTP status.
            first = await _while_connected(request, anext(pieces))
            leaving = None  # the stream's to do
            return EventStream(self._events(call, first, pieces), pieces, place.leave, self.limits.client_timeout_s)
        finally:
            if leaving:
                leaving()

    async def _call(
        self, request: Request, kind: type[ChatRequest] | type[CompletionRequest], sent: bytes, place: Place
    ) -> Call:
        """Limits first, then the fields, then the tokens."""
        values = await parsed_body(sent, self.body_limits, self.pace)
        if isinstance(values, dict):
            place.grow(check_values(values, self.limits, self.served.rows))
        body = read_request(kind, values)
        check_model(body.model or self.served.name, self.served)
        if num_characters(body) <= SMALL_PROMPT:
            return make_call(body, self.served, self.limits)
        tokenising = asyncio.get_running_loop().run_in_executor(self.tokenisers, make_call, body, self.served, self.limits)
        return await _while_connected(request, tokenising)

    def _whole(self, call: Call, content: Json) -> Response:
        if call.num_shown <= SMALL_ANSWER:
            return JSONResponse(content)
        encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        pieces = self.pace.items(_texts(encoder.iterencode(content)))
        return TimedStream(("".join(texts) async for texts in pieces), self.limits.client_timeout_s, "application/json")

    async def _events(self, call: Call, first: list[Json], rest: AsyncGenerator[list[Json]]) -> AsyncGenerator[str]:
        """Chunks as server-sent events: in pieces where the first of each choice holds a long prompt."""
        is_small = call.num_prompt_shown <= SMALL_ANSWER
        async for chunk in _with_end(first, rest):
            if is_small:
                yield "".join(map(_event, chunk))
                continue
            async for texts in self.pace.items(_texts(map(_event, chunk))):
                yield "".join(texts)
        yield "data: [DONE]\n\n"

    async def error(self, request: Request, error: Exception) -> Response:
        """Any error as an answer."""
        known = self._as_api_error(error)
        return JSONResponse(known.body, status_code=known.status, headers=known.headers)

    def _as_api_error(self, error: Exception) -> ApiError:
        if isinstance(error, ApiError):
            return error
        if isinstance(error, BrokenModelError):
            return ApiError(500, _on_one_line(error))
        if isinstance(error, EngineMemoryError):
            return ApiError(503, _on_one_line(error))
        if isinstance(error, EngineBusyError):
            return ApiError(429, _on_one_line(error), code="rate_limit_exceeded", headers={"retry-after": "1"})
        if isinstance(error, EngineError):
            is_running = self.engine.is_alive and self.engine.failure is None  # it dies a moment after it says why
            return ApiError(400 if is_running else 503, _on_one_line(error))
        if isinstance(error, HTTPException):
            return ApiError(error.status_code, error.detail, headers=error.headers)
        return ApiError(500, "the server failed; its log says why")


def make_app(
    engine: RunningEngine,
    served: Served,
    api_key: str | None = None,
    limits: ServeLimits | None = None,
    hosts: Collection[str] = (),
    weights: WeightsEndpoint | None = None,
) -> Starlette:
    """The whole application. With an `api_key`, everything but /health needs it; without one, only requests to a loopback
    address or to one of `hosts` are answered. `weights` has a token of its own."""
    limits, metrics = limits or ServeLimits(), ServerMetrics()
    api = Api(
        engine,
        served,
        metrics,
        limits,
        body_limits(limits, served.max_positions),
        Admission(served.rows, limits.max_queued_choices),
        Uploads(limits.max_uploads, limits.client_timeout_s),
        Pace(),
        ThreadPoolExecutor(TOKENISERS, thread_name_prefix="redline-tokenise"),
        weights,
    )
    guard = Middleware(NeedsKey, api_key) if api_key else Middleware(OwnHost, hosts)
    return Starlette(
        routes=[
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.completions, methods=["POST"]),
            Route("/v1/models", api.models),
            Route("/v1/models/{model:path}", api.model),
            Route("/health", api.health),
            Route("/metrics", api.show_metrics),
            *(weights.routes() if weights else ()),
        ],
        middleware=[Middleware(Measured, metrics), guard],
        exception_handlers=dict.fromkeys((ApiError, EngineError, HTTPException, Exception), api.error),
    )


# ── clients that leave ─────────────────────────────────────────────────────────────────────────────────────────────────


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


class TimedStream(StreamingResponse):
    """Ends where the client reads nothing for `timeout_s`."""

    def __init__(self, parts: AsyncIterable[str], timeout_s: float, media_type: str) -> None:
        super().__init__(parts, media_type=media_type, headers={"cache-control": "no-cache"})
        self._timeout_s = timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def timed(message: Message) -> None:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await send(message)
            except TimeoutError as error:
                raise ClientDisconnect(f"the client has read nothing for {self._timeout_s:g} s") from error

        with suppress(ClientDisconnect):
            await super().__call__(scope, receive, timed)


class EventStream(TimedStream):
    """Server-sent events. However the response ends, so does the generator of its chunks, and `leave` is called."""

    def __init__(
        self, events: AsyncIterable[str], source: AsyncGenerator[list[Json]], leave: Callable[[], None], timeout_s: float
    ) -> None:
        super().__init__(events, timeout_s, "text/event-stream")
        self._source = source
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._source):
                await super().__call__(scope, receive, send)
        finally:
            self._leave()


async def _with_end(first: list[Json], rest: AsyncGenerator[list[Json]]) -> AsyncGenerator[list[Json]]:
    """All chunks, and what ended them if it was an error."""
    yield first
    try:
        async for chunk in rest:
            yield chunk
    except EngineError as error:  # it had accepted the request, so this is no mistake of the client
        yield [ApiError(500, _on_one_line(error)).body]


def _event(content: Json) -> str:
    # ASCII: some clients take a line separator of Unicode for the end of the event.
    return f"data: {json.dumps(content, allow_nan=False, separators=(',', ':'))}\n\n"


def _texts(texts: Iterator[str]) -> Generator[str]:
    yield from texts


def _on_one_line(error: EngineError) -> str:
    return f"{error.message}; {error.hint}" if error.hint else error.message
