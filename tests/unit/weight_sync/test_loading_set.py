"""An engine that loads weights by names of its own gets them from a copy: the new version whole, or the one before again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from support.linked_engines import LinkedEngine
from torch import Tensor

from redline.errors import RedlineError, TornWeightsError
from redline.types import WeightSet
from redline.weight_sync import CudaIpc, Sending
from redline.weight_sync.loading_set import LoadingSet
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.receiver import WeightReceiver
from redline.weight_sync.verify import Probe


class Loading:
    """An engine with weights of its own, and the copy that it loads them from."""

    def __init__(self) -> None:
        self.trainer = {"a": torch.arange(600.0), "b": torch.ones(3, 5)}
        self.copy = {name: torch.zeros_like(tensor) for name, tensor in self.trainer.items()}
        self.loaded: dict[str, Tensor] = {}
        """What the engine computes with."""
        self.failures = 0
        """Loads that fail in the middle from now on."""
        self.linked = LinkedEngine(
            self.trainer,
            make_receiver=lambda _, engine, __: WeightReceiver(
                LoadingSet(self.copy, self.load), engine, self.logprobs, rounding=10.0
            ),
        )
        self.transport = CudaIpc([self.linked.channel], self.trainer, Sending(bucket_bytes=1024))

    def load(self) -> None:
        for name, tensor in self.copy.items():
            self.loaded[name] = tensor.clone()
            if self.failures:
                self.failures -= 1
                raise RuntimeError("no memory")

    def logprobs(self, tokens: list[int]) -> list[float]:
        return [float(self.loaded["a"][1])]

    def update(self, version: int, logprob: float | None = None) -> None:
        weights = WeightSet(version, self.trainer)
        self.transport.move(TransferPlan(version, tuple(self.trainer)), weights)
        self.transport.verify(weights)
        self.transport.adopt(Probe([1, 2], [logprob], 1e-3) if logprob is not None else None)

    def has(self, version: int) -> bool:
        expected = {"a": torch.arange(600.0) + version, "b": torch.ones(3, 5) * version}
        return all(torch.equal(self.loaded[name], expected[name]) for name in expected)


@pytest.fixture
def engine() -> Iterator[Loading]:
    made = Loading()
    step(made, 1)
    yield made
    made.transport.close()
    made.linked.close()


def step(engine: Loading, version: int, logprob: float | None = None) -> None:
    engine.trainer["a"].copy_(torch.arange(600.0) + version)
    engine.trainer["b"].fill_(float(version))
    engine.update(version, logprob)


def test_it_loads_every_version_and_may_round_otherwise(engine: Loading) -> None:
    assert engine.has(1)
    step(engine, 2, logprob=3.009)
    assert engine.has(2)
    assert engine.linked.engine.versions == [1, 2]


def test_a_load_that_fails_leaves_it_with_the_version_before(engine: Loading) -> None:
    engine.failures = 1
    with pytest.raises(RedlineError, match="no memory"):
        step(engine, 2)
    assert engine.has(1)
    assert engine.linked.engine.versions == [1, 1]
    engine.transport.revert(2)
    step(engine, 3)
    assert engine.has(3)


def test_a_probe_that_fails_and_another_engine_that_does_bring_the_version_before_back(engine: Loading) -> None:
    with pytest.raises(RedlineError, match="logprobs"):
        step(engine, 2, logprob=-7.0)
    assert engine.has(1)
    engine.transport.revert(2)
    step(engine, 3)
    engine.transport.revert(3)
    assert engine.has(1)


def test_a_load_that_fails_leaves_it_with_the_weights_before_also_where_they_have_the_same_number(engine: Loading) -> None:
    engine.failures = 1
    engine.trainer["a"].add_(5)
    with pytest.raises(RedlineError, match="no memory"):
        engine.update(1)
    assert engine.has(1)
    assert engine.linked.engine.failure is None


def test_an_engine_that_loads_neither_version_takes_no_further_step(engine: Loading) -> None:
    engine.failures = 2
    with pytest.raises(RedlineError, match="cannot load the version before again"):
        step(engine, 2)
    assert isinstance(engine.linked.engine.failure, TornWeightsError)
