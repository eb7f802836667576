"""Calls of a server that takes weights: JSON or raw bodies over HTTP with the standard library, errors that name the server."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from redline.addresses import fits_header, holds_login, is_server_address
from redline.errors import ConfigError, ServerAwayError, WeightSyncError

Json = dict[str, Any]
MAX_ANSWER_BYTES = 1 << 26
KINDS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
"""What opens a connection, by the scheme of an address."""


@dataclass(slots=True, frozen=True)
class HttpServer:
    """One server. Usable from several threads: every call has a connection of its own."""

    url: str
    """`http://127.0.0.1:8000`; calls go below its path, where it has one."""
    token: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0
    """Seconds that one call may take."""

    def __post_init__(self) -> None:
        """Raises ConfigError for an address or a token that no request could have. What it says never holds a secret."""
        if holds_login(self.url):
            raise ConfigError("the address of a server holds a name or a password", "leave them out: it is asked with a token")
        if not is_server_address(self.url):
            raise ConfigError(f"{self.url!r} is no address of a server", "for example http://127.0.0.1:8000")
        if self.token is not None and not fits_header(self.token):
            raise ConfigError(f"the token for {self.url} has a character that no HTTP header takes", "has it a line break?")

    def get(self, path: str) -> Json:
        return self.call("GET", path)

    def post(self, path: str, content: Mapping[str, Any] | None = None) -> Json:
        return self.call("POST", path, [json.dumps(content or {}).encode()], {"Content-Type": "application/json"})

    def call(
        self, method: str, path: str, parts: Sequence[bytes | memoryview] = (), headers: Mapping[str, str] | None = None
    ) -> Json:
        """Send a body in parts and return the answer's JSON; an answer that is none gives an empty one. Blocks. Raises
        WeightSyncError with the server's address where it refuses, is not there, or does not answer in time."""
        connection = self._connection()
        try:
            length = sum(memoryview(part).nbytes for part in parts)
            sent = {"Content-Length": str(length), **(headers or {})}
            prefix = urlsplit(self.url).path.rstrip("/")
            connection.request(method, prefix + path, iter(parts) if parts else None, sent | self._authorization())
            response = connection.getresponse()
            body = response.read(MAX_ANSWER_BYTES)
        except TimeoutError:
            why = f"{self.url} did not answer {method} {path} within {self.timeout_s:g} s"
            raise ServerAwayError(why, "look whether that server still runs") from None
        except (OSError, http.client.HTTPException) as error:
            why = f"{self.url} did not take {method} {path}: {error}"
            raise ServerAwayError(why, "look whether that server still runs, and at what it said last") from error
        finally:
            connection.close()
        return self._answer(method, path, response.status, body)

    def _answer(self, method: str, path: str, status: int, body: bytes) -> Json:
        try:
            content = json.loads(body)
        except ValueError:
            content = {}
        if status < 300:
            return content if isinstance(content, dict) else {"results": content}
        said = _message(content) or body.decode(errors="replace").strip()[:500] or "(nothing)"
        hints = {401: "give it the token that the server was started with", 404: "does this server take weights?"}
        raise WeightSyncError(f"{self.url} refuses {method} {path} ({status}): {said}", hints.get(status, ""))

    def _connection(self) -> http.client.HTTPConnection:
        parts = urlsplit(self.url)
        assert parts.hostname is not None
        return KINDS[parts.scheme](parts.hostname, parts.port, timeout=self.timeout_s)

    def _authorization(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}


def _message(content: Any) -> str:
    """What the server said, in whichever of the usual places."""
    inner = content.get("error", content) if isinstance(content, dict) else content
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return str(inner) if inner else ""
