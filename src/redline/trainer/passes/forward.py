"""A micro-batch through a network, up to where losses begin."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from redline.models.attention.flash import packed_attention
from redline.models.decoder import Attend
from redline.models.files.hf import AnyDecoder
from redline.models.layers.routes import SampledRoutes
from redline.models.layers.rows import selected_rows
from redline.models.lora.per_token import ActiveLora
from redline.models.spec import DecoderSpec
from redline.models.value_head import ValueNetwork
from redline.trainer.batches.micro_batches import MicroBatch
from redline.trainer.batches.staging import Staging, Values
from redline.trainer.loss.logprobs import selected_logprobs
from redline.trainer.parallel.sequence_parallel import SequenceShare


def whole(micro_batch: MicroBatch) -> SequenceShare:
    """The share of a process that works alone."""
    return SequenceShare(len(micro_batch.tokens), micro_batch.predicted_from_M)


ShareOf = Callable[[MicroBatch], SequenceShare]
Recompute = Callable[[AnyDecoder, Iterable[MicroBatch], float, ActiveLora | None], list[Tensor]]
"""`recompute`, or the same through the stages of a pipeline."""


def network_inputs(micro_batch: MicroBatch, share: SequenceShare) -> dict[str, Values]:
    """What a process sends to its device for a pass through the network."""
    routing = micro_batch.routing
    return {
        "tokens": micro_batch.tokens[share.tokens],
        "predicted_from": share.predicted_from,
        "targets": micro_batch.targets[share.trained],
        **({} if routing is None else {"routing": routing[share.tokens]}),
    }


def chosen_logprobs(
    decoder: AnyDecoder,
    micro_batch: MicroBatch,
    share: SequenceShare,
    inputs: Mapping[str, Tensor],
    temperature: float,
    lora: ActiveLora | None = None,
) -> tuple[Tensor, Tensor]:
    """float32[M] each: logprobs of the trained tokens, and the entropies of the distributions they were chosen from."""
    hidden_TE = hidden_states(decoder, micro_batch, share, inputs["tokens"].long(), lora, inputs.get("routing"))
    found = predicted(decoder, hidden_TE, inputs, temperature)
    return share.gather(found[0]), share.gather(found[1])


def hidden_states(
    decoder: AnyDecoder,
    micro_batch: MicroBatch,
    share: SequenceShare,
    given: Tensor,
    lora: ActiveLora | None = None,
    routing: Tensor | None = None,
) -> Tensor:
    """[T, E] of the tokens that are `given`; of a stage, its residual stream from the one of the stage before. `routing` are
    the experts that they went to in the engine, uint8 as `MicroBatch.routing`."""
    attend, positions_T = _attention(decoder, micro_batch, share, given.device)
    if routing is not None:
        assert isinstance(decoder.spec, DecoderSpec)
        assert decoder.spec.experts is not None, "the routing of another network"
        return decoder(given, positions_T, attend, lora, routes=SampledRoutes(routing, decoder.spec.experts.layers))
    adapters = () if lora is None else (lora,)
    return decoder(given, positions_T, attend, *adapters)


def predicted(
    decoder: AnyDecoder, hidden_TE: Tensor, inputs: Mapping[str, Tensor], temperature: float
) -> tuple[Tensor, Tensor]:
    """float32 each: logprobs of the trained tokens that these hidden states predict, and the entropies. Where weights are
    sharded, the head is whole only after the forward pass."""
    from_M, targets_M, weight_VE = inputs["predicted_from"], inputs["targets"].long(), decoder.output_weight
    place_M: Tensor | None = None
    if not hidden_TE.is_cuda:
        # Attempts that go on alike have the same logprobs. A CPU computes them once; a GPU would have to wait to know how many.
        pairs_U, places_M = torch.unique(from_M * len(weight_VE) + targets_M, return_inverse=True)
        if len(pairs_U) < len(from_M):
            from_M, targets_M, place_M = pairs_U // len(weight_VE), pairs_U % len(weight_VE), places_M
    hidden_ME = selected_rows(hidden_TE, from_M)
    found = selected_logprobs(hidden_ME, weight_VE, targets_M, temperature, decoder.logit_cap)
    return found if place_M is None else (found[0][place_M], found[1][place_M])


def chosen_values(network: ValueNetwork, micro_batch: MicroBatch) -> Tensor:
    """float32[M]: the value of the state in which each trained token was chosen, which is all that came before it."""
    device = network.head.weight.device
    share = whole(micro_batch)
    attend, positions_T = _attention(network.trunk, micro_batch, share, device)
    [(_, inputs)] = Staging(device).sent([(micro_batch, network_inputs(micro_batch, share))])
    return network(inputs["tokens"].long(), positions_T, attend, inputs["predicted_from"])


def _attention(
    decoder: AnyDecoder, micro_batch: MicroBatch, share: SequenceShare, device: torch.device
) -> tuple[Attend, Tensor]:
    attend = packed_attention(micro_batch.segments, device)
    return share.attend(attend), attend.positions_T[share.tokens]


@torch.no_grad()
def recompute(
    decoder: AnyDecoder,
    micro_batches: Iterable[MicroBatch],
    temperature: float,
    lora: ActiveLora | None = None,
    share_of: ShareOf = whole,
) -> list[Tensor]:
    """float32[M] for each micro-batch: logprobs of its trained tokens under the decoder as it is now, without gradients."""
    items = ((micro_batch, network_inputs(micro_batch, share_of(micro_batch))) for micro_batch in micro_batches)
    return [
        chosen_logprobs(decoder, micro_batch, share_of(micro_batch), inputs, temperature, lora)[0]
        for micro_batch, inputs in Staging(decoder.output_weight.device).sent(items)
    ]


def by_token(micro_batches: Iterable[MicroBatch], values: Iterable[Tensor], num_tokens: int) -> np.ndarray:
    """float32[T] over the tokens of the `TrainBatch`, from float32[M] of each micro-batch; 0 where nothing is trained.

    Passes without gradients have a larger token budget, hence other micro-batches than the step: this is how they meet."""
    values_T = np.zeros(num_tokens, dtype=np.float32)
    for micro_batch, values_M in zip(micro_batches, values, strict=True):
        values_T[micro_batch.index_M] = values_M.cpu().numpy()
    return values_T
