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
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import queue
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np

from redline.addresses import is_loopback
from redline.errors import ConfigError, PeerError, RedlineError, WireClosed, WireError, WireTimeout, in_words

TOKEN_VARIABLE = "REDLINE_WIRE_TOKEN"
"""The environment variable by which a process gets its token: arguments are seen by every user of a machine."""
MAX_FRAME_BYTES = 8 << 30
"""The largest body of a frame; a bucket of weights is some hundred megabytes."""
MAX_HEADER_BYTES = 64 << 20
MAX_HELLO_BYTES = 4096
"""The largest frame of a peer that has not shown the token."""
HELLO_S = 10.0
"""Seconds in which a peer has to show the token."""
MAX_HELLOS = 64
"""Peers that may be about to show the token at once; others are turned away."""
LOST_S = 60
"""Seconds after which the system takes another machine that acknowledges nothing for lost."""
MAGIC = b"RLW1"
_PREFIX = struct.Struct("!4sIQ")
_MAX_PARTS = 512
"""Buffers that are handed to the system at once; Linux takes 1024."""
_LONGEST_POLL_S = 1.0

Buffer = Any
"""Bytes, a memoryview or an array whose elements lie side by side: whatever `memoryview` takes."""


@dataclass(slots=True, frozen=True)
class Frame:
    """One message."""

    kind: str
    fields: dict[str, Any]
    """Whatever JSON holds."""
    buffers: list[memoryview] = field(default_factory=list)
    """Raw bytes, each in memory of its own that nobody else has: `np.frombuffer` and `torch.frombuffer` may write to it."""


def make_token() -> str:
    """A new random token."""
    return secrets.token_urlsafe(32)


def token_from_environment() -> str:
    """The token that this process was started with. It is taken out of the environment, so that children do not inherit it.
    Raises ConfigError where there is none."""
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        raise ConfigError(f"{TOKEN_VARIABLE} is not set", "this program is started by redline, which gives it a token")
    return token


# ── a connection ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Connection:
    """One end of a connection. One thread may send while another receives. A context manager that closes it."""

    def __init__(self, sock: socket.socket, name: str, role: str = "", max_bytes: int = MAX_FRAME_BYTES) -> None:
        sock.setblocking(False)  # several threads use it, each with a time limit of its own
        _keep_alive(sock)
        self._sock = sock
        self.name = name
        """Names the peer in errors; may be changed to what a user knows it by."""
        self.role = role
        """What the connection is for, as the side that opened it said."""
        self._max_bytes = max_bytes
        self._is_closed = False
        self._sending, self._receiving, self._asking = threading.Lock(), threading.Lock(), threading.Lock()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def send(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Send a frame. Blocks while the peer does not take what was sent before: for `timeout_s` seconds at most, by default
        without end. Any thread may send. Raises WireClosed or WireTimeout; where part of the frame was sent, the connection is
        closed."""
        whole = [memoryview(buffer) for buffer in buffers]
        views = [view.cast("B") for view in whole if view.nbytes]
        header = json.dumps([kind, fields or {}, [view.nbytes for view in whole]]).encode()
        body = sum(view.nbytes for view in views)
        assert len(header) <= MAX_HEADER_BYTES, f"the header of {kind!r} has {len(header):,} bytes"
        assert body <= self._max_bytes, f"{kind!r} has {body:,} bytes, more than the limit of {self._max_bytes:,}"
        deadline = _Deadline(timeout_s)
        with self._sending:
            self._send_all([memoryview(_PREFIX.pack(MAGIC, len(header), body) + header), *views], kind, deadline)

    def receive(self, timeout_s: float | None = None) -> Frame:
        """Block until the next frame is there. Raises WireTimeout where none has begun to come after `timeout_s` seconds, with
        the connection as it was; one that has come in part by then closes it, as does one that is malformed (WireError)."""
        deadline = _Deadline(timeout_s)
        with self._receiving:
            prefix = self._receive_exactly(_PREFIX.size, deadline, may_wait=True)
            return self._receive_rest(prefix, deadline)

    def ask(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        *,
        timeout_s: float,
    ) -> Frame:
        """Send a frame and block until the reply is there, for `timeout_s` seconds at most. Raises PeerError where it is an
        `error`. After a WireTimeout the connection is closed: a late reply must not be taken for that to the next question."""
        deadline = _Deadline(timeout_s)
        with self._asking:
            self.send(kind, fields, buffers, timeout_s)
            try:
                reply = self.receive(deadline.left_s)
            except WireTimeout:
                self.close()
                raise WireTimeout(f"{self.name} did not answer {kind!r} within {timeout_s:g} s", _TIMEOUT_HINT) from None
        if reply.kind == "error":
            raise peer_error(self.name, reply)
        return reply

    def close(self) -> None:
        """End the connection. Any thread may; one that sends or receives meanwhile raises WireClosed."""
        self._is_closed = True
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ── bytes ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _send_all(self, views: list[memoryview], kind: str, deadline: _Deadline) -> None:
        begun = False
        while views:
            try:
                sent = self._sock.sendmsg(views[:_MAX_PARTS])
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline):
                    if begun:
                        self.close()
                    why = f"{self.name} took nothing of {kind!r} for {deadline.limit_s:g} s"
                    raise WireTimeout(why, _TIMEOUT_HINT) from None
                continue
            except OSError as error:
                raise self._lost(error) from None
            begun = True
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def _receive_exactly(self, count: int, deadline: _Deadline, *, may_wait: bool = False) -> memoryview:
        """So many bytes. With `may_wait`, a timeout before the first of them leaves the connection as it is."""
        into = np.empty(count, np.uint8).data  # a bytearray would be written with zeros first
        filled = 0
        while filled < count:
            try:
                received = self._sock.recv_into(into[filled:])
            except BlockingIOError:
                if not self._wait(select.POLLIN, deadline):
                    if filled or not may_wait:
                        self.close()
                    raise WireTimeout(f"{self.name} sent nothing for {deadline.limit_s:g} s", _TIMEOUT_HINT) from None
                continue
            except OSError as error:
                raise self._lost(error) from None
            if not received:
                raise self._lost(None)
            filled += received
        return into

    def _receive_rest(self, prefix: memoryview, deadline: _Deadline) -> Frame:
        magic, header_bytes, body = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise self._malformed("it does not begin as one")
        if header_bytes > min(MAX_HEADER_BYTES, self._max_bytes) or body > self._max_bytes:
            raise self._malformed(f"it has {header_bytes:,} + {body:,} bytes; the limit is {self._max_bytes:,}")
        header = self._receive_exactly(header_bytes, deadline)
        try:
            kind, fields, sizes = json.loads(bytes(header))
        except (ValueError, TypeError, RecursionError):
            raise self._malformed("its header cannot be read") from None
        is_whole = isinstance(kind, str) and isinstance(fields, dict) and isinstance(sizes, list)
        if not is_whole or not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) != body:
            raise self._malformed("its header contradicts itself")
        return Frame(kind, fields, [self._receive_exactly(size, deadline) for size in sizes])

    def _wait(self, event: int, deadline: _Deadline) -> bool:
        """Block until the socket is ready; False where the time is up. In short turns, so that `close` is noticed."""
        while True:
            descriptor = self._sock.fileno()
            if descriptor < 0:
                raise self._lost(None)
            left_s = deadline.left_s
            poll = select.poll()
            poll.register(descriptor, event)
            turn_s = _LONGEST_POLL_S if left_s is None else min(left_s, _LONGEST_POLL_S)
            if poll.poll(turn_s * 1000):
                return True
            if left_s is not None and left_s <= turn_s:
                return False

    def _lost(self, error: OSError | None) -> WireClosed:
        was_closed_here = self._is_closed
        self.close()
        if was_closed_here:
            return WireClosed(f"the connection to {self.name} was closed")
        why = f": {error.strerror or error}" if error is not None else ""
        return WireClosed(f"{self.name} has ended the connection{why}", "look at what that process said last")

    def _malformed(self, why: str) -> WireError:
        self.close()
        return WireError(f"{self.name} sent what is no frame: {why}", "both sides must be of one version of redline")


_TIMEOUT_HINT = "look whether that process still runs, and whether its machine can be reached"


class _Deadline:
    """A moment until which to wait; None waits without end."""

    def __init__(self, limit_s: float | None) -> None:
        self.limit_s = limit_s if limit_s is not None else float("inf")
        self._at = None if limit_s is None else time.monotonic() + limit_s

    @property
    def left_s(self) -> float | None:
        return None if self._at is None else max(0.0, self._at - time.monotonic())


def _keep_alive(sock: socket.socket) -> None:
    """Notice a machine that is gone: on a quiet connection by probes, on a busy one by what it does not acknowledge."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if not hasattr(socket, "TCP_KEEPIDLE") or is_loopback(sock.getpeername()[0]):
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, LOST_S // 2)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, LOST_S // 6)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LOST_S * 1000)


# ── errors of the other side ───────────────────────────────────────────────────────────────────────────────────────────


def error_fields(error: BaseException) -> dict[str, str]:
    """An error as the fields of a reply of kind `error`."""
    hint = error.hint if isinstance(error, RedlineError) else ""
    return {"type": type(error).__name__, "message": in_words(error), "hint": hint}


def peer_error(name: str, reply: Frame) -> PeerError:
    """The error that a reply of kind `error` tells of, with the name of the peer that had it."""
    fields = reply.fields
    message, hint, kind = (str(fields.get(key, "")) for key in ("message", "hint", "type"))
    return PeerError(f"{name}: {message or 'it failed without a word'}", hint, kind)


# ── opening one ────────────────────────────────────────────────────────────────────────────────────────────────────────


def connect(address: str, token: str, role: str, timeout_s: float, *, max_bytes: int = MAX_FRAME_BYTES) -> Connection:
    """Open a connection to `host:port` for a role that the listener knows. Blocks for `timeout_s` seconds at most. Raises
    WireTimeout, WireClosed, or WireError where the other side does not know the token."""
    name = f"{address} ({role})"
    host, _, port = address.rpartition(":")
    deadline = _Deadline(timeout_s)
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
    except TimeoutError:
        raise WireTimeout(f"{name} cannot be reached within {timeout_s:g} s", _TIMEOUT_HINT) from None
    except OSError as error:
        raise WireClosed(f"{name} cannot be reached: {error.strerror or error}", _TIMEOUT_HINT) from None
    connection = Connection(sock, name, role, MAX_HELLO_BYTES)
    try:
        _show_token(connection, token, role, deadline)
    except BaseException:
        connection.close()
        raise
    connection._max_bytes = max_bytes
    return connection


def _show_token(connection: Connection, token: str, role: str, deadline: _Deadline) -> None:
    ours = secrets.token_hex(16)
    connection.send("hello", {"role": role, "challenge": ours}, timeout_s=deadline.left_s)
    answer = connection.receive(deadline.left_s)
    theirs = str(answer.fields.get("challenge", ""))
    if not hmac.compare_digest(str(answer.fields.get("proof", "")), _proof(token, "listener", role, ours)):
        raise WireError(f"{connection.name} does not know the token of this run", "something else listens there: start again")
    connection.send("proof", {"proof": _proof(token, "caller", role, theirs)}, timeout_s=deadline.left_s)
    welcome = connection.receive(deadline.left_s)
    if welcome.kind != "welcome":
        raise WireError(f"{connection.name} has turned the connection away", "both sides must have one token")


def _check_token(connection: Connection, token: str) -> str | None:
    """The role of a peer that has shown the token; None of any other."""
    deadline = _Deadline(HELLO_S)
    hello = connection.receive(deadline.left_s)
    role, theirs, ours = str(hello.fields.get("role", "")), str(hello.fields.get("challenge", "")), secrets.token_hex(16)
    proof = _proof(token, "listener", role, theirs)
    connection.send("challenge", {"challenge": ours, "proof": proof}, timeout_s=deadline.left_s)
    shown = connection.receive(deadline.left_s)
    if not hmac.compare_digest(str(shown.fields.get("proof", "")), _proof(token, "caller", role, ours)):
        connection.send("refused", timeout_s=deadline.left_s)
        return None
    connection.send("welcome", timeout_s=deadline.left_s)
    return role


def _proof(token: str, side: str, role: str, challenge: str) -> str:
    """What only somebody who knows the token can answer to a challenge. The side is part of it: neither can be answered with
    the other's own."""
    return hmac.new(token.encode(), json.dumps([side, role, challenge]).encode(), hashlib.sha256).hexdigest()


def listen(host: str = "127.0.0.1", port: int = 0, *, token: str, max_bytes: int = MAX_FRAME_BYTES) -> Listener:
    """Take connections of peers that know the token, from this machine alone unless `host` says otherwise; port 0 is any that
    is free. Raises ConfigError where the address cannot be had."""
    assert token, "whatever listens has a token"
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=MAX_HELLOS)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", "choose another address") from None
    return Listener(sock, token, max_bytes)


class Listener:
    """Takes connections; peers show the token in threads of their own, so that a slow one keeps nobody waiting."""

    def __init__(self, sock: socket.socket, token: str, max_bytes: int) -> None:
        self._sock, self._token, self._max_bytes = sock, token, max_bytes
        host, port = sock.getsockname()[:2]
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """`host:port`, for `connect`."""
        self.num_refused = 0
        """Peers that did not show the token."""
        self._accepted: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._hellos = threading.BoundedSemaphore(MAX_HELLOS)
        threading.Thread(target=self._take, name="wire-listener", daemon=True).start()

    def accept(self, timeout_s: float | None = None) -> Connection:
        """Block until a peer has shown the token. Raises WireTimeout after `timeout_s` seconds, WireClosed after `close`."""
        try:
            connection = self._accepted.get(timeout=timeout_s)
        except queue.Empty:
            raise WireTimeout(f"nobody has connected to {self.address} within {timeout_s:g} s", _TIMEOUT_HINT) from None
        if connection is None:
            self._accepted.put(None)  # for whoever asks next
            raise WireClosed(f"{self.address} takes no more connections")
        return connection

    def close(self) -> None:
        """Take no more connections; those that were accepted go on."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
        self._accepted.put(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _take(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except ConnectionAbortedError:
                continue
            except OSError:
                self._accepted.put(None)
                return
            if self._hellos.acquire(blocking=False):
                threading.Thread(target=self._greet, args=(sock,), name="wire-hello", daemon=True).start()
            else:
                sock.close()

    def _greet(self, sock: socket.socket) -> None:
        connection, role = None, None
        try:
            host, port = sock.getpeername()[:2]
            connection = Connection(sock, f"{host}:{port}", max_bytes=MAX_HELLO_BYTES)
            role = _check_token(connection, self._token)
        except (WireError, OSError):
            pass
        finally:
            self._hellos.release()
        if connection is None or role is None:
            self.num_refused += 1
            sock.close()
            return
        connection.role, connection.name, connection._max_bytes = role, f"{connection.name} ({role})", self._max_bytes
        self._accepted.put(connection)
