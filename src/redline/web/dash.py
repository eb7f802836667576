"""`redline dash`: the pages of one or many runs, live. It answers GET alone, and opens nothing that a request names: a run is
found by its name in the list that the server has made."""

from __future__ import annotations

import json
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from redline.addresses import is_loopback
from redline.runs.columns import Json
from redline.runs.listing import Runs
from redline.runs.reader import Explain
from redline.web.guard import Guard
from redline.web.page import live_page, page_bytes, script, style

ASSETS: dict[str, tuple[Callable[[], str], str]] = {
    "script.js": (script, "text/javascript"),
    "style.css": (style, "text/css"),
}


@dataclass(slots=True, frozen=True)
class Dash:
    """The pages, and the data that they ask for."""

    runs: Runs

    async def list_page(self, request: Request) -> Response:
        return HTMLResponse(live_page(None))

    async def run_page(self, request: Request) -> Response:
        name = request.path_params["name"]
        if await run_in_threadpool(self.runs.reader, name) is None:
            raise _no_run(name)
        return HTMLResponse(live_page(f"/data/run/{quote(name, safe='')}"))

    async def asset(self, request: Request) -> Response:
        found = ASSETS.get(request.path_params["name"])
        if found is None:
            raise HTTPException(404)
        content, media_type = found
        return Response(content(), media_type=media_type)

    async def list_data(self, request: Request) -> Response:
        return await _json(lambda: self.runs.changes(request.query_params.get("after", "")))

    async def run_data(self, request: Request) -> Response:
        name = request.path_params["name"]
        reader = await run_in_threadpool(self.runs.reader, name)
        if reader is None:
            raise _no_run(name)
        return await _json(lambda: reader.document(request.query_params.get("after", "")))

    async def trajectories(self, request: Request) -> Response:
        name, step = request.path_params["name"], request.query_params.get("step", "")
        found = await run_in_threadpool(self.runs.trajectories, name)
        if found is None:
            raise _no_run(name)
        if not step.isdecimal() or len(step) > 12:
            raise HTTPException(400, "step must be the number of a step")
        return await _json(lambda: found.of_step(int(step)))


def make_app(runs: Runs, host: str = "127.0.0.1", token: str | None = None) -> Starlette:
    """The whole application; with a `token`, everything needs it."""
    dash = Dash(runs)
    return Starlette(
        routes=[
            Route("/", dash.list_page),
            Route("/run/{name}", dash.run_page),
            Route("/assets/{name}", dash.asset),
            Route("/data/runs", dash.list_data),
            Route("/data/run/{name}", dash.run_data),
            Route("/data/run/{name}/trajectories", dash.trajectories),
        ],
        middleware=[Middleware(Guard, host, token), Middleware(GZipMiddleware, minimum_size=1000)],
    )


def serve(paths: Sequence[Path], host: str, listener: socket.socket, explain: Explain | None = None) -> None:
    """Serve until a signal. An address that others can reach gets a token, which is part of the address printed."""
    runs = Runs(paths, explain)
    token = None if is_loopback(host) else secrets.token_urlsafe(24)
    names = runs.names()
    path = f"/run/{quote(names[0], safe='')}" if len(names) == 1 and len(paths) == 1 else "/"
    server = DashServer(make_app(runs, host, token), path + (f"?token={token}" if token else ""))
    # uvicorn sends itself the signal again once it has stopped: SIGTERM is then no reason to fail, and before that one to end.
    signal.signal(signal.SIGTERM, lambda number, frame: setattr(server, "should_exit", True))
    server.run(sockets=[listener])


class DashServer(uvicorn.Server):
    """Says where it listens once it does."""

    def __init__(self, app: Starlette, path: str) -> None:
        config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=2)
        super().__init__(config)
        self._path = path

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets
        await super().startup(sockets)
        host, port = sockets[0].getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        print(f"dashboard at http://{address}:{port}{self._path}", file=sys.stderr, flush=True)


def _no_run(name: str) -> HTTPException:
    return HTTPException(404, f"no run called {name}")


async def _json(make: Callable[[], dict[str, Json]]) -> Response:
    """In a thread: to read a long run takes a moment, and others ask meanwhile."""
    body = await run_in_threadpool(lambda: page_bytes(json.dumps(make(), ensure_ascii=False, allow_nan=False)))
    return Response(body, media_type="application/json")
