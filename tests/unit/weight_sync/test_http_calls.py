"""Calls of a server that takes weights: where they go, and what is refused before anything is sent."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from redline.errors import ConfigError, ServerAwayError
from redline.weight_sync.transports.http_calls import HttpServer


def test_calls_go_below_the_path_of_the_address() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"path": self.path}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        address = f"http://127.0.0.1:{http.server_port}"
        for url in (f"{address}/team-b", f"{address}/team-b/"):
            assert HttpServer(url, "token", 5).get("/weights") == {"path": "/team-b/weights"}
        assert HttpServer(address, "token", 5).get("/weights") == {"path": "/weights"}
        http.shutdown()


@pytest.mark.parametrize("token", ["s3cret\n", "s3cret\r\nX: y", "s3crét"])
def test_a_token_that_no_header_takes_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(ConfigError, match="no HTTP header takes") as caught:
        HttpServer("http://127.0.0.1:1", token)
    assert "s3cr" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://127.0.0.1:99999", "http://127.0.0.1:abc", "127.0.0.1:80", "ftp://x", "http://[::1"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="no address of a server"):
        HttpServer(url)


def test_an_address_with_a_password_is_refused_without_showing_it() -> None:
    with pytest.raises(ConfigError, match="holds a name or a password") as caught:
        HttpServer("http://me:s3cret@127.0.0.1:1")
    assert "s3cret" not in str(caught.value)


def test_a_server_that_is_not_there_may_come_back() -> None:
    with pytest.raises(ServerAwayError, match=r"127\.0\.0\.1:1 did not take GET /weights"):
        HttpServer("http://127.0.0.1:1", "token", 5).get("/weights")
