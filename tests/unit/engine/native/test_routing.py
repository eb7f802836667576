"""What an engine records of the experts that tokens went to, against the routers of transformers' network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.small_models import CONFIGS, EXPERTS, SHAPE, write_model
from support.tiny_engines import BLOCK_SIZE, ask, finish, steps
from transformers import PreTrainedModel, Qwen3MoeConfig

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.errors import ModelError
from redline.models.files.hf import load_decoder
from redline.models.layers.routes import routing_shape
from redline.models.spec import spec_from_config
from redline.types import UNKNOWN_EXPERT, Completion, Delta, FinishReason, GenerateRequest

MIXTURE = "qwen3_moe, some layers"
BYTES_PER_BLOCK = BLOCK_SIZE * (2 * 4 * 2 * 16 * 4 + 3)
"""Keys and values in float32 of four layers with two heads of sixteen, and three choices in the one layer that has experts."""
CLEAR = 1e-3
"""Logits of the last expert that is chosen and the first that is not: closer ones may change places by rounding."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    folder = tmp_path_factory.mktemp("mixture")
    return folder, write_model(folder, CONFIGS[MIXTURE], seed=5, std=0.3)


def engine_on(folder: Path, num_blocks: int = 512, **config: Any) -> NativeEngine:
    config = {"block_size": BLOCK_SIZE, "kv_cache_memory_bytes": (num_blocks + 1) * BYTES_PER_BLOCK, **config}
    return NativeEngine(load_decoder(folder), EngineConfig(record_routing=True, **config))


@torch.no_grad()
def assert_routed_as_by(oracle: PreTrainedModel, request: GenerateRequest, completion: Completion) -> None:
    """Every token but the last has its experts, the last has none."""
    tokens = np.concatenate([request.prompt_ids, completion.token_ids])
    assert completion.routing is not None
    assert completion.routing.shape == (len(tokens), 3)
    assert (completion.routing[-1] == UNKNOWN_EXPERT).all()
    [logits] = oracle(torch.from_numpy(tokens.astype(np.int64))[None], output_router_logits=True).router_logits
    ordered = logits.sort(dim=-1, descending=True)
    is_clear = ((ordered.values[:, 2] - ordered.values[:, 3]) > CLEAR)[:-1].numpy()
    assert is_clear.mean() > 0.9
    found, expected = np.sort(completion.routing[:-1], axis=1), np.sort(ordered.indices[:-1, :3].numpy(), axis=1)
    np.testing.assert_array_equal(found[is_clear], expected[is_clear])


REQUESTS = [ask(5, 30, seed=1, n=3), ask(1, 1, seed=2), ask(40, 7, seed=3, n=2), ask(17, 30, seed=4, n=4), ask(17, 30, seed=4)]
SETTINGS: dict[str, dict[str, Any]] = {
    "plenty of everything": {},
    "prompts in chunks": {"max_num_batched_tokens": 7},
    "a cache too small for all": {"num_blocks": 24},
    "four rows": {"max_num_seqs": 4},
    "blocks of sixteen": {"block_size": 16, "num_blocks": 128},
    "blocks of one": {"block_size": 1, "num_blocks": 1024},
    "guesses": {"speculation": "always"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_experts_are_those_of_the_routers(name: str, mixture: tuple[Path, PreTrainedModel]) -> None:
    folder, oracle = mixture
    engine = engine_on(folder, **SETTINGS[name])
    found = engine.generate(REQUESTS)
    for request, completions in zip(REQUESTS, found, strict=True):
        for completion in completions:
            assert_routed_as_by(oracle, request, completion)
    if name == "a cache too small for all":
        assert engine.stats.preemptions > 0
    if name == "plenty of everything":
        plain = NativeEngine(load_decoder(folder), EngineConfig(block_size=BLOCK_SIZE)).generate(REQUESTS)
        assert [one.token_ids.tolist() for n in found for one in n] == [one.token_ids.tolist() for n in plain for one in n]
        assert all(one.routing is None for n in plain for one in n)


def test_a_next_turn_finds_the_experts_of_the_one_before_with_its_keys(mixture: tuple[Path, PreTrainedModel]) -> None:
    folder, oracle = mixture
    engine = engine_on(folder)
    first = ask(9, 20, seed=6)
    [[before]] = engine.generate([first])
    further = GenerateRequest(np.concatenate([first.prompt_ids, before.token_ids, first.prompt_ids[:3]]), first.sampling)
    [[after]] = engine.generate([further])
    assert after.cached_tokens >= 24
    assert_routed_as_by(oracle, further, after)
    assert before.routing is not None
    assert after.routing is not None
    np.testing.assert_array_equal(after.routing[: len(before.routing) - 1], before.routing[:-1])


def test_what_is_aborted_has_the_experts_of_what_it_sampled(mixture: tuple[Path, PreTrainedModel]) -> None:
    folder, oracle = mixture
    engine, request = engine_on(folder, max_num_seqs=1), ask(9, 60, seed=6)
    number, waiting = engine.submit(request, streaming=1), engine.submit(ask(5, 60, seed=7))
    seen = 0
    for _, piece in steps(engine):
        assert isinstance(piece, Delta)
        seen += len(piece.token_ids)
        if seen == 5:
            break
    engine.abort(number)
    engine.abort(waiting)
    found = finish(engine)
    [aborted], [never_begun] = found[number], found[waiting]
    assert aborted.finish_reason == FinishReason.ABORT
    assert_routed_as_by(oracle, request, aborted)
    assert never_begun.routing is not None
    assert never_begun.routing.shape == (5, 3)
    assert (never_begun.routing == UNKNOWN_EXPERT).all()


def test_a_reply_that_is_cut_keeps_the_experts_of_what_is_left(mixture: tuple[Path, PreTrainedModel]) -> None:
    [[whole]] = engine_on(mixture[0]).generate([ask(9, 20, seed=6)])
    cut = whole.cut(7)
    assert whole.routing is not None
    assert cut.routing is not None
    np.testing.assert_array_equal(cut.routing, whole.routing[:16])


def test_the_record_counts_as_memory_of_the_cache(mixture: tuple[Path, PreTrainedModel]) -> None:
    engine = engine_on(mixture[0], num_blocks=40)
    assert engine.stats.kv_blocks_total == 40
    assert engine.sleep().kv_bytes == 41 * BYTES_PER_BLOCK


@pytest.mark.parametrize("name", ["llama, tied", "qwen3_moe"])
def test_what_cannot_be_recorded_is_refused(name: str) -> None:
    spec = spec_from_config(CONFIGS[name])
    if spec.experts is not None:
        spec = replace(spec, experts=replace(spec.experts, count=256))
    with pytest.raises(ModelError, match=r"engine\.record_routing: (the model has no experts|a choice among 256 experts)"):
        routing_shape(spec)


@pytest.mark.gpu
def test_experts_that_the_kernels_chose_are_recorded_step_by_step_in_graphs(tmp_path: Path) -> None:
    """In bfloat16, beside transformers in float32: where the routers' choice is clear, it is the same."""
    config = Qwen3MoeConfig(**{**SHAPE, "hidden_size": 128}, **EXPERTS | {"head_dim": 64}, norm_topk_prob=True)
    oracle = write_model(tmp_path, config, seed=5, std=0.1)
    decoder = load_decoder(tmp_path, "cuda", torch.bfloat16)
    engine = NativeEngine(decoder, EngineConfig(max_num_seqs=32, kv_cache_memory_bytes=2**26, record_routing=True))
    asked = [ask(length, 60, seed=length, n=3) for length in (1, 5, 63, 64, 65, 130)]
    compared = 0
    for round_ in range(2):  # the second finds the prompts of the first in the cache
        for request, completions in zip(asked, engine.generate(asked), strict=True):
            for completion in completions:
                assert completion.routing is not None
                found = np.sort(completion.routing.reshape(-1, 2, 3), axis=-1)
                assert (found[-1] == UNKNOWN_EXPERT).all()
                assert (found[:-1] < 6).all()
                assert (np.diff(found[:-1].astype(int), axis=-1) > 0).all(), "three different ones"
                tokens = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
                with torch.no_grad():
                    logits = oracle(tokens[None], output_router_logits=True).router_logits
                for layer, each in enumerate(logits):
                    ordered = each[:-1].sort(dim=-1, descending=True)
                    is_clear = (ordered.values[:, 2] - ordered.values[:, 3] > 0.3).numpy()
                    expected = np.sort(ordered.indices[:, :3].numpy(), axis=1)
                    differing = (found[:-1, layer] != expected).any(axis=1) & is_clear
                    compared += int(is_clear.sum())
                    assert differing.mean() < 0.02, f"round {round_}, a prompt of {len(request.prompt_ids)}, layer {layer}"
    assert compared > 1000
