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
from torch import Tensor

from redline.errors import ModelError
from redline.models.decoder import Decoder, DecoderLayer
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
    return _resized(spec, lambda size: size // world)


def _resized(spec: DecoderSpec, size_of: Callable[[int], int]) -> DecoderSpec:
    """The spec with other sizes of what is divided."""
    experts = spec.experts and replace(spec.experts, intermediate_size=size_of(spec.experts.intermediate_size))
    return replace(
        spec,
        num_heads=size_of(spec.num_heads),
        num_kv_heads=size_of(spec.num_kv_heads),
        intermediate_size=size_of(spec.intermediate_size),
        experts=experts,
    )


@dataclass(slots=True, frozen=True)
class Cut:
    """How one tensor of the network is divided."""

    dim: int | None = None
    """The dimension that is divided; None where no rank has a part only."""
    sizes: tuple[int, ...] = ()
    """Lengths of what lies side by side along it, each of which is divided by itself; empty: it is one."""
    first_alone: bool = False
    """Whether rank 0 has all of it and the others have zeros: a bias of outputs that are summed over the ranks."""

    def part(self, whole: Tensor, shard: Shard) -> Tensor:
        """What one rank holds."""
        if self.first_alone and shard.rank:
            return torch.zeros_like(whole)
        if self.dim is None:
            return whole
        sizes = self.sizes or (whole.shape[self.dim],)
        return torch.cat([shard.of(side, self.dim) for side in whole.split(sizes, self.dim)], self.dim)


def cut_of(name: str, spec: DecoderSpec) -> Cut:
    """How a parameter is divided, by its name in the whole decoder, whose spec this is."""
    kind = name.rpartition("layers.")[2].partition(".")[2]
    inner = spec.intermediate_size
    if kind in ("qkv.weight", "qkv.bias"):
        return Cut(0, spec.qkv_sizes)
    if kind in ("gate_up.weight", "gate_up.bias"):
        return Cut(0, (inner, inner))
    if kind in ("o.weight", "down.weight", "experts.down"):
        return Cut(1)
    if kind in ("o.bias", "down.bias"):
        return Cut(first_alone=True)
    if kind == "experts.gate_up":
        assert spec.experts is not None
        return Cut(0, (spec.experts.intermediate_size,) * (2 * spec.experts.count))
    return Cut()


def cuts_of(part: Decoder, world: int) -> dict[str, Cut]:
    """How each parameter is divided, given the part of one rank."""
    whole = _resized(part.spec, lambda size: size * world)
    return {name: cut_of(name, whole) for name, _ in part.named_parameters()}


@torch.no_grad()
def shard_decoder(whole: Decoder, shard: Shard, device: torch.device | str, reduce: Callable[[Tensor], Tensor]) -> Decoder:
    """This rank's part. `reduce` replaces a tensor by its sum over the ranks, in place, and returns it."""
    with torch.device("meta"):
        part = Decoder(shard_spec(whole.spec, shard.world), torch.empty(0), whole.rotary_factor)
    part = part.to(whole.output_weight.dtype).to_empty(device=device)
    part.rotary_frequencies = whole.rotary_frequencies.to(device)
    part.requires_grad_(False)
    theirs = dict(whole.named_parameters())
    for name, mine in part.named_parameters():
        mine.copy_(cut_of(name, whole.spec).part(theirs[name], shard))
    for layer in part.layers:
        assert isinstance(layer, DecoderLayer)
        layer.reduce = reduce
    return part
