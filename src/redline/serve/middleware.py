"""Around every request: the API key, and the count and time of what was answered."""

from __future__ import annotations

import hmac
import time
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redline.addresses import host_name, is_own_name
from redline.serve.metrics import ServerMetrics
from redline.serve.requests.protocol import ApiError

ENDPOINTS = {"/v1/chat/completions": "chat", "/v1/completions": "completions"}
"""Path → the label of its metrics."""
CLIENT_LEFT = 499
"""The status, in metrics alone, of a request whose client did not wait for the end."""


class NeedsKey:
    """Lets no request past without `Authorization: Bearer KEY`, except to /health, and to /weights, which has its own token."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _has_rule_of_its_own(scope["path"]):
            given = Headers(scope=scope).get("authorization", "").encode("latin-1")
            if not hmac.compare_digest(given, self._expected):
                error = ApiError(401, "missing or wrong API key: send Authorization: Bearer KEY", code="invalid_api_key")
                response = JSONResponse(error.body, status_code=401, headers={"www-authenticate": "Bearer"})
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _has_rule_of_its_own(path: str) -> bool:
    return path in ("/health", "/weights") or path.startswith("/weights/")


class OwnHost:
    """Answers only requests to this machine's loopback or to one of `names`; for a server without a key, which any page in a
    browser could use if it were let in under its own name. Such a page's other requests stop at the browser: they are of
    another origin, no answer here allows them (CORS), and a POST must be JSON, which the browser asks leave for first."""

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app = app
        self._names = tuple(spelled for name in names for spelled in (name.lower(), host_name(name)))  # with a port or without

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            if not is_own_name(host, self._names):
                error = ApiError(
                    421, f"this server does not answer to {host!r}; start it with --allowed-host", code="wrong_host"
                )
                await JSONResponse(error.body, status_code=421)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Measured:
    """Notes status and seconds of each request that generates."""

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = ENDPOINTS.get(scope["path"]) if scope["type"] == "http" else None
        if endpoint is None:
            await self._app(scope, receive, send)
            return
        started, status, is_whole = time.perf_counter(), 500, False

        async def noting(message: Message) -> None:
            nonlocal status, is_whole
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                is_whole = not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, noting)
        finally:
            known = status if is_whole or status == 500 else CLIENT_LEFT
            self._metrics.answered(endpoint, known, time.perf_counter() - started)
