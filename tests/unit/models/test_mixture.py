"""Experts of networks that transformers runs: how many parameters they have, and how many of them a token goes to."""

from __future__ import annotations

import pytest
import torch
from support.small_models import SHAPE
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    JetMoeConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
)

from redline.models.mixture import mixture_of
from redline.models.sizes.memory import expert_share, idle_parameters, knows_experts
from redline.models.spec import Mixture, ModelShape

MIXTRAL = MixtralConfig(**SHAPE, num_local_experts=8, num_experts_per_tok=2)
SHARED = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 24}


def without_weights(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(
    ("config", "mixture"),
    [
        (Qwen2Config(**SHAPE), None),
        (MIXTRAL, Mixture(2 * 8 * 3 * 48 * 80, 2 / 8)),
        (Qwen2MoeConfig(**SHAPE, num_experts=6, num_experts_per_tok=3, **SHARED), Mixture(2 * 6 * 3 * 48 * 32, 3 / 6)),
        (
            GptOssConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=1, head_dim=16),
            Mixture(2 * 4 * (3 * 48 * 80 + 2 * 80 + 48), 1 / 4),
        ),
    ],
    ids=["dense", "mixtral", "an expert for all beside them", "with biases"],
)
def test_experts_are_counted_by_where_transformers_keeps_them(config: PretrainedConfig, mixture: Mixture | None) -> None:
    assert mixture_of(without_weights(config)) == mixture


def test_an_expert_in_modules_of_its_own_is_counted() -> None:
    network = without_weights(MIXTRAL)
    for layer in network.model.layers:
        layer.mlp.experts = torch.nn.ModuleList(torch.nn.Linear(48, 80, bias=False, device="meta") for _ in range(8))
    assert mixture_of(network) == Mixture(2 * 8 * 48 * 80, 2 / 8)


def test_of_experts_that_look_otherwise_nothing_is_told() -> None:
    untold = mixture_of(without_weights(JetMoeConfig(**SHAPE, kv_channels=16)))
    assert untold is not None
    assert untold.share is None
    network = without_weights(MIXTRAL)
    network.config.num_local_experts = 7
    assert mixture_of(network) == Mixture(2 * 8 * 3 * 48 * 80, None)


def test_what_is_not_told_counts_as_gone_through() -> None:
    def shape(share: float | None) -> ModelShape:
        return ModelShape("any", 100, 64, 2, 4, 4, 16, 128, mixture=Mixture(1000, share))

    assert (idle_parameters(shape(0.25)), expert_share(shape(0.25)), knows_experts(shape(0.25))) == (750, 0.25, True)
    assert (idle_parameters(shape(None)), expert_share(shape(None)), knows_experts(shape(None))) == (0, 1.0, False)
