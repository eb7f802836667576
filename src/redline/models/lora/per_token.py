"""LoRA beside the network, with another adapter for every token of a batch: y += B A x.

Every linear layer has room for S adapters of rank up to R, in two tensors that never move. One product gives A x for all slots
at once, what belongs to other slots than the token's is set to zero, and a second product adds B times the rest. That takes no
kernel of our own, runs inside a CUDA graph, and makes loading an adapter a copy in place.

A forward pass is handed these adapters (`ActiveLora`); the network itself holds none of them, so the trainer never sees any.
The one adapter that the trainer trains is part of the network (`trainable_lora.py`), and `BARE` leaves even that out.

Letters: S slots, R rank, C = S · R columns, M projections of a fused layer, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.errors import EngineError, ModelError
from redline.models.layers import few_rows
from redline.models.lora.peft import LoraAdapter
from redline.models.spec import DecoderSpec, ModelShape

if TYPE_CHECKING:
    from redline.models.decoder import Decoder


@dataclass(slots=True, frozen=True)
class ActiveLora:
    """The adapters of one forward pass."""

    rooms: Mapping[nn.Linear, _Room]
    others_TC: Tensor
    """bool: the columns of other slots than the token's."""


BARE = ActiveLora({}, torch.empty(0))
"""No adapter at all, not even the one being trained: the policy as it was before training."""


def project(linear: nn.Linear, x_TI: Tensor, lora: ActiveLora | None) -> Tensor:
    """The linear layer, and what each token's adapter adds to it."""
    if lora is BARE:
        return few_rows.linear(x_TI, linear.weight, linear.bias)
    y_TO = few_rows.linear(x_TI, linear.weight, linear.bias) if type(linear) is nn.Linear else linear(x_TI)
    return y_TO if lora is None else lora.rooms[linear].add(x_TI, y_TO, lora.others_TC)


class _Room:
    """The slots of one linear layer. In a fused one every projection has an A of its own, and B is zero across projections."""

    def __init__(self, layer: int, linear: nn.Linear, members: Mapping[str, int], num_slots: int, rank: int) -> None:
        weight, sizes = linear.weight, (len(members), num_slots, rank)
        self.layer = layer
        self.members = members
        """Projection → its rows of the output, in order."""
        self.a_MSRI = torch.zeros((*sizes, linear.in_features), dtype=weight.dtype, device=weight.device)
        self.b_OMSR = torch.zeros((linear.out_features, *sizes), dtype=weight.dtype, device=weight.device)

    def add(self, x_TI: Tensor, y_TO: Tensor, others_TC: Tensor) -> Tensor:
        inner_TMC = F.linear(x_TI, self.a_MSRI.flatten(0, 2)).unflatten(1, (len(self.members), -1))
        # Not a product with zeros: what another adapter makes of this token may be infinite.
        inner_TMC = inner_TMC.masked_fill(others_TC[:, None], 0)
        return y_TO.addmm_(inner_TMC.flatten(1), self.b_OMSR.flatten(1).T)

    def lay_out(self, adapter: LoraAdapter) -> SlotContent | None:
        """What the adapter puts into a slot; None where it leaves the layer alone."""
        parts = [adapter.parts.get((self.layer, name)) for name in self.members]
        if not any(parts):
            return None
        a_MRI, b_OMR = torch.zeros(self.a_MSRI[:, 0].shape), torch.zeros(self.b_OMSR[:, :, 0].shape)
        for m, (part, rows_NMR) in enumerate(zip(parts, b_OMR.split(list(self.members.values())), strict=True)):
            if part is not None:
                a_MRI[m, : len(part.a_RI)] = part.a_RI
                rows_NMR[:, m, : len(part.a_RI)] = part.b_OR
        content = a_MRI.to(self.a_MSRI.dtype), b_OMR.to(self.a_MSRI.dtype)
        # A copy from pinned memory does not wait for what the device is doing.
        return (content[0].pin_memory(), content[1].pin_memory()) if self.a_MSRI.is_cuda else content

    def write(self, slot: int, content: SlotContent | None) -> None:
        for room, fresh in zip((self.a_MSRI[:, slot], self.b_OMSR[:, :, slot]), content or (None, None), strict=True):
            if fresh is None:
                room.zero_()
            else:
                room.copy_(fresh, non_blocking=True)


SlotContent = tuple[Tensor, Tensor]
"""A [M, R, I] and B [O, M, R] of one linear layer on the host, in the network's dtype."""


@dataclass(slots=True, frozen=True)
class PreparedAdapter:
    """An adapter as a slot takes it: copies are all that is left to do."""

    contents: tuple[SlotContent | None, ...]
    """For every linear layer of the network, in order; None where it adds nothing."""


class LoraBank:
    """Room for S adapters beside every linear layer of a network."""

    def __init__(self, decoder: Decoder, num_slots: int, max_rank: int) -> None:
        self.num_slots = num_slots
        self._max_rank = max_rank
        members = projections(decoder.spec)
        self._rooms = {
            linear: _Room(index, linear, members[name], num_slots, max_rank)
            for index, layer in enumerate(decoder.layers)
            for name, linear in layer.named_children()
            if isinstance(linear, nn.Linear)
        }
        self._slot_of_C = torch.arange(num_slots, device=decoder.output_weight.device).repeat_interleave(max_rank)

    def active(self, slots_T: Tensor) -> ActiveLora:
        """For a forward pass over tokens with the adapters of these slots; -1 is none."""
        return ActiveLora(self._rooms, slots_T[:, None] != self._slot_of_C)

    def prepare(self, adapter: LoraAdapter) -> PreparedAdapter:
        """Raises ModelError where it is not for this network, EngineError where its rank is too large."""
        self._check(adapter)
        contents = tuple(room.lay_out(adapter) for room in self._rooms.values())
        # Zero times infinity is NaN: in B it would reach every token of a batch.
        if not all(bool(tensor.isfinite().all()) for content in contents if content for tensor in content):
            raise ModelError("the adapter holds NaN or infinite values", "take an earlier checkpoint of it")
        return PreparedAdapter(contents)

    def _check(self, adapter: LoraAdapter) -> None:
        if adapter.rank > self._max_rank:
            raise EngineError(
                f"an adapter of rank {adapter.rank} exceeds engine.max_lora_rank = {self._max_rank}",
                f"set engine.max_lora_rank={adapter.rank}",
            )
        shapes = {
            (room.layer, name): (rows, linear.in_features)
            for linear, room in self._rooms.items()
            for name, rows in room.members.items()
        }
        for (layer, name), part in adapter.parts.items():
            shape = len(part.b_OR), part.a_RI.shape[1]
            if shapes.get((layer, name)) != shape:
                raise ModelError(
                    f"the adapter is for another model: it changes a {shape[0]} × {shape[1]} {name} in layer {layer}",
                    "use it with the model it was trained on",
                )

    @torch.inference_mode()
    def write(self, slot: int, prepared: PreparedAdapter) -> None:
        """Copy it into the slot, behind whatever the device was already given to do."""
        for room, content in zip(self._rooms.values(), prepared.contents, strict=True):
            room.write(slot, content)


def refuse_experts(shape: ModelShape, key: str, hint: str) -> None:
    """Raise `ModelError` for a mixture of experts: an adapter beside every expert would need grouped products of its own."""
    if isinstance(shape, DecoderSpec) and shape.experts is not None:
        raise ModelError(f"{key}: model family {shape.family!r} has experts, beside which no adapter can stand", hint)


def projections(spec: DecoderSpec) -> dict[str, dict[str, int]]:
    """Our linear layers of a layer → the projections inside, in order, and their rows."""
    q, k, v = spec.qkv_sizes
    return {
        "qkv": {"q_proj": q, "k_proj": k, "v_proj": v},
        "o": {"o_proj": spec.hidden_size},
        "gate_up": {"gate_proj": spec.intermediate_size, "up_proj": spec.intermediate_size},
        "down": {"down_proj": spec.hidden_size},
    }
