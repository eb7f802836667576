"""Frames between two processes: a JSON header and raw buffers over TCP. Nothing is ever unpickled.

    listener = listen(token=token)              connection = connect(listener.address, token, role="weights", timeout_s=10)
    connection = listener.accept()              reply = connection.ask("load", {"name": "embed"}, [array], timeout_s=30)
    frame = connection.receive()
    connection.send("loaded", {"bytes": 4096})  reply.fields == {"bytes": 4096}

    a frame     magic "RLW1" · header length (uint32) · body length (uint64) · header · buffers
    its header  JSON: [kind, fields, [bytes of each buffer]]

Both sides prove that they know the token before anything else is read: each answers the other's random challenge with an HMAC
of it, so that the token itself never crosses the network. What follows is neither encrypted nor signed: use it on networks that
you trust. Where nothing else is said a listener is reached from this machine alone.

A frame that is malformed or larger than the limit ends its connection, not the process. Every error names the peer: WireClosed
says that it went away, WireTimeout what it did not answer and for how long, PeerError has the words of its own error.

Waiting for a frame and taking it are timed apart. A frame that has begun may take as long as it needs while its bytes come; one
of which nothing comes for `Connection.stall_s` seconds ends its connection. A machine that is gone is noticed after `LOST_S`
seconds also where nothing is sent.
"""

from __future__ import annotations

from redline.wire.connection import (
    LOST_S,
    MAX_FRAME_BYTES,
    MAX_HEADER_BYTES,
    STALL_S,
    Buffer,
    Connection,
    Frame,
    error_fields,
    peer_error,
)
from redline.wire.opening import HELLO_S, TOKEN_VARIABLE, Listener, connect, listen, make_token, token_from_environment

__all__ = [
    "HELLO_S",
    "LOST_S",
    "MAX_FRAME_BYTES",
    "MAX_HEADER_BYTES",
    "STALL_S",
    "TOKEN_VARIABLE",
    "Buffer",
    "Connection",
    "Frame",
    "Listener",
    "connect",
    "error_fields",
    "listen",
    "make_token",
    "peer_error",
    "token_from_environment",
]
