"""Engines in processes of their own are killed and stopped at random moments: every request is answered, with the tokens of an
engine that nobody disturbs, and an engine that comes back has the current weights."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from support.tiny_engines import Model, ask, make_model

from redline.config import EngineRecipe
from redline.engine import EngineSession, NativeEngine
from redline.engine.remote.patience import Patience
from redline.engine.replicas import Replicas
from redline.launch.workers.pool import EnginePool
from redline.launch.workers.spawn import EngineSpec, LocalProcess, LocalProcesses
from redline.models.files.tiny import tiny_tokenizer
from redline.types import GenerateRequest, WeightSet
from redline.weight_sync import WeightProtocol
from redline.weight_sync.asked import Sending
from redline.weight_sync.transports.cuda_ipc import CudaIpc

ROUNDS = 20
NUM_ENGINES = 2
SILENCE_S = 4.0
ANSWERED_S = 120.0
"""Seconds within which a round is over on a busy machine: two engines may have to be started again, one after the other."""


class Fleet:
    """Two engines behind one session, and a trainer that changes their weights."""

    def __init__(self, model: Model) -> None:
        recipe = {"model": {"path": str(model.folder), "dtype": "float32"}, "engine": {"block_size": 4, "max_num_seqs": 8}}
        dumped = EngineRecipe.model_validate(recipe).model_dump(mode="json")
        specs = [EngineSpec(dumped, name=f"engine {index}") for index in range(NUM_ENGINES)]
        self.pool = EnginePool(LocalProcesses(), specs, Patience(silence_s=SILENCE_S))
        self.trained = model.engine(max_num_seqs=8)
        """An engine that nobody disturbs; its weights are the trainer's."""
        self.tensors = {name: tensor.detach() for name, tensor in self.trained.decoder.named_parameters()}
        self.told: list[str] = []
        self.replicas = Replicas(
            self.pool.engines, self.pool.restart, max_restarts=1000, arrived=self.pool.arrived, tell=self.told.append
        )
        self.session = EngineSession(self.replicas)
        transport = CudaIpc(self.pool.channels, self.tensors, Sending(on_lost=self.pool.lose, timeout_s=60))
        self.weight_sync = WeightProtocol(transport, self.session)
        self.pool.catch_up = self.weight_sync.catch_up
        self.version = 0

    def train(self) -> None:
        """Change the weights, and bring the new version to the engines."""
        with self.weight_sync.writing():
            generator = torch.Generator().manual_seed(self.version)
            for tensor in self.tensors.values():
                tensor += 0.01 * torch.randn(tensor.shape, generator=generator)
            self.version += 1
        self.publish()

    def publish(self) -> None:
        update = self.weight_sync.publish(WeightSet(self.version, self.tensors))
        self.weight_sync.apply(update)

    def expected(self, requests: list[GenerateRequest]) -> list[list[list[int]]]:
        undisturbed = NativeEngine(self.trained.decoder, self.trained._config)
        return [[one.token_ids.tolist() for one in group] for group in undisturbed.generate(requests)]

    def processes(self) -> list[LocalProcess]:
        return [process for process in self.pool.spawned if isinstance(process, LocalProcess)]

    def close(self) -> None:
        self.replicas.close()
        self.pool.close()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder: Path = tmp_path_factory.mktemp("model")
    model = make_model(folder)
    tiny_tokenizer().save_pretrained(folder)
    made = Fleet(model)
    made.publish()
    yield made
    made.close()


class Strikes:
    """Kills or stops engines that are there, each once."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._chance = fleet, random.Random(seed)
        self.struck: set[int] = set()

    def begin(self) -> threading.Thread:
        """Strike one at a random moment of the next second. Blocks until there is one."""
        soon(lambda: bool(self._there()))
        process, how = self._chance.choice(self._there()), self._chance.choice([signal.SIGKILL, signal.SIGSTOP])
        self.struck.add(process.pid)
        delay_s = self._chance.random()

        def strike() -> None:
            time.sleep(delay_s)
            os.kill(process.pid, how)

        thread = threading.Thread(target=strike)
        thread.start()
        return thread

    def _there(self) -> list[LocalProcess]:
        return [process for process in self._fleet.processes() if process.pid not in self.struck]


@pytest.mark.slow
def test_twenty_rounds_of_kills_and_stops_lose_no_request_and_change_no_token(
    fleet: Fleet, capsys: pytest.CaptureFixture[str]
) -> None:
    strikes = Strikes(fleet, seed=7)
    for index in range(ROUNDS):
        requests = [ask(3 + seed % 5, 60, seed=100 * index + seed, n=3) for seed in range(12)]
        expected = fleet.expected(requests)
        striking = strikes.begin()
        began = time.monotonic()
        answered = fleet.session.generate(requests)
        assert time.monotonic() - began < ANSWERED_S
        striking.join()
        assert [[one.token_ids.tolist() for one in group] for group in answered] == expected
        assert {one.versions.newest for group in answered for one in group} == {fleet.version}
        fleet.train()
    soon(lambda: len(fleet.replicas.recoveries) == len(strikes.struck) == ROUNDS)
    with capsys.disabled():
        for recovery in fleet.replicas.recoveries:
            why = recovery.why.splitlines()[0].removeprefix(f"{recovery.name} is lost: ")
            print(f"\n{recovery.name} back after {recovery.seconds:.1f} s: {why}", end="")
        print()


@pytest.mark.slow
def test_an_engine_that_dies_in_an_update_neither_stops_it_nor_comes_back_with_old_weights(fleet: Fleet) -> None:
    for how in (signal.SIGKILL, signal.SIGSTOP):
        soon(lambda: fleet.processes()[0].is_alive())
        os.kill(fleet.processes()[0].pid, how)
        began = time.monotonic()
        fleet.train()
        assert time.monotonic() - began < ANSWERED_S
        requests = [ask(4, 20, seed=seed, n=2) for seed in range(16)]
        answered = fleet.session.generate(requests)
        assert [[one.token_ids.tolist() for one in group] for group in answered] == fleet.expected(requests)
    soon(lambda: all(process.is_alive() for process in fleet.processes()))


def soon(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + ANSWERED_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.1)
