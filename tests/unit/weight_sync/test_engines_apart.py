"""The protocol between a trainer and engines of other processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import torch
from support.linked_engines import LinkedEngine

from redline.errors import PeerError, WeightSyncError, WireClosed
from redline.types import Completion, GenerateRequest, WeightSet, WeightUpdate
from redline.weight_sync import CudaIpc, Sending, WeightProtocol
from redline.weight_sync.verify import Probe


class HereEngine:
    """The engine as the trainer's process has it. Implements `protocol.HeldEngine`."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.num_holds = 0

    def hold(self) -> None:
        self.num_holds += 1

    def resume(self) -> None:
        self.num_holds -= 1

    def apply(self, update: WeightUpdate) -> None:
        assert self.num_holds
        self.version = update.version

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        raise NotImplementedError


class Apart:
    """A trainer with two engines in other processes; both come to what the probe expects unless told otherwise."""

    def __init__(self) -> None:
        self.trainer = {"embed": torch.zeros(40), "norm": torch.ones(3)}
        self.logprob = -2.0
        self.engines = [
            LinkedEngine(self.trainer, "engine-0", lambda tokens: [-2.0] * (len(tokens) - 1)),
            LinkedEngine(self.trainer, "engine-1", lambda tokens: [self.logprob] * (len(tokens) - 1)),
        ]
        self.transport = CudaIpc([engine.channel for engine in self.engines], self.trainer, Sending(timeout_s=60))
        self.here = HereEngine()
        self.protocol = WeightProtocol(self.transport, self.here, probe=lambda: Probe([1, 2, 3], [-2.0, -2.0], 0.05))

    def write(self, version: int) -> WeightSet:
        with self.protocol.writing():
            for tensor in self.trainer.values():
                tensor.fill_(version)
        return WeightSet(version, self.trainer)

    def take(self, version: int) -> WeightUpdate:
        update = self.protocol.publish(self.write(version))
        self.protocol.engine.apply(update)
        return update

    def versions(self) -> list[tuple[int, float]]:
        return [(engine.receiver.version, float(engine.tensors["embed"].mean())) for engine in self.engines]


@pytest.fixture
def apart() -> Iterator[Apart]:
    made = Apart()
    yield made
    made.protocol.close()
    for engine in made.engines:
        engine.close()


def test_an_update_tells_its_parts_and_the_pause(apart: Apart) -> None:
    update = apart.take(1)
    assert apart.versions() == [(1, 1.0), (1, 1.0)]
    assert update.bytes_moved == 2 * (40 + 3) * 4
    assert update.seconds.keys() == {"gather", "serialise", "transfer", "load", "verify", "resume", "pause"}
    assert 0 < update.seconds["pause"] <= update.seconds["resume"]


def test_a_probe_that_one_engine_fails_brings_all_of_them_back_and_they_go_on(apart: Apart) -> None:
    apart.take(1)
    update = apart.protocol.publish(apart.write(2))
    apart.logprob = -9.0
    with pytest.raises(PeerError, match="engine-1: the engine's logprobs of a fixed prompt are 7 from the trainer's"):
        apart.protocol.engine.apply(update)
    assert apart.versions() == [(1, 1.0), (1, 1.0)]
    assert (apart.here.version, apart.here.num_holds) == (1, 0)
    with pytest.raises(AssertionError, match="version 2 was not verified"):
        apart.protocol.engine.apply(update)
    apart.logprob = -2.0
    apart.take(3)
    assert apart.versions() == [(3, 3.0), (3, 3.0)]


def test_an_engine_that_ends_in_an_update_is_named_and_the_other_keeps_the_old_version(apart: Apart) -> None:
    apart.take(1)
    apart.engines[1].worker.close()
    with pytest.raises(WireClosed, match="engine-1 has ended the connection"):
        apart.take(2)
    assert apart.versions()[0] == (1, 1.0)
    assert apart.here.num_holds == 0


def test_an_engine_joins_only_between_updates_and_gets_the_version_of_the_others(apart: Apart) -> None:
    apart.take(1)
    weights = apart.write(2)
    apart.engines.append(LinkedEngine(apart.trainer, "engine-2"))
    joined: list[int] = []
    thread = threading.Thread(target=lambda: joined.append(apart.protocol.catch_up(apart.engines[2].channel, 60)))
    thread.start()
    time.sleep(0.05)
    assert joined == [], "what the trainer has written is no version of the engines yet"
    apart.protocol.engine.apply(apart.protocol.publish(weights))
    thread.join(60)
    assert joined == [2]
    assert apart.versions() == [(2, 2.0)] * 3
    apart.take(3)
    assert apart.versions() == [(3, 3.0)] * 3


def test_the_trainer_writes_only_when_an_engine_that_joins_has_its_weights(apart: Apart) -> None:
    apart.take(1)
    for version in range(2, 12):
        apart.engines.append(LinkedEngine(apart.trainer, f"engine-{version}"))
        thread = threading.Thread(target=apart.protocol.catch_up, args=(apart.engines[-1].channel, 60))
        thread.start()
        apart.take(version)
        thread.join(60)
        assert set(apart.versions()) == {(version, float(version))}, "it was part of the update, or came after it"


def test_an_engine_that_waits_too_long_to_join_says_why(apart: Apart) -> None:
    apart.take(1)
    apart.write(2)
    with pytest.raises(WeightSyncError, match=r"engine-0 cannot join: the weights were being changed for 0\.05 s"):
        apart.protocol.catch_up(apart.engines[0].channel, 0.05)
