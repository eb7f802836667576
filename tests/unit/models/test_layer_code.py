"""Who runs a layer: the function, and the decoder and the planner that both ask it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.model_specs import QWEN_HALF_BILLION
from support.small_models import CONFIGS, write_model

from redline.config.sections.lora import LoraConfig
from redline.models import decoder as decoder_module
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder
from redline.models.layer_code import Checkpointing, layer_code
from redline.models.lora.trainable import add_adapter
from redline.models.parallel import Shard, shard_decoder
from redline.models.spec import ExpertsSpec, ModelShape
from redline.models.stage import cut_stage

SOME = ExpertsSpec(4, 2, 64, True, (0, 1))
ODD_EXPERTS = replace(QWEN_HALF_BILLION, experts=replace(SOME, intermediate_size=65))
ODD_MLPS = replace(QWEN_HALF_BILLION, intermediate_size=65, experts=SOME)
NO_MLPS = replace(QWEN_HALF_BILLION, intermediate_size=65, num_layers=2, experts=SOME)
OTHER_NETWORK = ModelShape("bloom", 100, 64, 2, 4, 4, 16, 128)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, "fused"),
        ({"kernels": False}, "eager"),
        ({"kernels": False, "compiled": True}, "compiled"),
        ({"kernels": False, "compiled": True, "dtype": torch.float32}, "compiled"),
        ({"kernels": False, "compiled": True, "dtype": torch.float32, "shape": OTHER_NETWORK}, "eager"),
        ({"kernels": False, "dtype": torch.float32}, "eager"),
        ({"checkpointing": "light"}, "fused"),
        ({"checkpointing": "selective"}, "kernels"),
        ({"checkpointing": "full"}, "fused"),
        ({"whole": False}, "kernels"),
        ({"dtype": torch.float32}, "kernels"),
        ({"shape": OTHER_NETWORK}, "eager"),
        ({"shape": replace(QWEN_HALF_BILLION, experts=ExpertsSpec(4, 2, 64, True, (0, 1)))}, "kernels"),
        ({"kernels": False, "compiled": True, "dtype": torch.float32, "shape": ODD_EXPERTS}, "eager"),
        ({"kernels": False, "compiled": True, "dtype": torch.float32, "shape": ODD_MLPS}, "eager"),
        ({"kernels": False, "compiled": True, "dtype": torch.float32, "shape": NO_MLPS}, "compiled"),
    ],
)
def test_who_runs_the_layers_follows_from_the_setting(change: dict[str, object], code: str) -> None:
    asked = {
        "shape": QWEN_HALF_BILLION,
        "dtype": torch.bfloat16,
        "checkpointing": "none",
        "kernels": True,
        "whole": True,
    } | change
    assert layer_code(**asked) == code  # type: ignore[arg-type]


@pytest.fixture
def decoder(tmp_path: Path) -> Decoder:
    write_model(tmp_path, CONFIGS["qwen2, untied"])
    found = load_decoder(tmp_path)
    assert isinstance(found, Decoder)
    return found


@pytest.fixture
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU; nothing is computed here."""
    monkeypatch.setattr(decoder_module, "kernels_serve", lambda _: True)


@pytest.mark.usefixtures("with_kernels")
@pytest.mark.parametrize("checkpointing", ["none", "light", "selective", "full"])
def test_a_decoder_and_the_plan_of_it_agree(decoder: Decoder, checkpointing: Checkpointing) -> None:
    decoder.recompute_in_backward(checkpointing)
    planned = layer_code(decoder.spec, torch.bfloat16, checkpointing, kernels=True, whole=True)
    assert decoder.training_code(torch.bfloat16) == planned


@pytest.mark.usefixtures("with_kernels")
def test_a_decoder_with_an_adapter_is_no_longer_whole(decoder: Decoder) -> None:
    assert decoder.training_code(torch.bfloat16) == "fused"
    add_adapter(decoder, LoraConfig(rank=2, targets=("v_proj",)), torch.float32, seed=0)
    assert (
        decoder.training_code(torch.bfloat16)
        == layer_code(decoder.spec, torch.bfloat16, "none", kernels=True, whole=False)
        == "kernels"
    )


@pytest.mark.usefixtures("with_kernels")
def test_a_part_of_a_decoder_is_no_longer_whole(decoder: Decoder) -> None:
    part = shard_decoder(decoder, Shard(0, 2), "cpu", lambda x: x)
    assert part.training_code(torch.bfloat16) == "kernels"


@pytest.mark.parametrize(("dtype", "is_there", "code"), [(torch.float32, True, "compiled"), (torch.float16, False, "eager")])
def test_on_the_cpu_no_kernel_runs_a_layer(
    decoder: Decoder, dtype: torch.dtype, is_there: bool, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_module.cpu, "is_there", lambda asked: is_there and asked is dtype)
    assert decoder.training_code(dtype) == code


def test_a_stage_without_an_embedding_and_the_whole_network_agree(decoder: Decoder) -> None:
    last = cut_stage(decoder, 1, 2)
    assert last.embed is None
    for dtype in (torch.float32, torch.bfloat16):
        assert last.training_code(dtype) == decoder.training_code(dtype)
