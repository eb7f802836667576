"""Micro-batches through the stages of a pipeline, by torch's own `torch.distributed.pipelining`.

    stage 0    F0 F1       B0 F2 B1 F3 B2    B3        F forward, B backward, of micro-batches 0 … 3
    stage 1       F0 B0 F1 B1 F2 B2 F3 B3

1F1B: a stage keeps the activations of as many micro-batches as there are stages behind it, and itself. GPipe would keep all of
them and wait as long. A pass without gradients runs by the same schedule, with nothing to do for B: so a stage never has more
messages than of the micro-batches under way.

Every process has the whole batch and plans it alike, so that each knows a micro-batch's segments and length by its number: the
residual stream, and its gradient, are all that is sent. torch would rather have every message of a pass in one shape, and make
room for all of them before the first, so that one long sequence would cost its length times the micro-batches. Here the shape
that torch is told has no tokens. A stage makes room for a message when it asks for it, as long as the micro-batch is, and gives
the room back once it is used.

A stage that runs out of memory computes nothing more, and sends zeros instead until the pass is over: which messages there are,
and how long, depends on the plan alone, so that the others come to its end, too. Then it raises, and all can begin again.

The time in a pass that this stage does not compute in is `wait.for_stages`: the bubble, and the transfers. Importing this file
takes torch's pipelining along, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from redline.errors import NoRoomError
from redline.models.files.hf import AnyDecoder
from redline.models.lora.per_token import ActiveLora
from redline.models.stage import Stage
from redline.telemetry import span
from redline.trainer.batches.micro_batches import MicroBatch
from redline.trainer.batches.staging import Staging
from redline.trainer.parallel.passing import Found, Passing
from redline.trainer.passes.forward import hidden_states, network_inputs, predicted, whole

SMALLER_MESSAGES = "continue with --resume and a smaller trainer.max_tokens_per_micro_batch"


class Pipeline:
    """The stages of one pipeline, seen from the process of one. Every process must begin the same passes in the same order."""

    def __init__(self, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup) -> None:
        self._device, self._dtype, self._group = device, dtype, group

    def train(self, passing: Passing) -> None:
        """Forward and backward of every micro-batch: the gradients of this stage are with its parameters. Blocks until this
        stage has done its part. Raises `torch.OutOfMemoryError`, at the end of the pass, where memory ran out here."""
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
        self._run(Passing(network, items, len(parts), temperature, keep, doing, lora=lora), trains=False)
        return found if network.is_last else [torch.zeros(len(part.targets)) for part in parts]

    def _run(self, passing: Passing, *, trains: bool) -> None:
        if not passing.count:
            return
        network, count = passing.network, passing.count
        stage = self._stage(passing, trains)
        schedule = Schedule1F1B(stage, count, _loss if trains else None, scale_grads=False)
        numbers = torch.arange(count)  # torch divides a batch into micro-batches; ours is their numbers
        first = (numbers,) if network.is_first else ()
        target = numbers if network.is_last and trains else None
        with span("wait.for_stages"):
            try:
                schedule.step(*first, number=numbers, target=target, return_outputs=False)
            except torch.OutOfMemoryError as error:
                raise NoRoomError(
                    "out of memory for a message between two stages, for which the other one waits", SMALLER_MESSAGES
                ) from error
            except RuntimeError as error:
                if error.__cause__ is None:
                    raise
                raise error.__cause__ from None  # what a stage raised; torch wraps it
        if stage.ran_out is not None:
            raise torch.OutOfMemoryError(stage.ran_out)

    def _stage(self, passing: Passing, trains: bool) -> _OwnStage:
        network = passing.network
        with torch.device("meta"):
            number = torch.empty(1, dtype=torch.int64)
            stream = torch.empty(0, network.spec.hidden_size, dtype=self._dtype, requires_grad=trains)
            loss = torch.empty((), requires_grad=trains)
        return _OwnStage(
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
        self._taken: tuple[MicroBatch, dict[str, Tensor]] | None = None

    def take(self) -> int:
        """Go to the next micro-batch, and return its tokens. Called once before each `forward`."""
        self._taken = next(self.passing.items)
        return len(self._taken[0].tokens)

    def forward(self, given: Tensor, number: Tensor) -> Tensor:
        """`given` is the residual stream of the stage before, and nothing of use on the first."""
        passing, network = self.passing, self.network
        assert self._taken is not None
        micro_batch, inputs = self._taken
        self._taken = None
        with span(passing.doing, device=True, **passing.told):
            own = inputs["tokens"].long() if network.is_first else given
            stream_TE = hidden_states(network, micro_batch, whole(micro_batch), own, passing.lora, inputs.get("routing"))
            if not network.is_last:
                return stream_TE
            return passing.finish(micro_batch, predicted(network, stream_TE, inputs, passing.temperature))


class _OwnStage(PipelineStage):
    """torch's stage, with room for the messages of one micro-batch at a time, and spans around its backward passes."""

    submod: _OnePass

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._runtime_validate = False  # against the shape without tokens
        self._tokens: dict[int, int] = {}
        """Micro-batch → its length."""
        self.ran_out: str | None = None
        """What torch said when memory ran out; None where it did not."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._tokens[fwd_chunk_id] = tokens = self.submod.take()
        for info in self.args_recv_info[fwd_chunk_id]:
            if info.buffer is not None:
                info.buffer = info.buffer.new_empty(tokens, *info.buffer.shape[1:])
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        forward = super().forward_one_chunk
        done = self._unless_out_of_memory(lambda: forward(fwd_chunk_id, *arguments, **named))
        _give_room_back(self.args_recv_info[fwd_chunk_id])  # what the backward pass needs of it, it has
        if done:
            return done[0]
        output = torch.zeros((), device=self.device) if self.is_last else self._zeros(fwd_chunk_id, self._stage_meta.outputs)
        self.fwd_cache[fwd_chunk_id] = (output,), []
        return output

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        sends = super().get_fwd_send_ops(fwd_chunk_id)
        if not self.has_backward:
            del self.fwd_cache[fwd_chunk_id]  # kept for a backward pass
        return sends

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if self.has_backward and not self.is_last:
            (sent,), _ = self.fwd_cache[bwd_chunk_id]
            for info in self.grad_recv_info[bwd_chunk_id]:
                info.buffer = torch.empty_like(sent, requires_grad=False)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> None:
        if not self.has_backward:
            return
        backward = super().backward_one_chunk
        with span("trainer.backward", device=True, **self.submod.passing.told):
            done = self._unless_out_of_memory(lambda: backward(bwd_chunk_id, *arguments, **named))
        _give_room_back(self.grad_recv_info[bwd_chunk_id])
        if not done:
            self.fwd_cache.pop(bwd_chunk_id, None)
            self.bwd_cache[bwd_chunk_id] = () if self.is_first else (self._zeros(bwd_chunk_id, self._stage_meta.inputs),)

    def _unless_out_of_memory(self, compute: Callable[[], Any]) -> tuple[Any] | None:
        """What `compute` returns; from the time on when memory ran out, None. The error, which keeps alive the tensors of all
        frames that it passed, is gone by then."""
        if self.ran_out is not None:
            return None
        try:
            return (compute(),)
        except RuntimeError as error:
            found = error.__cause__ or error  # torch wraps what a stage raises
            if not isinstance(found, torch.OutOfMemoryError):
                raise
            self.ran_out = str(found)
            return None

    def _zeros(self, index: int, metas: Any) -> Tensor:
        """What is sent of a micro-batch instead of the stream, or of its gradient."""
        return torch.zeros(self._tokens[index], *metas[0].shape[1:], dtype=metas[0].dtype, device=self.device)


def _give_room_back(infos: Iterable[Any]) -> None:
    for info in infos:
        if info.buffer is not None:
            info.buffer = info.buffer.detach()[:0].clone()
