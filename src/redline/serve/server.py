"""The process: a port, a model in an engine, an event loop, and an orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import uvicorn

from redline.config.schema import Config, EngineConfig
from redline.engine import AsyncEngine, NativeEngine
from redline.engine.sizing import block_size_for
from redline.engine.tensor_parallel import TensorParallelEngine
from redline.launch import prepare_process
from redline.models.hf import load_decoder, load_tokenizer, stop_token_ids
from redline.models.sources import model_folder
from redline.serve.app import make_app
from redline.serve.calls import Served
from redline.serve.listener import cannot_listen
from redline.serve.settings import ServeSettings
from redline.serve.vocabulary import Vocabulary

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GRACE_S = 5.0
"""Seconds that running requests get to finish once the server is told to stop; then they are aborted, and told so."""


def serve(settings: ServeSettings, listener: socket.socket) -> None:
    """Serve until a signal. SIGTERM returns, SIGINT raises KeyboardInterrupt, both when the last request is over."""
    with running_engine(settings) as (engine, served):
        # uvicorn sends itself the signal again once it has stopped; SIGTERM is then no reason to fail.
        signal.signal(signal.SIGTERM, lambda number, frame: None)
        EngineServer(engine, served, settings.api_key).run(sockets=[listener])


@contextmanager
def running_engine(settings: ServeSettings) -> Iterator[tuple[AsyncEngine, Served]]:
    """The model as the settings want it, stepped by a thread of its own until the block ends."""
    config = settings.config
    prepare_process(config)
    folder = model_folder(config.model.path)
    tokenizer = load_tokenizer(folder)
    native = _engine(folder, config, tokenizer)
    for name, adapter in settings.adapters.items():
        native.load_adapter(name, adapter)
    served = Served(
        name=settings.name,
        vocabulary=Vocabulary(tokenizer),
        end_token_ids=stop_token_ids(folder, tokenizer),
        max_positions=_max_positions(config.engine, native),
        adapters=tuple(settings.adapters),
    )
    try:
        with AsyncEngine(native) as engine:
            yield engine, served
    finally:
        if isinstance(native, TensorParallelEngine):
            native.close()


def _engine(folder: Path, config: Config, tokenizer: PreTrainedTokenizerBase) -> NativeEngine:
    device, dtype = torch.device(config.run.device), getattr(torch, config.model.dtype)
    if config.engine.tensor_parallel_size > 1:
        return TensorParallelEngine(folder, config.engine, device, dtype)
    return NativeEngine(load_decoder(folder, device, dtype), config.engine, tokenizer)


def _max_positions(config: EngineConfig, engine: NativeEngine) -> int:
    """The least of what the model was made for, what the settings allow, and what the KV cache holds."""
    of_model = engine.decoder.spec.max_positions
    of_cache = engine.stats.kv_blocks_total * block_size_for(config, engine.decoder.output_weight.device)
    return min(of_model, of_cache, config.max_model_len or of_model)


class EngineServer(uvicorn.Server):
    """Says where it listens once it does, and ends with its engine."""

    def __init__(self, engine: AsyncEngine, served: Served, api_key: str | None) -> None:
        app = make_app(engine, served, api_key)
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none"))
        self._engine = engine
        self._name = served.name

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets
        host, port = sockets[0].getsockname()[:2]
        try:
            await super().startup(sockets)
        except OSError as error:  # another process that was loading too has begun to listen first
            raise cannot_listen(host, port, error) from error
        address = f"[{host}]" if ":" in host else host
        print(f"serving {self._name} at http://{address}:{port}/v1", file=sys.stderr, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        giving_up = asyncio.create_task(self._give_up())
        await super().shutdown(sockets)
        giving_up.cancel()

    async def _give_up(self) -> None:
        """An engine that has stopped answers whoever still waits."""
        await asyncio.sleep(GRACE_S)
        await asyncio.to_thread(self._engine.stop)
