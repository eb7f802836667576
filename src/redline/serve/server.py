"""The process: a port, a model in an engine, an event loop, and an orderly end."""

from __future__ import annotations

import asyncio
import gc
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import uvicorn

from redline.engine import EngineSession, NativeEngine
from redline.errors import ConfigError
from redline.launch.engines import load_engine
from redline.launch.process import prepare_process
from redline.ports import SteppedEngine
from redline.serve.app import make_app
from redline.serve.listener import cannot_listen
from redline.serve.requests.calls import Served
from redline.serve.settings import ServeSettings
from redline.serve.vocabulary import Vocabulary
from redline.serve.weights import WeightsEndpoint

if TYPE_CHECKING:
    from torch import Tensor

SWITCH_S = 0.0005
"""A tenth of Python's own interval between two threads that both want to run."""
GRACE_S = 5.0
"""Seconds that running requests get to finish once the server is told to stop; then they are aborted, and told so."""
LAST_WORDS_S = 2.0
"""Seconds to tell them; then connections end, whether or not the client has read it."""


def serve(settings: ServeSettings, listener: socket.socket) -> None:
    """Serve until a signal. SIGTERM returns, SIGINT raises KeyboardInterrupt, both when the last request is over."""
    with running_engine(settings) as (engine, served, live):
        _share_python_lock()
        server = EngineServer(engine, served, settings, live)
        # uvicorn sends itself the signal again once it has stopped: SIGTERM is then no reason to fail, and before that one to
        # end.
        signal.signal(signal.SIGTERM, lambda number, frame: setattr(server, "should_exit", True))
        server.run(sockets=[listener])


def _share_python_lock() -> None:
    """The engine's thread gives Python's lock away at every call of torch, and has to get it back each time: from a thread that
    computes it does so after the switch interval. And the garbage collector need not look at what a model has brought along."""
    sys.setswitchinterval(SWITCH_S)
    gc.collect()
    gc.freeze()


@contextmanager
def running_engine(settings: ServeSettings) -> Iterator[tuple[EngineSession, Served, Mapping[str, Tensor]]]:
    """The model as the settings want it, stepped by a thread of its own until the block ends, and the weights that it reads,
    where they may be replaced."""
    prepare_process(settings.config)
    loaded = load_engine(settings.config, settings.adapters, step_timeout_s=settings.limits.step_timeout_s, tell=_tell)
    served = Served(
        name=settings.name,
        vocabulary=Vocabulary(loaded.tokenizer),
        end_token_ids=loaded.stop_token_ids,
        max_positions=loaded.max_positions,
        adapters=tuple(settings.adapters),
        rows=loaded.engine.limits.max_num_seqs,
    )
    try:
        with loaded.session() as engine:
            yield engine, served, _replaceable(settings, loaded.engine)
    finally:
        loaded.close()


def _replaceable(settings: ServeSettings, engine: SteppedEngine) -> Mapping[str, Tensor]:
    if settings.weights_token is None:
        return {}
    if not isinstance(engine, NativeEngine):
        raise ConfigError(
            "--weights-token-env: only the native engine takes new weights, and this model runs on another",
            "serve a model of the Llama or Qwen families with engine.kind=native, or leave the option out",
        )
    return dict(engine.decoder.named_parameters())


def _tell(text: str) -> None:
    print(text, file=sys.stderr)


class EngineServer(uvicorn.Server):
    """Says where it listens once it does, and ends with its engine."""

    def __init__(
        self, engine: EngineSession, served: Served, settings: ServeSettings, live: Mapping[str, Tensor] | None = None
    ) -> None:
        """`live`: the weights that clients with the settings' token may replace."""
        weights, limits = None, settings.limits
        if settings.weights_token is not None:
            weights = WeightsEndpoint(
                engine, live or {}, settings.weights_token, limits.max_weights_bytes, limits.client_timeout_s
            )
        app = make_app(engine, served, settings.api_key, limits, settings.allowed_hosts, weights)
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none"))
        self._engine = engine
        self._name = served.name
        self._timeout_s = settings.limits.client_timeout_s
        self._idle: dict[Any, tuple[Any, float]] = {}
        """Connection → what it was like, and since when."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets
        host, port = sockets[0].getsockname()[:2]
        try:
            await super().startup(sockets)
        except OSError as error:  # another process that was loading too has begun to listen first
            raise cannot_listen(host, port, error) from error
        address = f"[{host}]" if ":" in host else host
        print(f"serving {self._name} at http://{address}:{port}/v1", file=sys.stderr, flush=True)

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            self._end_idle()
        return await super().on_tick(counter)

    def _end_idle(self) -> None:
        """End connections that have no request under way and on which nothing moves: uvicorn would wait for ever for a client
        that sends half a request, or never reads the end of an answer."""
        now, idle = time.monotonic(), {}
        for connection in self.server_state.connections:
            cycle, transport = getattr(connection, "cycle", None), connection.transport
            if cycle is None or cycle.response_complete or transport.is_closing():
                state = cycle, transport.get_write_buffer_size()
                known, since = self._idle.get(connection, (state, now))
                idle[connection] = state, since if known == state else now
        self._idle = idle
        for connection, (_, since) in idle.items():
            if now - since > self._timeout_s:
                connection.transport.abort()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        giving_up = asyncio.create_task(self._give_up())
        await super().shutdown(sockets)
        giving_up.cancel()

    async def _give_up(self) -> None:
        """An engine that has stopped answers the clients that still wait; one that does not read is not waited for."""
        await asyncio.sleep(GRACE_S)
        await asyncio.to_thread(self._engine.close)
        await asyncio.sleep(LAST_WORDS_S)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
