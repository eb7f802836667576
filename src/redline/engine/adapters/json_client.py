"""JSON over HTTP with the standard library: retries, and errors that carry what the server said."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from redline.errors import EngineError, EngineLostError

Json = dict[str, Any]

BUSY = {429, 500, 502, 503, 504}
"""Statuses that another attempt may turn into an answer."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
EVENTS = "text/event-stream"


class _BusyError(EngineError):
    """The server has no room now, or fails for a moment."""


class JsonClient:
    """Calls below one base address. Usable from several threads."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float, num_retries: int) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._timeout_s = timeout_s
        self._num_retries = num_retries

    def get(self, path: str) -> Json:
        """Return what the server answers. Blocks, for all retries together where it is busy or away; raises EngineError, and
        EngineLostError where it cannot be reached."""
        return self._call(Request(self.url + path, headers=self._headers))

    def post(self, path: str, body: Json) -> Json:
        """Send JSON and return what the server answers; blocks and raises as `get` does."""
        return self._call(Request(self.url + path, json.dumps(body).encode(), self._headers))

    def stream(self, path: str, body: Json) -> Generator[Json]:
        """Send JSON and yield what the server sends in events as it comes, or its one answer where it sends none. Raises as
        `get` does, and tries nothing again. Closing it closes the connection."""
        request = Request(self.url + path, json.dumps(body).encode(), self._headers)
        with self._said_in_words(), urlopen(request, timeout=self._timeout_s) as response:
            if response.headers.get_content_type() != EVENTS:
                yield self._document(response.read())
                return
            for line in response:
                data = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data == b"[DONE]":
                    return
                if data:
                    yield self._document(data)

    def _call(self, request: Request) -> Json:
        for pause_s in self._pauses():
            try:
                return self._send(request)
            except (_BusyError, EngineLostError):
                time.sleep(pause_s)
        return self._send(request)

    def _pauses(self) -> Iterator[float]:
        """Seconds, one for each retry, twice as long each time. Many threads meet the same busy server, and should not all
        come back at once."""
        for retry in range(self._num_retries):
            yield min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**retry) * random.uniform(0.5, 1.0)

    def _send(self, request: Request) -> Json:
        with self._said_in_words(), urlopen(request, timeout=self._timeout_s) as response:
            return self._document(response.read())

    @contextmanager
    def _said_in_words(self) -> Iterator[None]:
        """Raise what is wrong with a connection, or with what came of it, as EngineError."""
        try:
            yield
        except HTTPError as error:
            raise self._refusal(error) from error
        except (OSError, HTTPException, OverflowError) as error:  # the last of a port that there is not
            raise self._unreachable(error) from error

    def _document(self, text: bytes) -> Json:
        try:
            content = json.loads(text)
        except ValueError as error:
            raise self._not_ours() from error
        if not isinstance(content, dict):
            raise self._not_ours()
        return content

    def _refusal(self, error: HTTPError) -> EngineError:
        said = _message(error.read())
        if error.code in BUSY:
            return _BusyError(f"{self.url} failed with status {error.code}: {said}", "its log may say why")
        if error.code in (401, 403):
            return EngineError(f"{self.url} wants another API key: {said}", "name the variable that holds it: api_key_env")
        if error.code == 404:
            return EngineError(f"{self.url} does not know that: {said}", "check the model's name, and that the URL ends in /v1")
        return EngineError(f"{self.url} refuses the request: {said}")

    def _unreachable(self, error: Exception) -> EngineError:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, TimeoutError):
            return EngineError(f"{self.url} did not answer within {self._timeout_s:g} s", "raise timeout_s")
        return EngineLostError(f"cannot reach {self.url}: {reason}", "start the server, and check that the URL ends in /v1")

    def _not_ours(self) -> EngineError:
        return EngineError(f"{self.url} does not answer in JSON", "is it an OpenAI-compatible server, and does it end in /v1?")


def _message(body: bytes) -> str:
    """What the server said, in whichever of the usual places."""
    try:
        content = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip() or "(nothing)"
    inner = content.get("error", content) if isinstance(content, dict) else content
    if isinstance(inner, dict):
        inner = inner.get("message") or inner.get("detail") or inner
    return str(inner)
