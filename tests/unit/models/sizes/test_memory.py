"""The formulas against networks that exist: their parameters, and what autograd keeps of a forward pass."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import get_args

import pytest
import torch
from support.model_specs import QWEN_HALF_BILLION
from support.small_models import CONFIGS, random_tokens, write_model
from torch import Tensor, nn

from redline.config.sections.lora import LoraConfig, Projection
from redline.kernels.cpu import attention
from redline.kernels.segments import Segments
from redline.models.attention import padded
from redline.models.attention.packed import PackedAttention
from redline.models.decoder import Decoder
from redline.models.files.hf import AnyDecoder, load_decoder
from redline.models.layer_code import Checkpointing, LayerCode
from redline.models.lora.trainable import add_adapter
from redline.models.sizes.memory import (
    ParameterBytes,
    adapter_parameters,
    counted_bytes,
    layer_bytes,
    num_parameters,
    parameter_bytes,
    token_bytes,
)
from redline.models.spec import DecoderSpec, ExpertsSpec, ModelShape

LENGTH = 4
FAMILIES = ["llama, tied", "llama, all biases", "mistral, own head size", "qwen2, untied", "qwen3, own head size", "qwen3_moe"]


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

    attend = PackedAttention(Segments.independent([LENGTH] * (num_tokens // LENGTH)))  # short: no mask to speak of
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scores", ["written out", "by the kernel", "in C"])
@pytest.mark.parametrize("checkpointing", ["none", "light", "selective", "full"])
def test_a_token_keeps_what_the_formula_says(
    decoders: dict[str, AnyDecoder],
    family: str,
    dtype: torch.dtype,
    scores: str,
    checkpointing: Checkpointing,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(padded, "writes_out", lambda _: scores == "written out")
    if scores != "in C":
        monkeypatch.setattr(attention, "is_there", lambda *_: False)
    decoder = copy.deepcopy(decoders[family]).to(dtype)
    assert isinstance(decoder, Decoder)
    decoder.recompute_in_backward(checkpointing)
    spec = decoder.spec
    found = (bytes_kept(decoder, 192) - bytes_kept(decoder, 64)) / 128
    code = decoder.training_code(dtype)
    if scores == "in C" and not attention.is_there(dtype, spec.head_dim):
        pytest.skip("no such heads")
    written_out = spec.num_heads * LENGTH if scores == "written out" else 0
    each = layer_bytes(spec, 0, dtype, code, scores=written_out, padded=scores != "in C")
    last_norm = (dtype.itemsize if code == "compiled" else 2 * 4) * spec.hidden_size
    nothing_to_add = dtype.itemsize * spec.hidden_size if checkpointing == "full" else 0  # to the first layer's input
    predicted = spec.num_layers * each.kept_with(checkpointing) + last_norm - nothing_to_add
    assert predicted <= found
    assert found == pytest.approx(predicted, rel=0.08)  # one number per norm, rotary tables, short masks


def test_written_out_layers_keep_what_their_backward_pass_names() -> None:
    """The tuple that `fused_layer._forward` returns: two sums, two norms, the heads, attention, gate, up and their product, and
    factors."""
    E, A, C, I, H = 896, 896, 128, 4864, 14  # noqa: E741
    kept = 2 * (E + E + (A + 2 * C) + A + E + E + 3 * I) + 4 * (1 + 1 + H)
    assert layer_bytes(QWEN_HALF_BILLION, 0, torch.bfloat16, "fused").kept == kept
    by_autograd = layer_bytes(QWEN_HALF_BILLION, 0, torch.bfloat16, "kernels")
    assert by_autograd.kept == kept
    assert by_autograd.kept_with("light") == kept - 2 * I
    assert by_autograd.kept_with("selective") == kept - 2 * 3 * I


@pytest.mark.parametrize("code", ["eager", "compiled", "kernels"])
@pytest.mark.parametrize("width", [64, 1024, 2048, 3000, 4096, 16384])
def test_where_some_layers_have_experts_a_token_is_counted_as_in_the_dearer_kind(code: LayerCode, width: int) -> None:
    experts = ExpertsSpec(count=8, per_token=2, intermediate_size=512, normalized=True, layers=(1,))
    mixed = dataclasses.replace(QWEN_HALF_BILLION, intermediate_size=width, num_layers=2, experts=experts)
    plain = dataclasses.replace(mixed, experts=None)
    sparse = dataclasses.replace(mixed, experts=dataclasses.replace(experts, layers=(0, 1)))
    found, *kinds = (layer_bytes(spec, 0, torch.float32, code) for spec in (mixed, plain, sparse))
    assert found.kept == max(each.kept for each in kinds)


@pytest.mark.parametrize("targets", [("q_proj", "v_proj"), ("down_proj",), get_args(Projection)])
def test_an_adapter_has_the_parameters_that_are_added(decoders: dict[str, AnyDecoder], targets: tuple[Projection, ...]) -> None:
    decoder = copy.deepcopy(decoders["mistral, own head size"])
    assert isinstance(decoder, Decoder)
    add_adapter(decoder, LoraConfig(rank=3, targets=targets), torch.float32, seed=0)
    trained = sum(parameter.numel() for parameter in decoder.parameters() if parameter.requires_grad)
    assert adapter_parameters(decoder.spec, 3, targets) == trained


@pytest.mark.parametrize("code", ["eager", "kernels"])
def test_tokens_cost_less_the_more_is_computed_again(code: LayerCode) -> None:
    kinds = get_args(Checkpointing)
    none, light, selective, full = (token_bytes(QWEN_HALF_BILLION, 0, torch.bfloat16, kind, code).training for kind in kinds)
    assert none > 1.2 * light
    assert light > 1.2 * selective
    assert selective > full
    assert token_bytes(QWEN_HALF_BILLION, 0, torch.bfloat16, "full", code).forward < full


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
    frozen = counted_bytes(count, 40, torch.bfloat16, num_shards=4, sharded_weights=True)
    assert (frozen.weights, frozen.masters) == (2 * part, 4 * 10)


def test_frozen_weights_have_no_gradient_and_no_optimizer_state() -> None:
    network = nn.Sequential(nn.Linear(10, 10, bias=False).requires_grad_(False), nn.Linear(10, 1, bias=False))
    assert parameter_bytes(network, torch.bfloat16) == ParameterBytes(weights=220, masters=40, gradients=40, moments=80)
