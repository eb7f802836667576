from __future__ import annotations

import pytest
import torch
from torch import Tensor

from redline.types import WeightSet, WeightUpdate
from redline.weight_sync import SharedWeightSync


def make_tensors() -> dict[str, Tensor]:
    return {"embed": torch.randn(4, 3), "norm": torch.ones(3)}


def test_publishing_copies_nothing_and_names_what_changed() -> None:
    tensors = make_tensors()
    update = SharedWeightSync(tensors).publish(WeightSet(7, tensors))
    assert update == WeightUpdate(version=7, changed=("embed", "norm"), bytes_moved=0)


def test_the_engine_sees_a_change_in_place_before_anyone_publishes() -> None:
    trainers = make_tensors()
    engines = {name: tensor.detach() for name, tensor in trainers.items()}
    sync = SharedWeightSync(engines)
    sync.publish(WeightSet(0, trainers))
    trainers["norm"].mul_(5)
    assert engines["norm"].tolist() == [5.0] * 3
    assert sync.publish(WeightSet(1, trainers)).version == 1


@pytest.mark.parametrize("versions", [[0, 1, 2], [0, 5, 5]])
def test_every_version_is_passed_on(versions: list[int]) -> None:
    tensors = make_tensors()
    sync = SharedWeightSync(tensors)
    assert [sync.publish(WeightSet(version, tensors)).version for version in versions] == versions


def test_replaced_tensors_are_caught() -> None:
    tensors = make_tensors()
    sync = SharedWeightSync(tensors)
    with pytest.raises(AssertionError, match="replaced its tensors"):
        sync.publish(WeightSet(1, tensors | {"norm": tensors["norm"].clone()}))


def test_a_missing_or_a_new_tensor_is_caught() -> None:
    tensors = make_tensors()
    sync = SharedWeightSync(tensors)
    for changed in ({"embed": tensors["embed"]}, tensors | {"extra": torch.zeros(1)}):
        with pytest.raises(AssertionError, match="replaced its tensors"):
            sync.publish(WeightSet(1, changed))
