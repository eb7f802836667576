"""Engines as the contract suite sees them: how to make one from a Hugging Face folder, and what can be seen from outside.

An engine joins by an entry in `ENGINES`."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from support.ports import free_port
from support.small_models import CONFIGS, SHAPE, llama, rope
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AutoModelForCausalLM,
    MistralConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from redline.config.resolve import bfloat16_flags
from redline.config.sections.engine import EngineConfig
from redline.engine import EngineSession, NativeEngine
from redline.engine.adapters.openai_server import OpenAIServerEngine
from redline.engine.adapters.vllm import VllmEngine
from redline.engine.remote.client import RemoteEngine, open_engine
from redline.engine.remote.service import RequestService
from redline.models.files.hf import load_decoder, load_tokenizer
from redline.ports import Engine
from redline.types import WeightUpdate
from redline.wire import listen, make_token

KV_CACHE_BYTES = 64 * 2**20
START_S = 240
"""Seconds that a server may take to start."""
NEEDS_VLLM = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
NEEDS_SERVE = pytest.mark.skipif(importlib.util.find_spec("uvicorn") is None, reason="the extra serve is not installed")


class Bench(Protocol):
    """One engine, and what a test needs to do around it."""

    engine: Engine

    def change_weights(self, folder: Path) -> None:
        """Put the weights of this folder where the engine reads them, as weight sync does before `apply`."""
        ...

    def count_tokens(self, action: Callable[[], Any]) -> int:
        """Tokens that went through the network during `action`."""
        ...


@dataclass(frozen=True)
class Size:
    """What a test may want of an engine's size and precision."""

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    dtype: torch.dtype = torch.float32

    @property
    def config(self) -> EngineConfig:
        return EngineConfig(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
        )

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


# ── in this process ────────────────────────────────────────────────────────────────────────────────────────────────────


_tokenizer = functools.cache(load_tokenizer)


class NativeBench:
    def __init__(self, folder: Path, size: Size) -> None:
        self._decoder = load_decoder(folder, dtype=size.dtype)
        self.engine = NativeEngine(self._decoder, size.config, _tokenizer(folder))

    @torch.no_grad()
    def change_weights(self, folder: Path) -> None:
        fresh = dict(load_decoder(folder).named_parameters())
        for name, parameter in self._decoder.named_parameters():
            parameter.copy_(fresh[name])

    def count_tokens(self, action: Callable[[], Any]) -> int:
        counts: list[int] = []
        hook = self._decoder.register_forward_pre_hook(lambda module, args: counts.append(len(args[0])))
        action()
        hook.remove()
        return sum(counts)


class RemoteBench(NativeBench):
    """The native engine behind a connection, both ends in this process."""

    def __init__(self, folder: Path, size: Size, owned: ExitStack) -> None:
        super().__init__(folder, size)
        there, token = owned.enter_context(EngineSession(self.engine)), make_token()
        about = {"limits": asdict(self.engine.limits), "adapters": []}
        listener = owned.enter_context(listen(token=token))

        def serve() -> None:
            RequestService(there, listener.accept(START_S)).serve(about)

        threading.Thread(target=serve, daemon=True).start()
        remote = open_engine(listener.address, token, "engine 0")
        owned.callback(remote.close)
        self.engine: Engine = _Delivered(remote, there)  # type: ignore[assignment]


class _Delivered(EngineSession):
    """A version reaches the other process with its weights, over a connection of their own, before this side applies it."""

    def __init__(self, remote: RemoteEngine, there: EngineSession) -> None:
        super().__init__(remote)
        self._there = there

    def apply(self, update: WeightUpdate) -> None:
        self._there.between_steps(lambda engine: engine.apply(update)).result()
        super().apply(update)


class VllmBench:
    def __init__(self, folder: Path, size: Size) -> None:
        # By default a block on a CPU is longer than the prompts here, and no prompt would ever be found in the cache.
        self.engine = VllmEngine(folder, size.config, dtype=size.dtype_name, enforce_eager=True, block_size=32)

    def change_weights(self, folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.engine.update_weights((name, tensor.detach()) for name, tensor in model.named_parameters())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()  # the trainer goes on with its own tensors; the engine must not see it


# ── servers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


class RedlineServeBench:
    def __init__(self, folder: Path, size: Size, owned: ExitStack) -> None:
        plain = ("--port", "0", "--device", "cpu", "--dtype", size.dtype_name, "run.num_threads=1")
        server = _start([str(Path(sys.executable).with_name("redline")), "serve", str(folder), *plain], folder, owned)
        url = _wait(lambda: re.search(r"http://[\d.]+:\d+", server.log()), server)[0]
        self.engine = OpenAIServerEngine(f"{url}/v1", push_weights=lambda update: None)


class VllmServeBench:
    def __init__(self, folder: Path, size: Size, owned: ExitStack) -> None:
        port = free_port()
        # Not `vllm serve`, which wants a distribution of that name, and vLLM for CPUs comes under another.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", str(port)]
        # Its CPU worker cannot take a seeded request's prompt in chunks.
        options = ["--dtype", size.dtype_name, "--enforce-eager", "--no-enable-chunked-prefill", "--generation-config", "vllm"]
        logprobs = ["--logprobs-mode", "processed_logprobs", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
        server = _start([*command, *options, *logprobs], folder, owned, VLLM_SERVER_DEV_MODE="1")
        self._address = f"http://127.0.0.1:{port}"
        _wait(self._is_healthy, server)
        self._folder: Path | None = None
        self.engine = OpenAIServerEngine(f"{self._address}/v1", push_weights=self._push)

    def change_weights(self, folder: Path) -> None:
        self._folder = folder

    def _push(self, update: WeightUpdate) -> None:
        if update.changed:
            self._post("/collective_rpc", f'{{"method": "reload_weights", "kwargs": {{"weights_path": "{self._folder}"}}}}')
            self._post("/reset_prefix_cache", "")

    def _post(self, path: str, body: str) -> None:
        with urllib.request.urlopen(self._address + path, body.encode(), timeout=60) as response:
            assert response.status == 200

    def _is_healthy(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"{self._address}/health", timeout=5):
            return True
        return False


@dataclass
class _Server:
    process: subprocess.Popen[bytes]
    log_file: Path

    def log(self) -> str:
        return self.log_file.read_text()


def _start(command: list[str], folder: Path, owned: ExitStack, **environment: str) -> _Server:
    log_file = folder.with_name(f"{folder.name}-{time.monotonic_ns()}.log")
    with log_file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
    owned.callback(_end, process)
    return _Server(process, log_file)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Asked first, so that it can end the processes it has started itself."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _wait(condition: Callable[[], Any], server: _Server) -> Any:
    deadline = time.monotonic() + START_S
    while not (found := condition()):
        assert server.process.poll() is None, server.log()
        assert time.monotonic() < deadline, server.log()
        time.sleep(0.1)
    return found


# ── models ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

FAMILIES = ("llama, tied", "mistral, own head size", "qwen2, yarn rope", "qwen3, own head size", "qwen3, biases")
WIDE_HEADS: dict[str, Any] = {**SHAPE, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
"""vLLM's attention knows no head smaller than 32 on a CPU. Of Qwen3's biases, it leaves out that of the output projection."""
WITH_WIDE_HEADS: dict[str, PretrainedConfig] = {
    "llama, untied": llama(**WIDE_HEADS, tie_word_embeddings=False),
    "llama, tied": llama(**WIDE_HEADS, tie_word_embeddings=True),
    "mistral, own head size": MistralConfig(**WIDE_HEADS, head_dim=64, tie_word_embeddings=False),
    "qwen2, yarn rope": Qwen2Config(
        **WIDE_HEADS, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "qwen3, own head size": Qwen3Config(**WIDE_HEADS, head_dim=64, tie_word_embeddings=True),
}


SPECIALS = ("<s>", "</s>")
LETTERS = [chr(ord("Ā") + token) for token in range(SHAPE["vocab_size"])]


def write_tokenizer(folder: Path) -> None:
    """One letter per token, but for the two specials of `SHAPE`."""
    words = [*SPECIALS, *LETTERS[len(SPECIALS) :]]
    backend = Tokenizer(models.WordLevel({word: token for token, word in enumerate(words)}, unk_token="<s>"))
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def letters(tokens: Sequence[int]) -> str:
    """The text of tokens, specials left out."""
    return "".join(LETTERS[token] for token in tokens if token >= len(SPECIALS))


# ── the engines ────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Kind:
    """One engine of the suite. Where it says no, a test of that is skipped."""

    make: Callable[..., Bench]
    configs: Mapping[str, PretrainedConfig]
    """By family: the networks it is tested with."""
    is_costly: bool = True
    """Benches are kept for the next test."""
    is_server: bool = False
    takes_max_num_seqs: bool = True
    """And makes sequences wait that do not fit."""
    takes_chunks: bool = True
    """Prompts may be longer than `max_num_batched_tokens`."""
    refuses_large_n: bool = False
    """A request's completions start together or not at all."""
    takes_weights: bool = True
    shows_tokens: bool = False
    """Its network can be watched."""
    names_tops_by_id: bool = True
    """`top_logprobs` come with token ids."""
    computes_bfloat16: bool = True
    """On this machine: vLLM's kernels for ARM end the process where its CPU has no instructions for it."""
    marks: tuple[Any, ...] = ()


ENGINES: dict[str, Kind] = {
    "native": Kind(NativeBench, CONFIGS, is_costly=False, refuses_large_n=True, shows_tokens=True),
    "remote": Kind(
        RemoteBench,
        {"llama, untied": CONFIGS["llama, untied"]},
        is_server=True,
        refuses_large_n=True,
        shows_tokens=True,
        marks=(pytest.mark.slow,),
    ),
    "vllm": Kind(
        VllmBench,
        WITH_WIDE_HEADS,
        takes_chunks=False,
        computes_bfloat16=bool(bfloat16_flags()),
        marks=(NEEDS_VLLM,),
    ),
    "redline_serve": Kind(
        RedlineServeBench,
        {"llama, untied": CONFIGS["llama, untied"]},
        is_server=True,
        takes_max_num_seqs=False,
        takes_chunks=False,
        takes_weights=False,
        marks=(pytest.mark.slow, NEEDS_SERVE),
    ),
    "vllm_serve": Kind(
        VllmServeBench,
        {"llama, untied": WITH_WIDE_HEADS["llama, untied"]},
        is_server=True,
        takes_max_num_seqs=False,
        takes_chunks=False,
        computes_bfloat16=bool(bfloat16_flags()),
        marks=(pytest.mark.slow, NEEDS_VLLM),
    ),
}


class Workshop:
    """Makes benches, keeps the costly ones, and ends what it has started."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Path, Size], Bench] = {}
        self._fresh: list[Bench] = []
        self._owned = ExitStack()

    def bench(self, name: str, folder: Path, size: Size, *, fresh: bool = False) -> Bench:
        """`fresh` benches are given to no other test."""
        kind, key = ENGINES[name], (name, folder, size)
        if key in self._kept and not fresh:
            return self._kept[key]
        bench = kind.make(folder, size, self._owned) if kind.is_server else kind.make(folder, size)
        if kind.is_costly and fresh:
            self._fresh.append(bench)  # the end of one vLLM in a process is the end of all
        elif kind.is_costly:
            self._kept[key] = bench
        return bench

    def close(self) -> None:
        self._kept.clear()
        self._fresh.clear()
        self._owned.close()
