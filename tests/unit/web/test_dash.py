"""The dashboard's process and the signals that end it."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from redline.web import dash


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_signal_before_the_server_listens_for_it_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service manager may stop what it has just started."""
    run = dash.DashServer.run

    def run_after_a_signal(self: dash.DashServer, sockets: list[socket.socket] | None = None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        run(self, sockets)

    monkeypatch.setattr(dash.DashServer, "run", run_after_a_signal)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dash.serve([tmp_path], "127.0.0.1", listener)
