"""The layer that is written out by hand against autograd, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from support.kept_sums import Kept
from support.small_models import CONFIGS, VOCAB_SIZE, write_model
from torch import Tensor

pytest.importorskip("triton")

from redline.kernels.segments import NO_PARENT, Segments
from redline.models.attention.flash import FlashPackedAttention, key_runs
from redline.models.attention.packed import PackedAttention
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder
from redline.models.layer_code import Checkpointing, layer_code
from redline.models.layers.fused import fused_layer, fused_layers, keeps_sums
from redline.models.layers.rope import rotary_table, rotate

SEGMENTS = Segments(np.cumsum([0, 9, 4, 6, 7, 1]), np.array([NO_PARENT, 0, 0, NO_PARENT, 3]))
NUM_TOKENS = int(SEGMENTS.offsets[-1])


class ByAutograd:
    """`PackedAttention`, its backward pass by hand: autograd's, asked for when it is wanted."""

    def __init__(self, segments: Segments) -> None:
        self._attend = PackedAttention(segments)

    def forward(self, *heads: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self._attend(0, *heads), ()

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, kept: object, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        heads = [part.detach().clone().requires_grad_() for part in (q, k, v)]
        with torch.enable_grad():
            grad_q, grad_k, grad_v = torch.autograd.grad(self._attend(0, *heads), heads, grad)
        cos, sin = rotary
        return torch.cat([rotate(grad_q, cos, -sin), rotate(grad_k, cos, -sin), grad_v], dim=1)


@pytest.fixture(params=["llama, tied", "qwen2, untied"])
def decoder(request: pytest.FixtureRequest, tmp_path: Path, interpreter: None) -> Decoder:
    write_model(tmp_path, CONFIGS[request.param], seed=3, std=0.2)
    return load_decoder(tmp_path)  # type: ignore[return-value]


@pytest.mark.parametrize("has_delta", [True, False])
def test_values_and_gradients_are_those_of_autograd(decoder: Decoder, has_delta: bool) -> None:
    torch.manual_seed(0)
    layer, E = decoder.layers[0], decoder.spec.hidden_size
    rotary = rotary_table(decoder.rotary_frequencies, 1.0, torch.from_numpy(SEGMENTS.positions()), torch.float32)
    x, delta, *incoming = torch.randn(4, NUM_TOKENS, E)
    results = []
    for by_hand in (True, False):
        inputs = [part.clone().requires_grad_() for part in ((x, delta) if has_delta else (x,))]
        layer.zero_grad()
        if by_hand:
            outputs = fused_layer(layer, inputs[0], inputs[1] if has_delta else None, rotary, ByAutograd(SEGMENTS))  # type: ignore[arg-type]
        else:
            outputs = layer(inputs[0], inputs[1] if has_delta else None, rotary, PackedAttention(SEGMENTS), None)
        torch.autograd.backward(outputs, incoming)
        found = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
        results.append((outputs, [part.grad for part in inputs], found))
    (ours, our_inputs, our_weights), (theirs, their_inputs, their_weights) = results
    for one, other in zip([*ours, *our_inputs], [*theirs, *their_inputs], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert our_weights.keys() == their_weights.keys()
    for name, gradient in our_weights.items():
        torch.testing.assert_close(
            gradient, their_weights[name], rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("checkpointing", ["none", "light"])
def test_layers_that_are_one_node_have_the_gradients_of_all(decoder: Decoder, checkpointing: Checkpointing) -> None:
    torch.manual_seed(0)
    decoder.recompute_in_backward(checkpointing)
    rotary = rotary_table(decoder.rotary_frequencies, 1.0, torch.from_numpy(SEGMENTS.positions()), torch.float32)
    start, *incoming = torch.randn(3, NUM_TOKENS, decoder.spec.hidden_size)

    x = start.clone().requires_grad_()
    stream, delta = x, None
    for layer in decoder.layers:
        stream, delta = layer(stream, delta, rotary, PackedAttention(SEGMENTS), None)
    torch.autograd.backward([stream, delta], [2 * part for part in incoming])
    expected = {name: parameter.grad for name, parameter in decoder.layers.named_parameters()}

    kept = {name: Kept(parameter) for name, parameter in decoder.layers.named_parameters()}
    assert all(keeps_sums(layer) for layer in decoder.layers)  # type: ignore[arg-type]
    total = torch.zeros_like(start)
    for _ in range(2):  # two micro-batches
        again = start.clone().requires_grad_()
        torch.autograd.backward(fused_layers(decoder.layers, again, rotary, ByAutograd(SEGMENTS)), incoming)  # type: ignore[arg-type]
        total += again.grad
    torch.testing.assert_close(total, x.grad, rtol=1e-4, atol=1e-4)
    for name, found in kept.items():
        assert found.num_gradients == 2
        torch.testing.assert_close(found.total, expected[name], rtol=1e-3, atol=1e-3)


def test_layers_with_more_than_that_go_the_other_way(tmp_path: Path) -> None:
    for family, expected in {"llama, tied": "fused", "qwen2, untied": "fused", "qwen3, biases": "kernels"}.items():
        write_model(tmp_path / family, CONFIGS[family], seed=3)
        decoder = load_decoder(tmp_path / family)
        assert isinstance(decoder, Decoder)
        assert all(layer.is_whole for layer in decoder.layers)  # type: ignore[union-attr]
        assert layer_code(decoder.spec, torch.bfloat16, "none", kernels=True, whole=True) == expected, family


def test_a_segments_keys_are_its_parents_and_then_its_own() -> None:
    offsets, places = key_runs(SEGMENTS)
    runs = [places[start:end].tolist() for start, end in pairwise(offsets)]
    first, second = list(range(9)), list(range(19, 26))
    assert runs == [first, [*first, *range(9, 13)], [*first, *range(13, 19)], second, [*second, 26]]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama, tied", "qwen2, untied", "qwen3, biases"])
def test_on_a_gpu_gradients_are_as_close_to_float32_as_eager_ones(family: str, tmp_path: Path) -> None:
    write_model(tmp_path, CONFIGS[family], seed=3, std=0.1)
    device = torch.device("cuda")
    tokens = torch.randint(0, VOCAB_SIZE, (NUM_TOKENS,), device=device)

    def gradients(dtype: torch.dtype, attend: object) -> Tensor:
        network = load_decoder(tmp_path, device)
        for parameter in network.parameters():
            parameter.data = parameter.data.to(dtype)
        hidden = network(tokens, torch.from_numpy(SEGMENTS.positions()).to(device), attend)
        (hidden.float() * torch.linspace(-1, 1, hidden.shape[1], device=device)).sum().backward()
        return torch.cat([p.grad.float().flatten() for p in network.parameters() if p.grad is not None])

    exact = gradients(torch.float32, PackedAttention(SEGMENTS, device))
    fused = gradients(torch.bfloat16, FlashPackedAttention(SEGMENTS, device))
    assert float((fused - exact).norm() / exact.norm()) < 0.05
