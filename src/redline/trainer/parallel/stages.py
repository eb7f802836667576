"""Processes that divide the layers of the policy among them (`models/stage.py`), and its weights with them.

gradients    each stage has those of its layers, summed over the data ranks of the same stage; those of an embedding that
             is the head too are summed over the first and the last stage, which then take the same update
norm         of all stages together: every process clips by it, and skips a step with the others
rank 0       gets whole tensors from the other stages, one at a time: for its engine, for checkpoints, for the last export
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from redline.models.files.hf import AnyDecoder
from redline.models.files.stored import StoredWeights
from redline.models.stage import EMBED, Stage, cut_stage, stage_layers, stage_of
from redline.models.value_head import ValueNetwork
from redline.trainer.parallel.pipeline import Pipeline
from redline.trainer.parallel.place import Division, Place
from redline.trainer.parallel.processes import Several
from redline.trainer.parallel.weights import Weights, sum_over


class Staged(Several):
    """One process of a pipeline, or of several pipelines that get micro-batches of their own."""

    def __init__(self, place: Place, device: torch.device, division: Division, patience: timedelta) -> None:
        super().__init__(place, device, division, patience)
        pipelines = self._neighbours(place.stages)
        ends = [[pipeline[0], pipeline[-1]] for pipeline in pipelines]
        self._pipeline_group = self._own_group(pipelines)
        self._data_group = self._own_group(self._across(place.stages))
        self._ends_group = self._own_group(ends)  # None between the ends

    def cut(self, network: AnyDecoder) -> AnyDecoder:
        return cut_stage(network, self.place.stage, self.place.stages)

    def pipeline(self, dtype: torch.dtype) -> Pipeline:
        assert self._pipeline_group is not None
        return Pipeline(self.device, dtype, self._pipeline_group)

    def rows_of(self, part: int, name: str, num_rows: int, num_layers: int) -> tuple[int, int]:
        return (0, num_rows) if stage_of(name, stage_layers(num_layers, self.place.stages)) == part else (0, 0)

    def wrap(self, network: AnyDecoder | ValueNetwork, dtype: torch.dtype, stored: StoredWeights | None = None) -> Weights:
        assert isinstance(network, Stage)
        assert self._pipeline_group is not None
        if stored is not None:
            _fill(network, stored, self.device)
        data_group = self._data_group if self.place.data_ranks > 1 else None
        return StageWeights(network, self.place, self._pipeline_group, data_group, self._ends_group)

    def sum_of(self, values: Tensor) -> Tensor:
        """Over all processes. The last stages have the values of their micro-batches, the others have zeros."""
        summed = values.detach().clone()
        dist.all_reduce(summed)
        return summed


@torch.no_grad()
def _fill(network: Stage, stored: StoredWeights, device: torch.device) -> None:
    """Allocate and read the parameters of a stage that have no values; those that have go to the device."""
    missing = [name for name, parameter in network.named_parameters() if parameter.is_meta]
    network._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))
    for name in missing:
        stored.fill(name, 0, network.get_parameter(name))


class StageWeights(Weights):
    """Those of one stage."""

    def __init__(
        self,
        stage: Stage,
        place: Place,
        pipeline: dist.ProcessGroup,
        data: dist.ProcessGroup | None,
        ends: dist.ProcessGroup | None,
    ) -> None:
        """`data` has the processes with the same stage, where there are others; `ends` the first and the last of a pipeline."""
        super().__init__(stage)
        self._place, self._stage = place, place.stage
        self._owners, self._shapes, self._trained = stage.owners, stage.shapes, stage.trained
        self._pipeline, self._data = pipeline, data
        self._ends = ends if stage.spec.tied_embeddings else None
        self._device = next(stage.parameters()).device

    def sum_gradients(self, gradients: Mapping[str, Tensor]) -> None:
        if self._data is not None:
            sum_over(self._data, gradients)
        if self._ends is not None and EMBED in gradients:
            dist.all_reduce(gradients[EMBED], group=self._ends)

    def sum_squares(self, names: tuple[str, ...], squares_P: Tensor) -> tuple[tuple[str, ...], Tensor]:
        """In the order of the whole network; a parameter that two stages have counts once."""
        place_of = {name: index for index, name in enumerate(self._trained)}
        own = [index for index, name in enumerate(names) if self._owners[name] == self._stage]
        everywhere = torch.tensor([place_of[names[index]] for index in own], device=squares_P.device)
        squares = squares_P.new_zeros(len(self._trained)).index_copy_(0, everywhere, squares_P[own])
        dist.all_reduce(squares, group=self._pipeline)
        return self._trained, squares

    def full(self, held: Mapping[str, Tensor], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """On rank 0 all of them, on the others those that they answer for."""
        names = self._trained if held.keys() <= set(self._trained) else tuple(self._owners)
        for name in names:
            owner = self._owners[name]
            own = held[name].detach().to(dtype) if owner == self._stage else None
            found = self._to_rank_0(owner, own, self._shapes[name], dtype)
            if found is not None:
                yield name, found

    def written(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        others = {name for name, owner in self._owners.items() if owner != self._stage}
        return {key: value for key, value in state.items() if key.partition("/")[2] not in others}

    def _to_rank_0(self, owner: int, own: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """`own` where this process has it, what the owner sends on rank 0, else nothing. The pipeline of rank 0 does this; the
        others have the same weights."""
        if own is not None:
            if owner and self._place.data_rank == 0:
                dist.send(own.to(self._device).contiguous(), 0)
            return own
        if self._place.rank:
            return None
        received = torch.empty(shape, dtype=dtype, device=self._device)
        dist.recv(received, owner)
        return received
