"""One end of a connection: frames go out and come in, each within its time."""

from __future__ import annotations

import json
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
from redline.errors import PeerError, RedlineError, WireClosed, WireError, WireTimeout, in_words

MAX_FRAME_BYTES = 8 << 30
"""The largest body of a frame; a bucket of weights is some hundred megabytes."""
MAX_HEADER_BYTES = 64 << 20
LOST_S = 30
"""Seconds after which the system takes another machine that acknowledges nothing for lost, also on a quiet connection."""
STALL_S = 30.0
"""Seconds that a frame which has come in part may stand still."""
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
        self.max_bytes = max_bytes
        """The largest body of a frame, in both directions."""
        self.stall_s = STALL_S
        """Seconds that a frame which has come in part may stand still."""
        self._is_closed = False
        self._sending, self._receiving, self._asking = threading.Lock(), threading.Lock(), threading.Lock()

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def own_host(self) -> str:
        """The address of this machine that the peer sees."""
        return str(self._sock.getsockname()[0])

    def send(
        self,
        kind: str,
        fields: Mapping[str, Any] | None = None,
        buffers: Sequence[Buffer] = (),
        timeout_s: float | None = None,
    ) -> None:
        """Send a frame. Blocks while the peer takes nothing of it: for `timeout_s` seconds at most, by default without end; a
        frame that goes on may take longer. Any thread may send. Raises WireClosed or WireTimeout; where part of the frame was
        sent, the connection is closed."""
        whole = [memoryview(buffer) for buffer in buffers]
        views = [view.cast("B") for view in whole if view.nbytes]
        header = json.dumps([kind, fields or {}, [view.nbytes for view in whole]]).encode()
        body = sum(view.nbytes for view in views)
        assert len(header) <= MAX_HEADER_BYTES, f"the header of {kind!r} has {len(header):,} bytes"
        assert body <= self.max_bytes, f"{kind!r} has {body:,} bytes, more than the limit of {self.max_bytes:,}"
        deadline = Deadline(timeout_s, renews=True)
        with self._sending:
            self._send_all([memoryview(_PREFIX.pack(MAGIC, len(header), body) + header), *views], kind, deadline)

    def receive(self, timeout_s: float | None = None, *, whole_s: float | None = None) -> Frame:
        """Block until the next frame is there. Raises WireTimeout where none has begun to come after `timeout_s` seconds, with
        the connection as it was. A frame that has begun may take as long as it needs while its bytes come, or `whole_s` seconds
        where given; one that stands still for `stall_s` closes the connection, as does one that is malformed (WireError)."""
        with self._receiving:
            if not self._wait(select.POLLIN, Deadline(timeout_s)):
                raise WireTimeout(f"{self.name} sent nothing for {timeout_s:g} s", TIMEOUT_HINT)
            deadline = Deadline(self.stall_s, renews=True) if whole_s is None else Deadline(whole_s)
            return self._receive_rest(self._receive_exactly(_PREFIX.size, deadline), deadline)

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
        deadline = Deadline(timeout_s)
        with self._asking:
            self.send(kind, fields, buffers, timeout_s)
            try:
                reply = self.receive(deadline.left_s)
            except WireTimeout as error:
                if self._is_closed:  # it stopped within its answer
                    raise WireTimeout(f"{error.message}, in its answer to {kind!r}", TIMEOUT_HINT) from None
                self.close()
                raise WireTimeout(f"{self.name} did not answer {kind!r} within {timeout_s:g} s", TIMEOUT_HINT) from None
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

    def _send_all(self, views: list[memoryview], kind: str, deadline: Deadline) -> None:
        begun = False
        while views:
            try:
                sent = self._sock.sendmsg(views[:_MAX_PARTS])
            except BlockingIOError:
                if not self._wait(select.POLLOUT, deadline):
                    if begun:
                        self.close()
                    why = f"{self.name} took nothing of {kind!r} for {deadline.limit_s:g} s"
                    raise WireTimeout(why, TIMEOUT_HINT) from None
                continue
            except OSError as error:
                raise self._lost(error) from None
            begun = True
            deadline.progressed()
            while views and sent >= views[0].nbytes:
                sent -= views.pop(0).nbytes
            if sent:
                views[0] = views[0][sent:]

    def _receive_exactly(self, count: int, deadline: Deadline) -> memoryview:
        """So many bytes of a frame that has begun."""
        into = np.empty(count, np.uint8).data  # a bytearray would be written with zeros first
        filled = 0
        while filled < count:
            try:
                received = self._sock.recv_into(into[filled:])
            except BlockingIOError:
                if not self._wait(select.POLLIN, deadline):
                    self.close()
                    why = f"{self.name} sent part of a frame, and no more of it for {deadline.limit_s:g} s"
                    raise WireTimeout(why, TIMEOUT_HINT) from None
                continue
            except OSError as error:
                raise self._lost(error) from None
            if not received:
                raise self._lost(None)
            filled += received
            deadline.progressed()
        return into

    def _receive_rest(self, prefix: memoryview, deadline: Deadline) -> Frame:
        magic, header_bytes, body = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise self._malformed("it does not begin as one")
        if header_bytes > min(MAX_HEADER_BYTES, self.max_bytes) or body > self.max_bytes:
            raise self._malformed(f"it has {header_bytes:,} + {body:,} bytes; the limit is {self.max_bytes:,}")
        header = self._receive_exactly(header_bytes, deadline)
        try:
            kind, fields, sizes = json.loads(bytes(header))
        except (ValueError, TypeError, RecursionError):
            raise self._malformed("its header cannot be read") from None
        is_whole = isinstance(kind, str) and isinstance(fields, dict) and isinstance(sizes, list)
        if not is_whole or not all(type(size) is int and size >= 0 for size in sizes) or sum(sizes) != body:
            raise self._malformed("its header contradicts itself")
        return Frame(kind, fields, [self._receive_exactly(size, deadline) for size in sizes])

    def _wait(self, event: int, deadline: Deadline) -> bool:
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


TIMEOUT_HINT = "look whether that process still runs, and whether its machine can be reached"


class Deadline:
    """A moment until which to wait; None waits without end. One that renews is put off by everything that goes on."""

    def __init__(self, limit_s: float | None, *, renews: bool = False) -> None:
        self.limit_s = limit_s if limit_s is not None else float("inf")
        self._renews = renews
        self._at = None if limit_s is None else time.monotonic() + limit_s

    def progressed(self) -> None:
        """Note that something has gone on."""
        if self._renews and self._at is not None:
            self._at = time.monotonic() + self.limit_s

    @property
    def left_s(self) -> float | None:
        return None if self._at is None else max(0.0, self._at - time.monotonic())


def _keep_alive(sock: socket.socket) -> None:
    """Notice a machine that is gone: on a quiet connection by probes, on a busy one by what it does not acknowledge."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if is_loopback(sock.getpeername()[0]):
        return
    wanted = {"TCP_KEEPIDLE": LOST_S // 2, "TCP_KEEPINTVL": LOST_S // 6, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": LOST_S * 1000}
    for name, value in wanted.items():
        if hasattr(socket, name):  # Linux has all of them
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


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
