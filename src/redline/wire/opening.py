"""How a connection is opened: both sides prove that they know the token, before anything else is read.

caller                                  listener
hello: role, challenge ───────────────►
                       ◄─────────────── challenge: its own, and the proof that it knows the token
proof ────────────────────────────────►
                       ◄─────────────── welcome, or refused
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import queue
import secrets
import socket
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Self

from redline.addresses import could_be_host
from redline.errors import ConfigError, WireClosed, WireError, WireTimeout
from redline.wire.connection import MAX_FRAME_BYTES, TIMEOUT_HINT, Connection, Deadline

TOKEN_VARIABLE = "REDLINE_WIRE_TOKEN"
"""The environment variable by which a process gets its token: arguments are seen by every user of a machine."""
MAX_HELLO_BYTES = 4096
"""The largest frame of a peer that has not shown the token."""
HELLO_S = 10.0
"""Seconds in which a peer has to show the token."""
MAX_PORT = 65535
MAX_HELLOS = 64
"""Peers that may be about to show the token at once; one more takes the place of another."""


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


# ── as a caller ────────────────────────────────────────────────────────────────────────────────────────────────────────


def connect(address: str, token: str, role: str, timeout_s: float, *, max_bytes: int = MAX_FRAME_BYTES) -> Connection:
    """Open a connection to `host:port` for a role that the listener knows. Blocks for `timeout_s` seconds at most. Raises
    WireTimeout, WireClosed, or WireError where the other side does not know the token."""
    name = f"{address} ({role})"
    host, _, port = address.rpartition(":")
    if not could_be_host(host.strip("[]")) or not port.isdecimal() or int(port) > MAX_PORT:
        raise ConfigError(f"{address!r} is no address to connect to", "write HOST:PORT, such as 10.0.0.1:29600")
    deadline = Deadline(timeout_s)
    try:
        sock = socket.create_connection((host.strip("[]"), int(port)), timeout_s)
        connection = Connection(sock, name, role, MAX_HELLO_BYTES)
    except TimeoutError:
        raise WireTimeout(f"{name} cannot be reached within {timeout_s:g} s", TIMEOUT_HINT) from None
    except OSError as error:
        raise WireClosed(f"{name} cannot be reached: {error.strerror or error}", TIMEOUT_HINT) from None
    try:
        _show_token(connection, token, role, deadline)
    except BaseException:
        connection.close()
        raise
    connection.max_bytes = max_bytes
    return connection


def _show_token(connection: Connection, token: str, role: str, deadline: Deadline) -> None:
    ours = secrets.token_hex(16)
    connection.send("hello", {"role": role, "challenge": ours}, timeout_s=deadline.left_s)
    answer = connection.receive(deadline.left_s, whole_s=deadline.left_s)
    theirs = str(answer.fields.get("challenge", ""))
    if not _is_proof(answer.fields.get("proof"), _proof(token, "listener", role, ours)):
        raise WireError(f"{connection.name} does not know the token of this run", "something else listens there: start again")
    connection.send("proof", {"proof": _proof(token, "caller", role, theirs)}, timeout_s=deadline.left_s)
    welcome = connection.receive(deadline.left_s, whole_s=deadline.left_s)
    if welcome.kind != "welcome":
        raise WireError(f"{connection.name} has turned the connection away", "both sides must have one token")


def _check_token(connection: Connection, token: str) -> str | None:
    """The role of a peer that has shown the token; None of any other."""
    deadline = Deadline(HELLO_S)
    hello = connection.receive(deadline.left_s, whole_s=deadline.left_s)
    role, theirs, ours = str(hello.fields.get("role", "")), str(hello.fields.get("challenge", "")), secrets.token_hex(16)
    proof = _proof(token, "listener", role, theirs)
    connection.send("challenge", {"challenge": ours, "proof": proof}, timeout_s=deadline.left_s)
    shown = connection.receive(deadline.left_s, whole_s=deadline.left_s)
    if not _is_proof(shown.fields.get("proof"), _proof(token, "caller", role, ours)):
        connection.send("refused", timeout_s=deadline.left_s)
        return None
    connection.send("welcome", timeout_s=deadline.left_s)
    return role


def _proof(token: str, side: str, role: str, challenge: str) -> str:
    """What only somebody who knows the token can answer to a challenge. The side is part of it: neither can be answered with
    the other's own."""
    return hmac.new(token.encode(), json.dumps([side, role, challenge]).encode(), hashlib.sha256).hexdigest()


def _is_proof(shown: object, expected: str) -> bool:
    """Whether a peer has shown what it should have, in a time that does not depend on how much of it is right."""
    return hmac.compare_digest(str(shown).encode(errors="replace"), expected.encode())


# ── as a listener ──────────────────────────────────────────────────────────────────────────────────────────────────────


def listen(host: str = "127.0.0.1", port: int = 0, *, token: str, max_bytes: int = MAX_FRAME_BYTES) -> Listener:
    """Take connections of peers that know the token, from this machine alone unless `host` says otherwise; port 0 is any that
    is free. Raises ConfigError where the address cannot be had."""
    assert token, "whatever listens has a token"
    if not could_be_host(host):
        raise ConfigError(f"cannot listen on {host}:{port}: it is no host's name", "choose another address")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=MAX_HELLOS)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", "choose another address") from None
    return Listener(sock, token, max_bytes)


class Listener:
    """Takes connections; peers show the token in threads of their own, so that a slow one keeps nobody waiting. Strangers that
    say nothing keep nobody out either: where there are too many, the oldest of the machine with the most makes room."""

    def __init__(self, sock: socket.socket, token: str, max_bytes: int) -> None:
        self._sock, self._token, self._max_bytes = sock, token, max_bytes
        host, port = sock.getsockname()[:2]
        host = socket.gethostname() if host in ("0.0.0.0", "::") else host
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        """`host:port`, for `connect`."""
        self.num_refused = 0
        """Peers that did not show the token."""
        self._accepted: queue.SimpleQueue[Connection | None] = queue.SimpleQueue()
        self._greeting: dict[socket.socket, str] = {}
        """Peers that have not shown the token yet, with their machine, in the order in which they came."""
        self._lock = threading.Lock()
        threading.Thread(target=self._take, name="wire-listener", daemon=True).start()

    def accept(self, timeout_s: float | None = None) -> Connection:
        """Block until a peer has shown the token. Raises WireTimeout after `timeout_s` seconds, WireClosed after `close`."""
        try:
            connection = self._accepted.get(timeout=timeout_s)
        except queue.Empty:
            raise WireTimeout(f"nobody has connected to {self.address} within {timeout_s:g} s", TIMEOUT_HINT) from None
        if connection is None:
            self._accepted.put(None)  # for the next that asks
            raise WireClosed(f"{self.address} takes no more connections")
        return connection

    def answer_each(self, answer: Callable[[Connection], None]) -> None:
        """Call `answer` for every peer that shows the token, each in a thread of its own, until `close`. Returns at once."""
        threading.Thread(target=self._answer_each, args=(answer,), name="connections", daemon=True).start()

    def _answer_each(self, answer: Callable[[Connection], None]) -> None:
        with suppress(WireClosed):
            while True:
                connection = self.accept()
                threading.Thread(target=answer, args=(connection,), name=connection.role, daemon=True).start()

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
                sock, (machine, *_) = self._sock.accept()
            except ConnectionAbortedError:
                continue
            except OSError:
                self._accepted.put(None)
                return
            with self._lock:
                if len(self._greeting) >= MAX_HELLOS:
                    self._make_room()
                self._greeting[sock] = machine
            threading.Thread(target=self._greet, args=(sock,), name="wire-hello", daemon=True).start()

    def _make_room(self) -> None:
        """End the connection to the oldest peer of the machine that has the most: its thread notices. Under the lock."""
        crowd = Counter(self._greeting.values()).most_common(1)[0][0]
        oldest = next(sock for sock, machine in self._greeting.items() if machine == crowd)
        del self._greeting[oldest]
        with suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    def _greet(self, sock: socket.socket) -> None:
        connection, role = None, None
        try:
            host, port = sock.getpeername()[:2]
            connection = Connection(sock, f"{host}:{port}", max_bytes=MAX_HELLO_BYTES)
            role = _check_token(connection, self._token)
        except (WireError, OSError):
            pass
        finally:
            with self._lock:
                self._greeting.pop(sock, None)
        if connection is None or role is None:
            self.num_refused += 1
            sock.close()
            return
        connection.role, connection.name, connection.max_bytes = role, f"{connection.name} ({role})", self._max_bytes
        self._accepted.put(connection)
