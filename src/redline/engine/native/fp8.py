"""A second network that samples in 8-bit floating point on a GPU (`engine.quantization: fp8`): every linear layer multiplies by
a copy of its weight in 8 bits, made anew for every version. Norms, biases, adapters, the embedding and the head are the first
network's.

    x, delta ─► norm, in 8 bits ─► qkv ─► attention ─► rows in 8 bits ─► o
             ─► norm, in 8 bits ─► gate, up ─► silu, rows in 8 bits ─► down ─► the next layer

The scale of a row comes after its product: the norm behind it multiplies (`kernels/fp8.py`). On Hopper, products of few rows
ask for their weights before the launches in front of them have ended (`kernels/decode/weights_first.py`).

Logprobs are those of this network's distribution; how far that is from the trainer's is `trainer/mismatch_kl`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from redline.engine.native.quantized import QuantizedCopy, check_shape
from redline.kernels import fp8
from redline.kernels.decode import weights_first
from redline.kernels.decode.few_rows import can_overlap
from redline.models.decoder import AnyAttend, Decoder, DecoderLayer, FusedAttend
from redline.models.files.hf import AnyDecoder
from redline.models.layers.routes import Routes
from redline.models.lora.per_token import ActiveLora
from redline.models.lora.trainable import AdaptedLinear

EARLY_ROWS = 128
"""Beyond these, launches that begin early take more than they save."""
FIRST_ROWS, WIDE_FIRST_ROWS, GATED_FIRST_ROWS = 128, 64, 64
"""Beyond these, products that ask for weights first are left to cuBLAS: all; those of a wide network; gate, up and silu."""


class Fp8Linear(nn.Module):
    """A linear layer in 8 bits, with the adapter that is trained beside it, where there is one."""

    def __init__(self, source: nn.Linear, first_rows: int) -> None:
        """Products of up to `first_rows` ask for weights first, where there are such."""
        super().__init__()
        self._source = (source,)
        """In a tuple: no part of this network."""
        device = source.weight.device
        self.weight = torch.empty(source.weight.shape, dtype=fp8.DTYPE, device=device)
        self.scale, self._one = fp8.make_scales(2, device=device)
        self._first_rows = first_rows if weights_first.serves(self.weight) else 0

    @property
    def source(self) -> nn.Linear:
        return self._source[0]

    def renew(self) -> None:
        """Take the weight as it is now."""
        fp8.write_weight(self.source.weight, self.weight, self.scale)

    def of_normed(self, x_TI: Tensor, scale: Tensor) -> Tensor:
        """The product of rows in 8 bits with one scale, and the bias."""
        return self._product(x_TI, scale, self.source.bias)

    def of_rows(self, x_TI: Tensor) -> Tensor:
        """The product of rows in 8 bits, still to be multiplied by the scale of each row; without the bias."""
        return self._product(x_TI, self._one, None)

    def gated(self, x_TI: Tensor, scale: Tensor, *, early: bool) -> tuple[Tensor, Tensor]:
        """Of gate and up: silu(gate) · up of rows in 8 bits with one scale, in 8 bits, and what each row is to be multiplied
        by."""
        bias_I: Tensor | None = self.source.bias
        if bias_I is None and 0 < len(x_TI) <= min(self._first_rows, GATED_FIRST_ROWS):
            inner_TI = weights_first.product(x_TI, self.weight, is_gated=True, scales=(scale, self.scale))
            return fp8.rows(inner_TI, early=early)
        return fp8.silu_mul(self.of_normed(x_TI, scale), early=early)

    def _product(self, x_TI: Tensor, scale: Tensor, bias_O: Tensor | None) -> Tensor:
        if 0 < len(x_TI) <= self._first_rows:
            return weights_first.product(x_TI, self.weight, bias_O, scales=(scale, self.scale))
        return fp8.product(x_TI, scale, self.weight, self.scale, bias_O, self.source.weight.dtype)

    def forward(self, x_TI: Tensor) -> Tensor:
        rows_TI, scale_T = fp8.rows(x_TI.contiguous())
        y_TO = (self.of_rows(rows_TI) * scale_T[:, None]).to(x_TI.dtype)
        if self.source.bias is not None:
            y_TO += self.source.bias
        return self.source.add(x_TI, y_TO) if isinstance(self.source, AdaptedLinear) else y_TO


class Fp8Decoder(Decoder):
    """The network with layers in 8 bits, on the parameters of the first. For sampling with the kernels of a GPU alone."""

    norm_scales: Tensor
    """[layers, 2]: what rows in 8 bits are to be multiplied by, after each of a layer's two norms."""

    @classmethod
    def of(cls, first: Decoder) -> Fp8Decoder:
        shared = {id(parameter): parameter for parameter in first.parameters()}
        network = cls.__new__(cls)
        network.__dict__.update(copy.deepcopy(first.__dict__, shared))
        network.norm_scales = fp8.make_scales(len(network.layers), 2, device=first.embed.device)
        return network

    def begins_early(self, rows: int) -> bool:
        """Whether own launches of a step begin before the one in front of them has ended."""
        return rows <= EARLY_ROWS and can_overlap(self.embed.device)

    def renew_norms(self) -> None:
        """Take the gains of the norms as they are now."""
        for layer, (attn_scale, mlp_scale) in zip(self.layers, self.norm_scales, strict=True):
            assert isinstance(layer, DecoderLayer)
            fp8.write_norm_scale(layer.attn_norm, attn_scale)
            fp8.write_norm_scale(layer.mlp_norm, mlp_scale)

    def _through_layers(
        self,
        x_TE: Tensor,
        positions_T: Tensor,
        attend: AnyAttend,
        lora: ActiveLora | None,
        only_M: Tensor | None = None,
        routes: Routes | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert isinstance(attend, FusedAttend)
        assert lora is None
        assert routes is None
        if not all(map(_is_plain, self.layers)):
            return super()._through_layers(x_TE, positions_T, attend, lora, only_M, routes)
        spec, delta_TE, delta_scale_T, early = self.spec, None, None, self.begins_early(len(x_TE))
        norm = partial(fp8.add_rms_norm, eps=spec.norm_eps, early=early)
        for layer, (attn_scale, mlp_scale) in zip(self.layers, self.norm_scales, strict=True):
            assert isinstance(layer, DecoderLayer)
            qkv, o, gate_up, down = _four(layer)
            x_TE, normed_TE = norm(x_TE, delta_TE, delta_scale_T, layer.attn_norm, scale=attn_scale)
            heads_TX = qkv.of_normed(normed_TE, attn_scale)
            out_TX = attend.attend_fused(layer, heads_TX.view(len(x_TE), -1, spec.head_dim)).flatten(1)
            if only_M is not None and layer.index == len(self.layers) - 1:
                x_TE, out_TX = x_TE[only_M], out_TX[only_M]
            rows_TX, scale_T = fp8.rows(out_TX, early=early)
            x_TE, normed_TE = norm(x_TE, o.of_rows(rows_TX), scale_T, layer.mlp_norm, scale=mlp_scale)
            inner_TI, delta_scale_T = gate_up.gated(normed_TE, mlp_scale, early=early)
            delta_TE = down.of_rows(inner_TI)
        assert delta_TE is not None
        assert delta_scale_T is not None
        return x_TE, (delta_TE * delta_scale_T[:, None]).to(x_TE.dtype)


class Fp8Copy(QuantizedCopy):
    """The second network. Its weights are those of the first only after `renew`."""

    def __init__(self, decoder: AnyDecoder) -> None:
        """Raises `ModelError` for a network that has none."""
        check_shape(decoder.spec, "fp8")
        assert isinstance(decoder, Decoder)
        self.network: Fp8Decoder = Fp8Decoder.of(decoder)
        super().__init__(decoder)

    def linear(self, source: nn.Linear) -> Fp8Linear:
        is_wide = self.network.spec.hidden_size >= weights_first.WIDE
        return Fp8Linear(source, WIDE_FIRST_ROWS if is_wide else FIRST_ROWS)

    def write(self) -> None:
        self.network.renew_norms()
        for linear in linears_of(self.network):
            linear.renew()

    @property
    def bytes(self) -> int:
        return sum(linear.weight.nbytes for linear in linears_of(self.network))


def linears_of(network: Fp8Decoder) -> Iterator[Fp8Linear]:
    return (linear for layer in network.layers if isinstance(layer, DecoderLayer) for linear in _four(layer))


def _is_plain(layer: nn.Module) -> bool:
    """Whether no adapter stands beside a projection, and nothing comes between a row's scale and the norm behind it."""
    assert isinstance(layer, DecoderLayer)
    sources = _, o, _, down = [linear.source for linear in _four(layer)]
    biases: list[Tensor | None] = [o.bias, down.bias]
    return all(type(linear) is nn.Linear for linear in sources) and biases == [None, None]


def _four(layer: DecoderLayer) -> tuple[Fp8Linear, Fp8Linear, Fp8Linear, Fp8Linear]:
    """q, k, v; o; gate and up; down."""
    modules = layer._modules
    return modules["qkv"], modules["o"], modules["gate_up"], modules["down"]  # type: ignore[return-value]
