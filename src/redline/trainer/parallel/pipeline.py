"""Micro-batches through the stages of a pipeline, by torch's own `torch.distributed.pipelining`.

    stage 0    F0 F1       B0 F2 B1 F3 B2    B3        F forward, B backward, of micro-batches 0 … 3
    stage 1       F0 B0 F1 B1 F2 B2 F3 B3

1F1B: a stage keeps the activations of as many micro-batches as there are stages behind it, and itself. GPipe would keep all of
them and wait as long, so that it runs only passes without gradients, which keep nothing.

Every process has the whole batch and plans it alike, so that each knows a micro-batch's segments and length by its number: the
residual stream, and its gradient, are all that is sent. torch wants every message of a pass in one shape that is known before,
or else it infers the shape by pickled objects, which nothing here may read. So messages are as long as the longest micro-batch
of the pass. A stage takes the tokens that there are and computes nothing for the rest; micro-batches are even, so that it is
little.

The time in a pass that this stage does not compute in is `wait.for_stages`: the bubble, and the transfers. Importing this file
takes torch's pipelining along, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from redline.models.files.hf import AnyDecoder
from redline.models.lora.per_token import ActiveLora
from redline.models.stage import Stage
from redline.telemetry import span
from redline.trainer.batches.micro_batches import MicroBatch
from redline.trainer.batches.staging import Staging
from redline.trainer.parallel.passing import Found, Passing
from redline.trainer.passes.forward import hidden_states, network_inputs, predicted, whole


class Pipeline:
    """The stages of one pipeline, seen from the process of one. Every process must begin the same passes in the same order."""

    def __init__(self, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self._device, self._dtype, self._group = device, dtype, group

    def train(self, passing: Passing) -> None:
        """Forward and backward of every micro-batch: the gradients of this stage are with its parameters. Blocks until this
        stage has done its part."""
        self._run(passing, trains=True)

    @torch.no_grad()
    def recompute(
        self,
        network: AnyDecoder,
        micro_batches: Iterable[MicroBatch],
        temperature: float,
        lora: ActiveLora | None = None,
        doing: str = "trainer.recompute",
    ) -> list[Tensor]:
        """float32[M] for each micro-batch: logprobs of its trained tokens, without gradients. Zeros wherever the stage is not
        the last."""
        assert isinstance(network, Stage)
        parts = list(micro_batches)
        found: list[Tensor] = []

        def keep(micro_batch: MicroBatch, numbers: Found) -> Tensor:
            found.append(numbers[0])
            return numbers[0]

        items = Staging(self._device).sent((part, network_inputs(part, whole(part))) for part in parts)
        longest = max((len(part.tokens) for part in parts), default=0)
        self._run(Passing(network, items, len(parts), longest, temperature, keep, doing, lora=lora), trains=False)
        return found if network.is_last else [torch.zeros(len(part.targets)) for part in parts]

    def _run(self, passing: Passing, *, trains: bool) -> None:
        if not passing.count:
            return
        network, count = passing.network, passing.count
        stage = self._stage(passing, trains)
        schedule = Schedule1F1B(stage, count, _loss, scale_grads=False) if trains else ScheduleGPipe(stage, count)
        numbers = torch.arange(count)  # torch divides a batch into micro-batches; ours is their numbers
        first = (numbers,) if network.is_first else ()
        target = numbers if network.is_last and trains else None
        with span("wait.for_stages"):
            try:
                schedule.step(*first, number=numbers, target=target, return_outputs=False)
            except RuntimeError as error:
                if error.__cause__ is None:
                    raise
                raise error.__cause__ from None  # what a stage raised, such as that memory ran out; torch wraps it

    def _stage(self, passing: Passing, trains: bool) -> PipelineStage:
        network = passing.network
        with torch.device("meta"):
            number = torch.empty(1, dtype=torch.int64)
            stream = torch.empty(passing.longest, network.spec.hidden_size, dtype=self._dtype, requires_grad=trains)
            loss = torch.empty((), requires_grad=trains)
        return _TimedStage(
            _OnePass(passing),
            network.index,
            network.count,
            self._device,
            input_args=number if network.is_first else stream,
            output_args=loss if network.is_last else stream,
            group=self._group,
        )


def _loss(loss: Tensor, number: Tensor) -> Tensor:
    """The last stage gives the loss itself."""
    return loss


class _OnePass(nn.Module):
    """This process's stage, as torch calls it: once for every micro-batch, in order."""

    def __init__(self, passing: Passing) -> None:
        super().__init__()
        self.network, self.passing = passing.network, passing

    def forward(self, given: Tensor, number: Tensor) -> Tensor:
        """`given` is the residual stream of the stage before, and nothing of use on the first."""
        passing, network = self.passing, self.network
        micro_batch, inputs = next(passing.items)
        with span(passing.doing, device=True, **passing.told):
            own = inputs["tokens"].long() if network.is_first else given[: len(micro_batch.tokens)]
            stream_TE = hidden_states(network, micro_batch, whole(micro_batch), own, passing.lora)
            if not network.is_last:
                return F.pad(stream_TE, (0, 0, 0, passing.longest - len(stream_TE)))
            return passing.finish(micro_batch, predicted(network, stream_TE, inputs, passing.temperature))


class _TimedStage(PipelineStage):
    """torch's stage, whose backward passes are spans."""

    submod: _OnePass

    def backward_one_chunk(self, *arguments: Any, **named: Any) -> None:
        if self.has_backward:
            with span("trainer.backward", device=True, **self.submod.passing.told):
                super().backward_one_chunk(*arguments, **named)
