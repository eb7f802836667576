"""Bodies of requests: bounded in bytes, in values and in time, and parsed without holding up others."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from redline.serve.middleware import CLIENT_LEFT
from redline.serve.pace import Pace
from redline.serve.requests.limits import BodyLimits, check_structure
from redline.serve.requests.protocol import ApiError
from redline.serve.requests.uploads import Uploads

SMALL_BYTES = 16_384
"""Up to here a body is parsed where it stands."""
READ_AT_ONCE, READ_REST_S = 2**18, 0.005
"""Bytes of a body that are read before a rest, and the rest in seconds: to take in a body is work on the event loop too."""
DRAINED_BYTES = 2**26
"""Bytes of a too large body that are still read: a client that is cut off while it writes never sees the reason."""


async def read_body(request: Request, limits: BodyLimits, uploads: Uploads) -> bytes:
    """Return the bytes of a body that claims to be JSON, or raise `ApiError`. Waits as long as `uploads` lets it."""
    # A page in a browser may send a form to this port without asking, but never JSON.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
    try:
        async with uploads.reading():
            return await _read(request, limits.max_bytes)
    except ClientDisconnect as error:
        raise ApiError(CLIENT_LEFT, "the client left") from error


async def parsed_body(body: bytes, limits: BodyLimits, pace: Pace) -> Any:
    """Return the JSON of a body, or raise `ApiError`."""
    if len(body) <= SMALL_BYTES:
        return _parsed(body)
    await pace.finish(check_structure(body, limits.max_values))
    return await pace.call(lambda: _parsed(body))


async def _read(request: Request, most: int) -> bytes:
    announced = request.headers.get("content-length", "")
    too_large = ApiError(
        413,
        f"the body is larger than {most} bytes; send less at once (serve.max_body_bytes is the limit)",
        code="request_too_large",
        headers=_CLOSE,
    )
    most_read = max(most, DRAINED_BYTES)
    if announced.isdecimal() and int(announced) > most_read:
        raise too_large
    kept, size, rested = bytearray(), 0, 0
    async for part in request.stream():
        size += len(part)
        if size - rested > READ_AT_ONCE:
            rested = size
            await asyncio.sleep(READ_REST_S)
        if size > most_read:
            raise too_large
        if size <= most:
            kept += part
    if size > most:
        raise too_large
    return bytes(kept)


def _parsed(body: bytes) -> Any:
    try:
        # Unlike json, it refuses half of a surrogate pair. To cache values as well takes five times as long where all differ.
        return from_json(body, cache_strings="keys")
    except ValueError as error:
        raise ApiError(400, f"the body is not JSON: {error}") from error


_CLOSE = {"connection": "close"}
