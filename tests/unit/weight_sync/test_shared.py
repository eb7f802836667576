from __future__ import annotations

import pytest
import torch
from torch import Tensor

from redline.types import WeightSet
from redline.weight_sync import SharedStorage


def make_tensors() -> dict[str, Tensor]:
    return {"embed": torch.randn(4, 3), "norm": torch.ones(3)}


def test_the_engine_sees_a_change_in_place_before_anyone_publishes() -> None:
    trainers = make_tensors()
    engines = {name: tensor.detach() for name, tensor in trainers.items()}
    transport = SharedStorage(engines)
    trainers["norm"].mul_(5)
    assert engines["norm"].tolist() == [5.0] * 3
    transport.verify(WeightSet(1, trainers))


def test_replaced_tensors_are_caught_and_named() -> None:
    tensors = make_tensors()
    with pytest.raises(AssertionError, match="replaced its tensors; the engine still reads the old ones: norm"):
        SharedStorage(tensors).verify(WeightSet(1, tensors | {"norm": tensors["norm"].clone()}))


def test_a_missing_or_a_new_tensor_is_caught() -> None:
    tensors = make_tensors()
    for changed in ({"embed": tensors["embed"]}, tensors | {"extra": torch.zeros(1)}):
        with pytest.raises(AssertionError, match="replaced its tensors"):
            SharedStorage(tensors).verify(WeightSet(1, changed))


def test_memory_that_the_engine_reads_is_not_given_to_another_tensor() -> None:
    """An address says nothing of a tensor that was freed: what is there now may be another's."""
    tensors = make_tensors()
    transport = SharedStorage(tensors)
    for _ in range(20):
        tensors["norm"] = torch.ones(3)
        with pytest.raises(AssertionError, match="replaced its tensors"):
            transport.verify(WeightSet(1, tensors))
