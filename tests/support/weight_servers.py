"""Servers that take weights, in threads of a test."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from redline.config.sections.engine import EngineConfig
from redline.engine import EngineSession, NativeEngine
from redline.errors import RedlineError
from redline.models.decoder import Decoder
from redline.models.files.tiny import tiny_tokenizer
from redline.serve.app import make_app
from redline.serve.requests.calls import Served
from redline.serve.requests.limits import ServeLimits
from redline.serve.requests.protocol import ApiError
from redline.serve.vocabulary import Vocabulary
from redline.serve.weights import WeightsEndpoint
from redline.types import WeightUpdate

TOKEN = "weights-secret"
MAX_BYTES = 1 << 20


@contextlib.contextmanager
def listening(app: Starlette) -> Iterator[str]:
    """The address of a server that answers until the block ends."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.002)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@dataclass
class ServedPolicy:
    """What `redline serve` makes of a decoder."""

    url: str
    decoder: Decoder
    session: EngineSession
    endpoint: WeightsEndpoint
    model: dict[str, torch.Tensor]
    """What it was started with."""

    @torch.no_grad()
    def start_again(self) -> None:
        """Leave it as a new process would be: with the weights of its model, which nobody has sent."""
        for name, tensor in self.tensors.items():
            tensor.copy_(self.model[name])
        fresh = WeightsEndpoint(self.session, self.tensors, TOKEN, MAX_BYTES, 60.0)
        self.endpoint.__dict__.update(fresh.__dict__)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.decoder.named_parameters()}


@contextlib.contextmanager
def served(
    decoder: Decoder,
    api_key: str | None = None,
    live: Mapping[str, torch.Tensor] | None = None,
    adapters: tuple[str, ...] = (),
) -> Iterator[ServedPolicy]:
    """A server that takes weights for a native engine on this decoder, or puts them into other tensors. It lists adapters that
    it does not have."""
    tokenizer = tiny_tokenizer()
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=8, kv_cache_memory_bytes=1 << 20), tokenizer)
    with EngineSession(engine) as session:
        about = Served("m", Vocabulary(tokenizer), (tokenizer.eos_token_id,), engine.limits.max_len, adapters, rows=8)
        weights = WeightsEndpoint(session, live or dict(decoder.named_parameters()), TOKEN, MAX_BYTES, 60.0)
        model = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
        with listening(make_app(session, about, api_key, ServeLimits(), weights=weights)) as url:
            yield ServedPolicy(url, decoder, session, weights, model)


@dataclass
class VersionsOnly:
    """An engine between two steps, always. Implements `serve.weights.EngineBetweenSteps`."""

    version: int = 0
    is_alive: bool = True

    def apply(self, update: WeightUpdate) -> None:
        self.version = update.version

    async def run(self, action: Callable[[Any], Any]) -> Any:
        return action(self)

    def reset_prefix_cache(self) -> None:
        """It computes nothing."""

    def fail(self, error: RedlineError) -> None:
        self.is_alive = False


_endpoints: dict[str, WeightsEndpoint] = {}
"""By token."""


@functools.cache
def _shared_server() -> str:
    """The address of one server for all endpoints that a session of tests asks for."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        token = dict(scope["headers"])[b"authorization"].decode().removeprefix("Bearer ")
        app = Starlette(routes=_endpoints[token].routes(), exception_handlers={ApiError: _told})
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(answer, port=0, log_config=None, lifespan="off"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.002)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


async def _told(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body, status_code=error.status)


def weight_server(tensors: Mapping[str, torch.Tensor], engine: VersionsOnly | None = None) -> tuple[str, str]:
    """The address and the token of a server that takes weights into these tensors."""
    token = f"token-{len(_endpoints)}"
    _endpoints[token] = WeightsEndpoint(engine or VersionsOnly(), tensors, token, MAX_BYTES, 60.0)
    return _shared_server(), token
