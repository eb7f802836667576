"""The formulas against networks that exist: their parameters, and what autograd keeps of a forward pass."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from small_models import CONFIGS, random_tokens, write_model
from torch import Tensor, nn

from redline.models import packed_attention
from redline.models.decoder import Decoder
from redline.models.hf import AnyDecoder, load_decoder
from redline.models.memory import ParameterBytes, num_parameters, parameter_bytes, token_bytes
from redline.models.packed_attention import PackedAttention, Segments
from redline.models.spec import DecoderSpec, ModelShape

FAMILIES = ["llama, tied", "llama, all biases", "mistral, own head size", "qwen2, untied", "qwen3, own head size"]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, AnyDecoder]:
    def load(family: str) -> AnyDecoder:
        folder: Path = tmp_path_factory.mktemp("model")
        write_model(folder, CONFIGS[family])
        return load_decoder(folder)

    return {family: load(family) for family in FAMILIES}


def bytes_kept(decoder: nn.Module, num_tokens: int) -> int:
    """By autograd after a forward pass, beside the weights; each storage once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in decoder.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    attend = PackedAttention(Segments.independent([4] * (num_tokens // 4)))  # short: no mask to speak of
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_TE = decoder(random_tokens(num_tokens, seed=0), attend.positions_T, attend)
    assert hidden_TE.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_number_of_parameters_is_that_of_the_network(decoders: dict[str, AnyDecoder], family: str) -> None:
    decoder = decoders[family]
    assert isinstance(decoder, Decoder)
    assert num_parameters(decoder.spec) == sum(parameter.numel() for parameter in decoder.parameters())


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_keeps_what_the_formula_says(
    decoders: dict[str, AnyDecoder], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_attention, "MAX_SCORES", 0)  # the fused kernel, as on a GPU
    decoder = decoders[family]
    assert isinstance(decoder, Decoder)
    spec = decoder.spec
    found = (bytes_kept(decoder, 192) - bytes_kept(decoder, 64)) / 128
    each = token_bytes(spec, 0, torch.float32, "none")
    predicted = each.training - each.forward + 4 * spec.hidden_size  # both count the input of the last norm
    # On the CPU a norm is made of several operations, and also keeps what it multiplies with its weight.
    heads = (spec.num_heads + spec.num_kv_heads) * spec.head_dim if spec.qk_norm else 0
    predicted += 4 * (spec.num_layers * (2 * spec.hidden_size + heads) + spec.hidden_size)
    assert found == pytest.approx(predicted, rel=0.08)  # statistics of norms and attention, short masks


def test_tokens_cost_less_the_more_is_computed_again(decoders: dict[str, AnyDecoder]) -> None:
    spec = decoders["llama, tied"].spec
    deep = dataclasses.replace(spec, num_layers=24)
    none, selective, full = (token_bytes(deep, 0, torch.bfloat16, kind).training for kind in ("none", "selective", "full"))
    assert none > 1.5 * selective > 1.5 * full
    assert token_bytes(deep, 0, torch.bfloat16, "full").forward < full


def test_a_network_known_only_by_its_size_is_taken_for_a_gated_one(decoders: dict[str, AnyDecoder]) -> None:
    spec = decoders["mistral, own head size"].spec
    assert isinstance(spec, DecoderSpec)
    deep = dataclasses.replace(spec, num_layers=12)
    unknown = ModelShape(**{field.name: getattr(deep, field.name) for field in dataclasses.fields(ModelShape)})
    guessed, exact = (token_bytes(shape, num_parameters(deep), torch.bfloat16, "none").training for shape in (unknown, deep))
    assert exact <= guessed <= 1.1 * exact


def test_masters_are_counted_only_where_the_weights_are_not_their_own(decoders: dict[str, AnyDecoder]) -> None:
    network = decoders["llama, tied"]
    count = sum(parameter.numel() for parameter in network.parameters())
    narrow, wide = parameter_bytes(network, torch.bfloat16), parameter_bytes(network, torch.float32)
    assert (narrow.weights, narrow.masters, narrow.gradients, narrow.moments) == (2 * count, 4 * count, 4 * count, 8 * count)
    assert (wide.weights, wide.masters, wide.total) == (4 * count, 0, 16 * count)


def test_offloaded_state_and_small_moments_leave_the_device(decoders: dict[str, AnyDecoder]) -> None:
    network = decoders["llama, tied"]
    count = sum(parameter.numel() for parameter in network.parameters())
    assert parameter_bytes(network, torch.bfloat16, offloaded=True).total == 6 * count
    assert parameter_bytes(network, torch.bfloat16, bytes_per_moments=2).moments == 2 * count


def test_processes_that_divide_a_network_hold_a_part_each(decoders: dict[str, AnyDecoder]) -> None:
    network = decoders["llama, tied"]
    count = sum(parameter.numel() for parameter in network.parameters())
    part = -(-count // 4)
    state = parameter_bytes(network, torch.bfloat16, num_shards=4)
    everything = parameter_bytes(network, torch.bfloat16, num_shards=4, sharded_weights=True)
    assert (state.weights, state.masters, state.moments) == (2 * count, 4 * part, 8 * part)
    assert everything.total == (2 + 4 + 4 + 8) * part


def test_frozen_weights_have_no_gradient_and_no_optimizer_state() -> None:
    network = nn.Sequential(nn.Linear(10, 10, bias=False).requires_grad_(False), nn.Linear(10, 1, bias=False))
    assert parameter_bytes(network, torch.bfloat16) == ParameterBytes(weights=220, masters=40, gradients=40, moments=80)
