"""Steps whose norms are part of the products around them, through the network: which gain goes with which product.

The products themselves need a GPU (`test_weights_first.py`, `test_residual.py`); here they are what they stand for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.small_models import CONFIGS, VOCAB_SIZE, write_model
from torch import Tensor

pytest.importorskip("triton")

from redline.engine.native.running import many_rows, weights_first
from redline.kernels.decode import normed, residual
from redline.kernels.decode.residual import Stream
from redline.models.decoder import Decoder, DecoderLayer, FusedAttend
from redline.models.files.hf import load_decoder

ROWS = 5


class Mixed(FusedAttend):
    """Of each layer something else: heads of queries, with a little of the row's key and value."""

    def attend_fused(self, layer: DecoderLayer, heads: Tensor) -> Tensor:
        queries, keys, values = heads.split([layer.spec.num_heads, layer.spec.num_kv_heads, layer.spec.num_kv_heads], dim=1)
        return queries / (1 + layer.index) + keys.mean(1, keepdim=True) - values.mean(1, keepdim=True)


def begun(x_BE: Tensor, gain_E: Tensor) -> Stream:
    return Stream(x_BE, x_BE * gain_E, x_BE.square().sum(-1, keepdim=True))


def add_product(x_BE: Tensor, y_BK: Tensor, weight_EK: Tensor, bias_E: Tensor | None, gain_E: Tensor) -> Stream:
    return begun(x_BE + F.linear(y_BK, weight_EK, bias_E), gain_E)


def normed_product(
    stream: Stream, eps: float, weight_NK: Tensor, bias_N: Tensor | None = None, tile: object = None, *, is_gated: bool = False
) -> Tensor:
    rstd = torch.rsqrt(stream.squares_BP.sum(-1, keepdim=True) / stream.x_BE.shape[1] + eps)
    both_BN = F.linear(stream.scaled_BE * rstd, weight_NK, bias_N)
    if not is_gated and tile is None:
        return both_BN
    gate_BI, up_BI = both_BN.chunk(2, dim=1)
    return F.silu(gate_BI) * up_BI


def add_rms_norm(x_BE: Tensor, delta: None, gain_E: Tensor, eps: float, *, early: bool = False) -> tuple[Tensor, Tensor]:
    return x_BE, F.rms_norm(x_BE, gain_E.shape, gain_E, eps)


@pytest.fixture(params=["qwen2, untied", "llama, attention biases"])
def decoder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Decoder:
    write_model(tmp_path, CONFIGS[request.param])
    decoder = load_decoder(tmp_path)
    assert isinstance(decoder, Decoder)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(residual, "begun", begun)
    return decoder


@torch.inference_mode()
def test_a_step_whose_weights_come_first_is_the_decoders(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in (("normed_product", normed_product), ("add_product", add_product), ("add_rms_norm", add_rms_norm)):
        monkeypatch.setattr(weights_first, name, function)
    tokens_B = torch.randint(0, VOCAB_SIZE, (ROWS,))
    found_BV = weights_first.WeightsFirst(decoder).logits(tokens_B, Mixed())
    torch.testing.assert_close(found_BV, F.linear(expected(decoder, tokens_B), decoder.output_weight), atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_a_step_of_many_rows_is_the_decoders(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual, "add_product", add_product)
    monkeypatch.setattr(normed, "normed_product", normed_product)
    monkeypatch.setattr(normed, "gated_tile_of", lambda *sizes: "a tile")
    monkeypatch.setattr(many_rows, "add_rms_norm", add_rms_norm)
    tokens_B = torch.randint(0, VOCAB_SIZE, (ROWS,))
    found_BE = many_rows.ManyRows(decoder).hidden(tokens_B, Mixed())
    torch.testing.assert_close(found_BE, expected(decoder, tokens_B), atol=1e-4, rtol=1e-4)


def expected(decoder: Decoder, tokens_B: Tensor) -> Tensor:
    """[B, E] by the decoder's own layers."""
    return decoder(tokens_B, torch.zeros_like(tokens_B), Mixed())
