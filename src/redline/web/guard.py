"""Around every answer of the dashboard: who may ask, and what the browser may do with it."""

from __future__ import annotations

import hmac
from http.cookies import SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from redline.addresses import is_own_name

COOKIE = "redline_token"
HEADERS = {
    # Scripts and styles are files of ours; whatever a model wrote into a page can neither run nor send anything anywhere.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Guard:
    """On a loopback address only requests to that address pass: a page of a foreign site may resolve its own name to it. On any
    other the token is asked for, once, and then kept in a cookie."""

    def __init__(self, app: ASGIApp, host: str, token: str | None) -> None:
        self._app = app
        self._host = host
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        answer = self._refuse_host(scope) if self._token is None else self._ask_token(scope)
        await (answer or self._app)(scope, receive, guarded)

    def _refuse_host(self, scope: Scope) -> PlainTextResponse | None:
        if is_own_name(Headers(scope=scope).get("host", ""), (self._host,)):
            return None
        return PlainTextResponse("this dashboard answers to the address it listens on", status_code=421)

    def _ask_token(self, scope: Scope) -> PlainTextResponse | RedirectResponse | None:
        assert self._token is not None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if _same(given, self._token):
            answer = RedirectResponse(scope["path"], status_code=303)
            answer.set_cookie(COOKIE, self._token, httponly=True, samesite="strict")
            return answer
        kept = SimpleCookie(Headers(scope=scope).get("cookie", "")).get(COOKIE)
        if kept is not None and _same(kept.value, self._token):
            return None
        return PlainTextResponse("open the address that `redline dash` has printed: it has the token", status_code=403)


def _same(given: str, expected: str) -> bool:
    return hmac.compare_digest(given.encode(), expected.encode())
