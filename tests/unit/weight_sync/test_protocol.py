"""The protocol between a trainer and an engine that has a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext

import pytest
import torch

from redline.engine import EngineSession
from redline.errors import EngineError
from redline.types import Delta, EngineStats, GenerateRequest, WeightSet, WeightUpdate
from redline.weight_sync import SharedStorage, WeightProtocol


class Looking:
    """An engine without requests: reads two weights in every step, which are equal in every version, and notes its version.
    Implements `ports.SteppedEngine`."""

    has_work = True
    stats = EngineStats()

    def __init__(self) -> None:
        self.tensors = {"first": torch.zeros(1), "second": torch.zeros(1)}
        self.version = 0
        self.seen: list[tuple[int, float, float]] = []
        self.ends_at: int | None = None
        """The version whose first step fails."""

    def step(self) -> list[tuple[int, Delta | EngineError]]:
        first = float(self.tensors["first"])
        time.sleep(1e-4)
        self.seen.append((self.version, first, float(self.tensors["second"])))
        if self.version == self.ends_at:
            raise RuntimeError("the device is gone")
        return []

    def apply(self, update: WeightUpdate) -> None:
        self.version = update.version

    def submit(self, request: GenerateRequest, *, streaming: bool = False) -> int:
        raise NotImplementedError

    def abort(self, request_id: int) -> None:
        raise NotImplementedError

    def sampled_tokens(self, request_id: int) -> Mapping[int, int]:
        raise NotImplementedError


@pytest.fixture
def engine() -> Looking:
    return Looking()


@pytest.fixture
def session(engine: Looking) -> Iterator[EngineSession]:
    with EngineSession(engine) as session:
        yield session


def write(engine: Looking, version: int) -> WeightSet:
    """As slowly as a large model is written."""
    for tensor in engine.tensors.values():
        tensor.fill_(version)
        time.sleep(1e-3)
    return WeightSet(version, engine.tensors)


def train(engine: Looking, protocol: WeightProtocol, versions: int, *, careful: bool = True) -> None:
    for version in range(1, versions + 1):
        with protocol.writing() if careful else nullcontext():
            weights = write(engine, version)
        protocol.engine.apply(protocol.publish(weights))
        while engine.seen[-1][0] != version:
            time.sleep(1e-4)


def test_no_step_reads_weights_that_are_half_written_or_of_another_version(engine: Looking, session: EngineSession) -> None:
    train(engine, WeightProtocol(SharedStorage(engine.tensors), session), 30)
    assert {version for version, _, _ in engine.seen} == set(range(31))
    assert all(version == first == second for version, first, second in engine.seen)


def test_without_holding_the_engine_a_step_would_read_them(engine: Looking, session: EngineSession) -> None:
    """The test above can fail."""
    train(engine, WeightProtocol(SharedStorage(engine.tensors), session), 30, careful=False)
    assert any(first != second for _, first, second in engine.seen)


def test_an_engine_that_has_ended_is_told_of_before_anything_is_written(engine: Looking, session: EngineSession) -> None:
    protocol = WeightProtocol(SharedStorage(engine.tensors), session)
    train(engine, protocol, 1)
    engine.ends_at = 1
    while session.is_alive:
        time.sleep(1e-3)
    with pytest.raises(RuntimeError, match="the device is gone"), protocol.writing():
        write(engine, 2)
    assert {name: float(tensor) for name, tensor in engine.tensors.items()} == {"first": 1.0, "second": 1.0}
