"""Weight sync by doing nothing: engine and trainer hold the same tensors, so publishing is counting."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from redline.telemetry import span
from redline.types import WeightSet, WeightUpdate


class SharedWeightSync:
    """For an engine in the trainer's process, on the trainer's device. Implements `ports.WeightSync`."""

    def __init__(self, engine_tensors: Mapping[str, Tensor]) -> None:
        self._addresses = {name: tensor.data_ptr() for name, tensor in engine_tensors.items()}

    def publish(self, weights: WeightSet) -> WeightUpdate:
        with span("weight_sync.publish", version=weights.version):
            addresses = {name: tensor.data_ptr() for name, tensor in weights.tensors.items()}
            assert addresses == self._addresses, "the trainer replaced its tensors; the engine still reads the old ones"
            return WeightUpdate(version=weights.version, changed=tuple(weights.tensors), bytes_moved=0)
