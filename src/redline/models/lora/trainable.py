"""The adapter that the trainer trains, inside the network: y = W x + scale · B A x, with W frozen.

The policy is the network with its adapter, for both stages. The engine samples from it as from any policy, out of the
storage that the optimizer overwrites, and no request names an adapter. A forward pass that is handed `lora.BARE` leaves the
adapter out, and so gives the policy before training.

A fused layer has an A and a B for each targeted projection, as PEFT has, laid one below the other: one product gives A x of
all of them, and every B adds to its own rows of the output.

Letters: R rank, N targeted projections of a layer, C = N · R, I inputs, O outputs, P outputs of targeted projections.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.config.sections.lora import LoraConfig
from redline.errors import ModelError
from redline.models.copies import second_network
from redline.models.decoder import Decoder
from redline.models.files.hf import AnyDecoder
from redline.models.lora.peft import tensor_name, write_adapter
from redline.models.lora.per_token import projections, refuse_experts
from redline.models.spec import DENSE_FAMILIES


def add_adapter(decoder: AnyDecoder, config: LoraConfig, dtype: torch.dtype, seed: int) -> None:
    """Freeze the network in `dtype` and give it a fresh float32 adapter, which the optimizer takes from there: A is drawn as
    PEFT draws it, B is zero, so that the policy is unchanged."""
    if not isinstance(decoder, Decoder):
        raise ModelError(
            f"trainer.lora: model family {decoder.spec.family!r} takes no adapter",
            f"set trainer.lora.rank=0, or train a model of one of: {', '.join(DENSE_FAMILIES)}",
        )
    refuse_experts(decoder.spec, "trainer.lora", "set trainer.lora.rank=0, which trains all weights")
    assert config.rank, "rank 0 is no adapter"
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for layer in decoder.layers:
        for name, members in projections(decoder.spec).items():
            rows = _targeted_rows(members, config)
            if rows:
                setattr(layer, name, AdaptedLinear(layer.get_submodule(name), rows, config, generator))


def _targeted_rows(members: Mapping[str, int], config: LoraConfig) -> dict[str, slice]:
    """Targeted projection → its rows of the fused layer's output."""
    rows: dict[str, slice] = {}
    start = 0
    for name, count in members.items():
        if name in config.targets:
            rows[name] = slice(start, start + count)
        start += count
    return rows


def has_adapter(decoder: AnyDecoder) -> bool:
    return any(isinstance(module, AdaptedLinear) for module in decoder.modules())


def without_adapter(decoder: AnyDecoder) -> AnyDecoder:
    """A second network on the same frozen weights, with no adapter or one of its own to come."""
    bare = second_network(decoder)
    for layer in bare.layers if isinstance(bare, Decoder) else ():
        for name, linear in layer.named_children():
            if isinstance(linear, AdaptedLinear):
                plain = nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
                plain.weight, plain.bias = linear.weight, linear.bias
                setattr(layer, name, plain)
    return bare


class AdaptedLinear(nn.Linear):
    """A linear layer and the adapter beside it. Weight and bias are the given layer's own."""

    def __init__(self, linear: nn.Module, rows: Mapping[str, slice], config: LoraConfig, generator: torch.Generator) -> None:
        assert isinstance(linear, nn.Linear)
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.rows = dict(rows)
        """Projection → its rows of the output, in order."""
        self.scale = config.scale
        # A network without weights is divided before it is filled: its adapter is drawn whole on the host, and divided there.
        device = torch.device("cpu") if linear.weight.is_meta else linear.weight.device
        a_CI = torch.empty(len(rows) * config.rank, linear.in_features)
        nn.init.kaiming_uniform_(a_CI, a=math.sqrt(5), generator=generator)
        self.lora_a = nn.Parameter(a_CI.to(device))
        self.lora_b = nn.Parameter(torch.zeros(sum(r.stop - r.start for r in rows.values()), config.rank, device=device))

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.add(x_TI, super().forward(x_TI))

    def add(self, x_TI: Tensor, y_TO: Tensor) -> Tensor:
        """The linear layer's `y`, which is used up, and what the adapter adds to it."""
        inner_TC = F.linear(x_TI, self.lora_a)
        return _AddLowRank.apply(y_TO, inner_TC, self.lora_b, tuple(self.rows.values()), self.scale)

    def parts(self, a_CI: Tensor, b_PR: Tensor) -> Iterator[tuple[str, slice, Tensor, Tensor]]:
        """Projection, its rows of the output, its A [R, I] and its B [rows, R]: views of the stacked ones."""
        sizes = [rows.stop - rows.start for rows in self.rows.values()]
        for (name, rows), a_RI, b in zip(self.rows.items(), a_CI.chunk(len(sizes)), b_PR.split(sizes), strict=True):
            yield name, rows, a_RI, b


class _AddLowRank(torch.autograd.Function):
    """y[:, rows] += scale · inner Bᵀ for every projection, in place: the sum needs no second tensor of the output's size, and
    the gradient of y passes through untouched."""

    @staticmethod
    def forward(ctx: Any, y_TO: Tensor, inner_TC: Tensor, b_PR: Tensor, rows: tuple[slice, ...], scale: float) -> Tensor:
        for own, inner_TR, b in _pieces(inner_TC, b_PR, rows):
            y_TO[:, own].addmm_(inner_TR, b.T, alpha=scale)
        ctx.mark_dirty(y_TO)
        ctx.save_for_backward(inner_TC, b_PR)
        ctx.rows, ctx.scale = rows, scale
        return y_TO

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        (grad_TO,) = grads
        inner_TC, b_PR = ctx.saved_tensors
        grad_inner, grad_b = [], []
        for own, inner_TR, b in _pieces(inner_TC, b_PR, ctx.rows):
            grad_inner.append(grad_TO[:, own] @ b)
            grad_b.append(grad_TO[:, own].T @ inner_TR)
        return grad_TO, torch.cat(grad_inner, dim=1).mul_(ctx.scale), torch.cat(grad_b).mul_(ctx.scale), None, None


def _pieces(inner_TC: Tensor, b_PR: Tensor, rows: tuple[slice, ...]) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each projection: its rows of the output, its A x, its B."""
    return zip(rows, inner_TC.chunk(len(rows), dim=1), b_PR.split([r.stop - r.start for r in rows]), strict=True)


# ── out ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def adapter_tensors(decoder: Decoder, masters: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The adapter by PEFT's names, for a folder or another engine's `load_adapter` (with the same alpha); views. `masters`
    replaces the network's own values."""
    tensors: dict[str, Tensor] = {}
    for layer, _, linear, a_CI, b_PR in _adapted(decoder, masters):
        for name, _, a_RI, b in linear.parts(a_CI, b_PR):
            tensors |= {tensor_name(layer, name, "A"): a_RI, tensor_name(layer, name, "B"): b}
    return tensors


def save_adapter(
    folder: Path, decoder: Decoder, config: LoraConfig, base: str, masters: Mapping[str, Tensor] | None = None
) -> None:
    """Write a PEFT folder in float32; `base` is where the frozen weights came from."""
    tensors = adapter_tensors(decoder, masters)
    write_adapter(
        folder,
        tensors,
        rank=config.rank,
        alpha=config.alpha,
        use_rslora=config.rslora,
        targets=config.targets,
        base=base,
    )


@torch.no_grad()
def merged_tensors(decoder: Decoder, masters: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """What `save_folder` takes: every weight by our name, W + scale · B A in float32 where there is an adapter."""
    tensors = {name: parameter.detach() for name, parameter in decoder.named_parameters() if not is_adapter(name)}
    for _, prefix, linear, a_CI, b_PR in _adapted(decoder, masters):
        merged_OI = tensors[f"{prefix}.weight"].to(torch.float32, copy=True)
        for _, rows, a_RI, b in linear.parts(a_CI.float(), b_PR.float()):
            merged_OI[rows].addmm_(b, a_RI, alpha=linear.scale)
        tensors[f"{prefix}.weight"] = merged_OI
    return tensors


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to the adapter."""
    return name.endswith((".lora_a", ".lora_b"))


def _adapted(
    decoder: Decoder, masters: Mapping[str, Tensor] | None
) -> Iterator[tuple[int, str, AdaptedLinear, Tensor, Tensor]]:
    """Every adapted layer: the number of its decoder layer, its name, itself, its A and its B."""
    values = masters or dict(decoder.named_parameters())
    for index, layer in enumerate(decoder.layers):
        for name, linear in layer.named_children():
            if isinstance(linear, AdaptedLinear):
                prefix = f"layers.{index}.{name}"
                yield index, prefix, linear, values[f"{prefix}.lora_a"].detach(), values[f"{prefix}.lora_b"].detach()
