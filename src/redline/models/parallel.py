"""One decoder over several processes: each holds some of the heads and some of the MLP's inner columns.

    x ──► qkv of my heads ──► attention ──► o (my columns) ──► sum over ranks ──► x
    x ──► gate, up of my columns ─────────► down (my columns) ─► sum over ranks ─► x

A mixture of experts is divided in the same way inside each expert: every rank has all experts, some of their inner columns, and
the whole router, so that all ranks send a token to the same experts.

Embeddings, norms and the output head are whole on every rank, so every rank ends up with the same logits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from redline.errors import ModelError
from redline.models.decoder import Decoder, DecoderLayer
from redline.models.layers.experts import Experts
from redline.models.spec import DecoderSpec


@dataclass(slots=True, frozen=True)
class Shard:
    """Part `rank` of `world`."""

    rank: int
    world: int

    def of(self, tensor: Tensor, dim: int) -> Tensor:
        return tensor.chunk(self.world, dim)[self.rank]


def shard_spec(spec: DecoderSpec, world: int) -> DecoderSpec:
    """What one rank computes."""
    sizes = {
        "attention heads": spec.num_heads,
        "key/value heads": spec.num_kv_heads,
        "inner columns of the MLP": spec.intermediate_size,
        **({"inner columns of an expert": spec.experts.intermediate_size} if spec.experts else {}),
    }
    for what, size in sizes.items():
        if size % world:
            raise ModelError(
                f"{size} {what} cannot be divided among {world} ranks", "choose engine.tensor_parallel_size to divide it"
            )
    return replace(
        spec,
        num_heads=spec.num_heads // world,
        num_kv_heads=spec.num_kv_heads // world,
        intermediate_size=spec.intermediate_size // world,
        experts=spec.experts and replace(spec.experts, intermediate_size=spec.experts.intermediate_size // world),
    )


@torch.no_grad()
def shard_decoder(whole: Decoder, shard: Shard, device: torch.device | str, reduce: Callable[[Tensor], Tensor]) -> Decoder:
    """This rank's part. `reduce` replaces a tensor by its sum over the ranks, in place, and returns it."""
    with torch.device("meta"):
        part = Decoder(shard_spec(whole.spec, shard.world), torch.empty(0), whole.rotary_factor)
    part = part.to(whole.output_weight.dtype).to_empty(device=device)
    part.rotary_frequencies = whole.rotary_frequencies.to(device)
    part.requires_grad_(False)
    part.embed.copy_(whole.embed)
    part.norm.copy_(whole.norm)
    if part.lm_head is not None and whole.lm_head is not None:
        part.lm_head.copy_(whole.lm_head)
    for mine, theirs in zip(part.layers, whole.layers, strict=True):
        assert isinstance(mine, DecoderLayer)
        assert isinstance(theirs, DecoderLayer)
        _shard_layer(mine, theirs, shard)
        mine.reduce = reduce
    return part


def _shard_layer(mine: DecoderLayer, theirs: DecoderLayer, shard: Shard) -> None:
    for name in ("attn_norm", "mlp_norm", "q_norm", "k_norm"):
        if getattr(mine, name) is not None:
            getattr(mine, name).copy_(getattr(theirs, name))
    _split_rows(mine.qkv, theirs.qkv, theirs.spec.qkv_sizes, shard)
    _split_columns(mine.o, theirs.o, shard)
    if mine.experts is not None and theirs.experts is not None:
        _split_experts(mine.experts, theirs.experts, shard)
        return
    _split_rows(mine.gate_up, theirs.gate_up, (theirs.spec.intermediate_size,) * 2, shard)
    _split_columns(mine.down, theirs.down, shard)


def _split_experts(mine: Experts, theirs: Experts, shard: Shard) -> None:
    mine.router.copy_(theirs.router)
    gates_and_ups = theirs.gate_up.unflatten(0, (2 * theirs.spec.count, -1))
    mine.gate_up.copy_(shard.of(gates_and_ups, 1).flatten(0, 1))
    mine.down.copy_(shard.of(theirs.down, 1))


def _split_rows(mine: nn.Linear, theirs: nn.Linear, sizes: tuple[int, ...], shard: Shard) -> None:
    """Copy my part of the outputs of each projection that is fused there."""
    mine.weight.copy_(torch.cat([shard.of(rows, 0) for rows in theirs.weight.split(sizes)]))
    if theirs.bias is not None:
        mine.bias.copy_(torch.cat([shard.of(rows, 0) for rows in theirs.bias.split(sizes)]))


def _split_columns(mine: nn.Linear, theirs: nn.Linear, shard: Shard) -> None:
    """My part of the inputs. The outputs are summed over ranks, so one rank alone adds the bias."""
    mine.weight.copy_(shard.of(theirs.weight, 1))
    if theirs.bias is not None:
        mine.bias.copy_(theirs.bias if shard.rank == 0 else torch.zeros_like(theirs.bias))
