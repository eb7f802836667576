"""The engine over two processes on the CPU gives what one process gives, and sends no more for longer sequences."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from support.small_models import CONFIGS, VOCAB_SIZE, write_model

from redline.addresses import is_loopback
from redline.config.sections.engine import ServedEngineConfig
from redline.engine import NativeEngine
from redline.engine.native import tensor_parallel
from redline.engine.native.tensor_parallel import TensorParallelEngine, decode_request, encode_request
from redline.errors import EngineLostError, ModelError
from redline.models.files.hf import load_decoder
from redline.models.parallel import shard_spec
from redline.types import FinishReason, GenerateRequest, SamplingParams

CPU = torch.device("cpu")
CONFIG = ServedEngineConfig(max_num_seqs=16, max_num_batched_tokens=64, tensor_parallel_size=2)


@pytest.fixture(scope="module", params=["qwen3, biases", pytest.param("qwen2, yarn rope", marks=pytest.mark.slow)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path, CONFIGS[request.param], seed=5, std=0.3)
    return path


def outer_interface() -> str | None:
    """An interface of this machine by which others reach it, where it has one."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == socket.AF_INET and not is_loopback(address.address) for address in addresses):
            return name
    return None


@pytest.fixture(scope="module")
def parallel(folder: Path) -> Iterator[TensorParallelEngine]:
    with pytest.MonkeyPatch.context() as patch:
        if (name := outer_interface()) is not None:  # as where trainers of several machines meet
            patch.setenv("GLOO_SOCKET_IFNAME", name)
        engine = TensorParallelEngine(folder, CONFIG, CPU, torch.float32)
        assert os.environ.get("GLOO_SOCKET_IFNAME") == name
    yield engine
    engine.close()


def test_its_processes_listen_on_loopback_alone(parallel: TensorParallelEngine) -> None:
    processes = [psutil.Process(), *(psutil.Process(worker.pid) for worker in parallel._workers)]
    listening = [c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    assert listening
    assert all(is_loopback(address.removeprefix("::ffff:")) for address in listening), listening


def ask(length: int, max_tokens: int, **sampling: object) -> GenerateRequest:
    prompt = np.random.default_rng(length).integers(2, VOCAB_SIZE, length).astype(np.int32)
    return GenerateRequest(prompt, SamplingParams(max_tokens=max_tokens, seed=length, **sampling))  # type: ignore[arg-type]


def test_two_processes_sample_what_one_samples(folder: Path, parallel: TensorParallelEngine) -> None:
    requests = [ask(5, 30, n=3), ask(40, 7, temperature=0.0), ask(17, 25), ask(90, 12, n=2, top_k=5), ask(1, 1)]
    alone = NativeEngine(load_decoder(folder), CONFIG)
    for found, expected in zip(parallel.generate(requests), alone.generate(requests), strict=True):
        for one, other in zip(found, expected, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def test_an_abort_reaches_every_process(parallel: TensorParallelEngine) -> None:
    kept, dropped = parallel.submit(ask(5, 20)), parallel.submit(ask(6, 100))
    for _ in range(3):
        parallel.step()
    parallel.abort(dropped)
    reasons = {}
    while parallel.has_work:
        reasons |= {number: piece.completion.finish_reason for number, piece in parallel.step()}  # type: ignore[union-attr]
    assert reasons == {kept: FinishReason.LENGTH, dropped: FinishReason.ABORT}
    assert parallel.stats.kv_blocks_used == 0
    assert len(parallel.generate([ask(9, 5)])[0][0].token_ids) == 5, "and the processes are still in step"


def bytes_per_decode_step(engine: TensorParallelEngine, requests: list[GenerateRequest]) -> set[int]:
    """Without the sums inside the network."""
    for request in requests:
        engine.submit(request)
    engine.step()
    while engine.stats.batch_size < len(requests):
        engine.step()
    found = set()
    for _ in range(5):
        before = engine.ranks.control_bytes
        engine.step()
        found.add(engine.ranks.control_bytes - before)
    while engine.has_work:
        engine.step()
    return found


def test_the_bytes_of_a_decode_step_do_not_grow_with_the_length_of_the_sequences(parallel: TensorParallelEngine) -> None:
    short = bytes_per_decode_step(parallel, [ask(4, 60) for _ in range(8)])
    long = bytes_per_decode_step(parallel, [ask(150, 60) for _ in range(8)])
    assert short == long == {8 + 8 * (8 + 4)}, "the length of an empty log, and a token and a logprob for each sequence"
    assert bytes_per_decode_step(parallel, [ask(150, 60) for _ in range(2)]) == {8 + 2 * (8 + 4)}


def test_a_request_survives_the_way_to_another_process() -> None:
    request = ask(7, 9, n=2, stop=("a", "b"), stop_token_ids=(3, 4), logit_bias={5: -1.5}, allowed_token_ids=(1, 2), min_p=0.1)
    found = decode_request(encode_request(replace(request, order=(3, -2.5))))
    assert (found.sampling, found.order) == (request.sampling, (3, -2.5))
    assert found.prompt_ids.tolist() == request.prompt_ids.tolist()


@pytest.mark.parametrize(
    ("program", "code"), [(("no.such.module",), 1), (("redline.launch.workers.engine_rank", "engine 1", ""), -9)]
)
def test_a_rank_that_dies_while_it_starts_is_named_at_once_and_nothing_is_left(
    folder: Path, program: tuple[str, ...], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if code == -9:  # as it imports torch, or on its way to the others
        start = tensor_parallel._start_worker

        def start_and_kill(*arguments: Any) -> subprocess.Popen[bytes]:
            worker = start(*arguments)
            threading.Timer(1.0, worker.kill).start()
            return worker

        monkeypatch.setattr(tensor_parallel, "_start_worker", start_and_kill)
    before, began = set(psutil.Process().children()), time.monotonic()
    with pytest.raises(EngineLostError, match=f"rank 1 of the engine has ended with code {code} while it started"):
        TensorParallelEngine(folder, CONFIG, CPU, torch.float32, program=program)
    assert time.monotonic() - began < 60
    left = set(psutil.Process().children()) - before
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in left)


def test_heads_that_cannot_be_divided_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match="cannot be divided among 5 ranks"):
        shard_spec(load_decoder(folder).spec, 5)
