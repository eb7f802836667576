"""Servers that take weights, in threads of a test."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import uvicorn
from starlette.applications import Starlette

from redline.config.sections.engine import EngineConfig
from redline.engine import EngineSession, NativeEngine
from redline.models.decoder import Decoder
from redline.models.files.tiny import tiny_tokenizer
from redline.serve.app import make_app
from redline.serve.calls import Served
from redline.serve.limits import ServeLimits
from redline.serve.vocabulary import Vocabulary
from redline.serve.weights import WeightsEndpoint

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

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.decoder.named_parameters()}


@contextlib.contextmanager
def served(decoder: Decoder, api_key: str | None = None) -> Iterator[ServedPolicy]:
    """A server that takes weights for a native engine on this decoder."""
    tokenizer = tiny_tokenizer()
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=8, kv_cache_memory_bytes=1 << 20), tokenizer)
    with EngineSession(engine) as session:
        about = Served("m", Vocabulary(tokenizer), (tokenizer.eos_token_id,), engine.limits.max_len, rows=8)
        weights = WeightsEndpoint(session, dict(decoder.named_parameters()), TOKEN, MAX_BYTES, 10.0)
        with listening(make_app(session, about, api_key, ServeLimits(), weights=weights)) as url:
            yield ServedPolicy(url, decoder, session)
