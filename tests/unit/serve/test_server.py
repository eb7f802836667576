"""Connections that clients hold on to: none stays for ever, and none keeps the server from ending."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.scripted_server import END, TOKENIZER, ScriptedEngine, Site

from redline.serve import server as server_module
from redline.serve.listener import bind
from redline.serve.requests.calls import Served
from redline.serve.requests.limits import ServeLimits
from redline.serve.server import EngineServer
from redline.serve.settings import ServeSettings, make_settings
from redline.serve.vocabulary import Vocabulary

OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "api_key_env": "A_KEY", "served_model_name": "m"}


class StoppableEngine(ScriptedEngine):
    def close(self) -> None:
        """Abort what is under way."""
        self.is_endless = self.is_alive = False


@contextmanager
def serving(client_timeout_s: float) -> Iterator[tuple[EngineServer, threading.Thread, Site]]:
    """What `redline serve` runs, over a scripted engine that never ends."""
    settings = make_settings("builtin:tiny", host="127.0.0.1", port=0, **OPTIONS)
    settings = replace(settings, limits=ServeLimits(client_timeout_s=client_timeout_s))
    engine = StoppableEngine(is_endless=True)
    server = EngineServer(engine, Served("m", Vocabulary(TOKENIZER), (END,), 200), settings)  # type: ignore[arg-type]
    listener = bind("127.0.0.1", 0)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # soon full where nobody reads
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    running = Site(engine, f"http://127.0.0.1:{listener.getsockname()[1]}")
    running.wait_until(lambda: server.started)
    try:
        yield server, thread, running
    finally:
        server.should_exit = server.force_exit = True
        thread.join(60)


def connect(running: Site, sent: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", int(running.url.rpartition(":")[2])))
    client.sendall(sent)
    return client


def ask_and_never_read(running: Site) -> socket.socket:
    body = json.dumps({"prompt": "hi", "stream": True, "logprobs": 20}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return connect(running, f"{head}\r\n\r\n".encode() + body)


def test_a_client_that_never_reads_the_end_does_not_keep_its_connection() -> None:
    with serving(client_timeout_s=0.3) as (server, _, running), ask_and_never_read(running):
        running.wait_until(lambda: len(running.engine.requests) == 1)
        running.wait_until(lambda: running.engine.num_open == 0)
        running.wait_until(lambda: not server.server_state.connections)


@pytest.mark.parametrize(
    "sent", [b"", b"GET /health HTTP/1.1\r\nHo", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he"]
)
def test_a_client_that_never_asks_does_not_keep_its_connection(sent: bytes) -> None:
    with serving(client_timeout_s=0.3) as (server, _, running), connect(running, sent) as client:
        while client.recv(1000):  # until the server has closed it
            pass
        running.wait_until(lambda: not server.server_state.connections)


def test_a_client_that_reads_nothing_does_not_keep_the_server_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "GRACE_S", 0.1)
    monkeypatch.setattr(server_module, "LAST_WORDS_S", 0.1)
    with serving(client_timeout_s=60) as (server, thread, running), ask_and_never_read(running):
        running.wait_until(lambda: any(c.flow.write_paused for c in server.server_state.connections))  # type: ignore[union-attr]
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()
        assert running.engine.num_open == 0


def test_a_body_that_never_comes_does_not_keep_the_server_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "GRACE_S", 0.1)
    monkeypatch.setattr(server_module, "LAST_WORDS_S", 0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n{"
    with serving(client_timeout_s=60) as (server, thread, running), connect(running, head):
        running.wait_until(lambda: bool(server.server_state.tasks))
        server.should_exit = True
        thread.join(60)
        assert not thread.is_alive()


def test_a_signal_before_the_server_listens_for_it_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service manager may stop what it has just started."""
    run, before = EngineServer.run, signal.getsignal(signal.SIGTERM)

    @contextmanager
    def scripted(settings: ServeSettings) -> Iterator[Any]:
        yield StoppableEngine(), Served("m", Vocabulary(TOKENIZER), (END,), 200), {}

    def run_after_a_signal(self: EngineServer, sockets: list[socket.socket] | None = None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        run(self, sockets)

    monkeypatch.setattr(server_module, "running_engine", scripted)
    monkeypatch.setattr(server_module, "_share_python_lock", lambda: None)
    monkeypatch.setattr(EngineServer, "run", run_after_a_signal)
    try:
        with bind("127.0.0.1", 0) as listener:
            server_module.serve(make_settings("builtin:tiny", host="127.0.0.1", port=0, **OPTIONS), listener)
    finally:
        signal.signal(signal.SIGTERM, before)
