"""An engine that takes weights: how long it stands still, how often it waits for its device, when it goes back by itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.linked_engines import LinkedEngine
from torch import Tensor

from redline.errors import PeerError, TornWeightsError
from redline.types import WeightSet
from redline.weight_sync import CudaIpc, Sending
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.verify import Probe
from redline.wire import Frame

PROBE = Probe([1, 2, 3], [-2.0, -2.0], 0.05)


class Run:
    """A trainer with engines in other processes; a bucket holds one tensor."""

    def __init__(self, num_buckets: int, engines: int = 2, **sending: Any) -> None:
        self.trainer = {f"layers.{index}": torch.zeros(64) for index in range(num_buckets)}
        self.engines = [
            LinkedEngine(self.trainer, f"engine-{index}", lambda tokens: [-2.0] * (len(tokens) - 1)) for index in range(engines)
        ]
        channels = [engine.channel for engine in self.engines]
        self.transport = CudaIpc(channels, self.trainer, Sending(timeout_s=60, bucket_bytes=256, **sending))

    def move(self, version: int) -> WeightSet:
        for tensor in self.trainer.values():
            tensor.fill_(version)
        weights = WeightSet(version, self.trainer)
        self.transport.move(TransferPlan(version, tuple(self.trainer)), weights)
        self.transport.verify(weights)
        return weights

    def take(self, version: int) -> None:
        self.move(version)
        self.transport.adopt(PROBE)
        assert all(engine.has(self.trainer) for engine in self.engines)


@pytest.fixture
def make_run() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(*args: Any, **options: Any) -> Run:
        runs.append(Run(*args, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.transport.close()
        for engine in run.engines:
            engine.close()


# ── how often ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("num_buckets", "waits"), [(1, 1), (2, 1), (3, 2), (10, 9)])
def test_an_engine_waits_for_its_device_once_for_the_last_two_buckets_and_once_for_the_probe(
    make_run: Callable[..., Run], num_buckets: int, waits: int
) -> None:
    run = make_run(num_buckets)
    for update in (1, 2):
        run.take(update)
        assert [engine.receiver.num_waits for engine in run.engines] == [update * (waits + 1)] * 2
        assert run.transport.num_waits == update * num_buckets, "the trainer's own: engines may read a bucket once it is packed"


def test_an_update_is_few_copies_however_many_tensors_it_has(make_run: Callable[..., Run]) -> None:
    run = make_run(2, engines=1)
    many = {f"small.{index}": torch.zeros(8) for index in range(200)}
    linked = LinkedEngine(many)
    transport = CudaIpc([linked.channel], many, Sending(timeout_s=60))
    run.engines.append(linked)
    copied: list[int] = []
    plain = torch._foreach_copy_

    def counting(into: list[Tensor], values: list[Tensor]) -> None:
        copied.append(len(into))
        plain(into, values)

    torch._foreach_copy_ = counting
    try:
        transport.move(TransferPlan(1, tuple(many)), WeightSet(1, many))
        transport.adopt()
    finally:
        torch._foreach_copy_ = plain
    assert copied == [200, 1, 200, 200, 200], "packed once, loaded as one run, exchanged by three copies"
    transport.close()


def counted(plain: Any, name: str, reads: list[str]) -> Callable[..., Any]:
    """A method of tensors that notes each call."""

    def call(tensor: Tensor, *args: Any) -> Any:
        reads.append(name)
        return plain(tensor, *args)

    return call


def test_nothing_is_read_from_the_device_before_the_sums_are_asked_for_and_then_once(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(2, engines=1)
    run.take(1)
    receiver, reads = run.engines[0].receiver, list[str]()
    for name in ("tolist", "item", "__int__", "__bool__", "cpu"):
        monkeypatch.setattr(Tensor, name, counted(getattr(Tensor, name), name, reads))
    receiver.answer(Frame("begin", {"version": 2, "names": list(run.trainer)}))
    for index in range(2):
        receiver.answer(Frame("bucket", {"index": index, "slot": index, "ranges": [[0, 256]], "tell": False}))
    assert reads == []
    assert len(receiver.answer(Frame("sums", {})).fields["sums"]) == 2
    assert reads == ["tolist"]
    receiver.answer(Frame("revert", {"version": 2}))


# ── how long ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_engines_on_the_trainers_gpu_stand_still_from_the_first_bucket_until_the_version_is_theirs(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(2, holds_engines=True)
    run.move(1)
    assert all(engine.engine.is_held for engine in run.engines)
    time.sleep(0.05)
    run.transport.adopt(PROBE)
    assert not any(engine.engine.is_held for engine in run.engines)
    assert [engine.engine.num_holds for engine in run.engines] == [1, 1], "once an update"
    assert run.transport.pause_s >= 0.05, "it is the whole time for which they stood still"


def test_engines_that_were_held_for_an_update_go_on_when_it_is_given_up_or_the_trainer_is_gone(
    make_run: Callable[..., Run],
) -> None:
    run = make_run(2, holds_engines=True)
    run.take(1)
    run.move(2)
    run.transport.revert(2)
    assert not any(engine.engine.is_held for engine in run.engines)
    run.move(3)
    assert all(engine.engine.is_held for engine in run.engines)
    for engine in run.engines:
        engine.close()
        assert not engine.engine.is_held
        assert engine.receiver.version == 1


def test_other_engines_sample_on_while_buckets_come(make_run: Callable[..., Run]) -> None:
    run = make_run(2)
    run.move(1)
    assert [engine.engine.num_holds for engine in run.engines] == [0, 0]


# ── by itself ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_adoption_of_which_the_trainer_never_heard_is_taken_back(make_run: Callable[..., Run]) -> None:
    run = make_run(2)
    run.take(1)
    old = {name: tensor.clone() for name, tensor in run.trainer.items()}
    run.take(2)
    for engine in run.engines:
        engine.close()  # before another frame came
        assert engine.has(old)
        assert engine.engine.versions == [1, 2, 1]


def test_an_adoption_that_the_trainer_went_on_from_stays(make_run: Callable[..., Run]) -> None:
    run = make_run(2)
    run.take(1)
    run.move(2)
    for engine in run.engines:
        engine.close()
        assert (engine.receiver.version, engine.engine.versions) == (1, [1])


def test_an_engine_whose_weights_are_torn_takes_no_further_step(
    make_run: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(2, engines=1)
    run.take(1)
    run.move(2)

    def lost(into: list[Tensor], values: list[Tensor]) -> None:
        raise RuntimeError("the device is gone")

    def failing(tokens: Any) -> list[float]:
        monkeypatch.setattr(torch, "_foreach_copy_", lost)
        return [0.0, 0.0]

    run.engines[0].receiver._logprobs = failing
    with pytest.raises(PeerError, match="engine-0: an update that failed cannot be taken back: the engine's logprobs"):
        run.transport.adopt(PROBE)
    assert isinstance(run.engines[0].engine.failure, TornWeightsError)
