"""A rank of a tensor-parallel engine that dies or hangs inside a step ends the engine soon, and everybody hears why."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from support.small_models import CONFIGS, VOCAB_SIZE, write_model

from redline.config.sections.engine import ServedEngineConfig
from redline.engine import EngineSession
from redline.engine.native import tensor_parallel
from redline.engine.native.tensor_parallel import TensorParallelEngine
from redline.errors import EngineError
from redline.types import Completion, GenerateRequest, SamplingParams

STEP_TIMEOUT_S = 4.0
"""Of a step that will never end."""
SOON_S = 300.0
"""Long enough for a busy machine, and far below a year."""


def make_engine(tmp_path: Path, step_timeout_s: float = SOON_S) -> TensorParallelEngine:
    write_model(tmp_path, CONFIGS["qwen3, biases"], seed=5, std=0.3)
    config = ServedEngineConfig(max_num_seqs=4, tensor_parallel_size=2)
    return TensorParallelEngine(tmp_path, config, torch.device("cpu"), torch.float32, step_timeout_s=step_timeout_s)


def ask() -> GenerateRequest:
    prompt = np.random.default_rng(0).integers(2, VOCAB_SIZE, 9).astype(np.int32)
    return GenerateRequest(prompt, SamplingParams(max_tokens=200))


def worker() -> psutil.Process:
    """Of rank 1."""
    [found] = [child for child in psutil.Process().children() if "redline.engine.native.tensor_parallel" in child.cmdline()]
    return found


def lose(running: EngineSession, number: signal.Signals) -> str:
    """Signal the worker while a request is under way: what its caller hears."""

    async def run() -> str:
        call = asyncio.create_task(running.complete(ask()))
        while running.stats.steps < 3:
            await asyncio.sleep(0.001)
        worker().send_signal(number)
        with pytest.raises(EngineError) as caught:
            await asyncio.wait_for(call, SOON_S)
        return caught.value.message

    return asyncio.run(run())


def take_steps(engine: TensorParallelEngine, count: int) -> None:
    for _ in range(count):
        engine.step()


def outcome(running: EngineSession) -> list[Completion]:
    return asyncio.run(running.complete(ask()))


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (signal.SIGKILL, "rank 1 of the engine has ended with code -9"),
        pytest.param(signal.SIGSTOP, "limit 4 s", marks=pytest.mark.slow),  # the test below has one that hangs, too
    ],
)
def test_a_rank_that_is_lost_inside_a_step_ends_the_engine(tmp_path: Path, number: signal.Signals, reason: str) -> None:
    engine = make_engine(tmp_path, STEP_TIMEOUT_S if number == signal.SIGSTOP else SOON_S)
    process = worker()
    try:
        with EngineSession(engine, engine.why_broken) as running:
            message = lose(running, number)
            assert reason in message
            assert not running.is_alive
            with pytest.raises(EngineError, match="the engine has stopped"):
                outcome(running)
    finally:
        engine.close()
    assert not process.is_running(), "and no process is left behind"


def test_a_rank_that_hangs_between_two_steps_is_waited_for_no_longer_than_one_inside_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_parallel, "END_S", 1.0)  # nobody dies, which is looked for as long as a fifth of that
    engine = make_engine(tmp_path, STEP_TIMEOUT_S)
    process = worker()
    try:
        process.suspend()
        with pytest.raises(EngineError, match="limit 4 s"):
            take_steps(engine, 3)  # it was there for the first, when it was stopped
    finally:
        engine.close()
    assert not process.is_running()


@pytest.mark.slow
def test_an_engine_with_a_rank_that_hangs_is_closed(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, STEP_TIMEOUT_S)
    process = worker()
    process.suspend()
    engine.close()
    assert not process.is_running()
