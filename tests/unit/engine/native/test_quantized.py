"""Sampling in whole numbers: what comes out, when weights change, and where there is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.small_models import SHAPE as SMALL
from support.small_models import VOCAB_SIZE, llama, write_model
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from redline.config.processor import multiplies_in
from redline.config.sections.engine import EngineConfig, ServedEngineConfig
from redline.config.sections.lora import LoraConfig
from redline.engine import NativeEngine
from redline.engine.native import quantized
from redline.engine.native.lora import make_bank
from redline.engine.native.running.cpu import CpuRunner
from redline.errors import ConfigError, ModelError
from redline.kernels.cpu.quantized import quantized_products
from redline.models.decoder import Decoder
from redline.models.files.hf import AnyDecoder, load_decoder
from redline.models.lora.trainable import AdaptedLinear, add_adapter
from redline.types import Completion, GenerateRequest, SamplingParams, WeightUpdate

KINDS = ["int16", "int8"]
OFF = {"int16": 2e-2, "int8": 0.9}
"""How far a logprob of these small networks, which weigh logits heavily, may be from float64's, and on average a sixth."""
SHAPE = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 160}
FAMILIES = {
    "plain": llama(**SHAPE),
    "biases": llama(**SHAPE, attention_bias=True, mlp_bias=True),
    "norms of heads": Qwen3Config(**{**SMALL, **SHAPE, "head_dim": 32}),
    "tied": llama(**SHAPE, tie_word_embeddings=True),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    if not multiplies_in(request.param) or quantized_products(request.param) is None:
        pytest.skip("this CPU has no such products, or there is no compiler")
    return str(request.param)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, llama(**SHAPE), seed=5, std=0.15)
    return tmp_path


def engine_of(decoder: AnyDecoder, kind: str, **settings: object) -> NativeEngine:
    settings = {"max_num_seqs": 16, "kv_cache_memory_bytes": 2**22, **settings}
    return NativeEngine(decoder, EngineConfig(quantization=kind, **settings))  # type: ignore[arg-type]


def requests(number: int = 12, seed: int = 0, **sampling: object) -> list[GenerateRequest]:
    drawn = np.random.default_rng(seed)
    return [
        GenerateRequest(
            drawn.integers(2, VOCAB_SIZE, int(drawn.integers(1, 60))).astype(np.int32),
            SamplingParams(max_tokens=int(drawn.integers(5, 60)), seed=index, **sampling),  # type: ignore[arg-type]
        )
        for index in range(number)
    ]


def exact(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


def check_near(folder: Path, kind: str, asked: list[GenerateRequest], found: list[Completion]) -> None:
    """Logprobs are transformers' but for rounding, and there is some."""
    network = exact(folder)
    off = np.concatenate([np.abs(c.logprobs - theirs(network, r, c)) for r, c in zip(asked, found, strict=True)])
    assert 0 < off.max() < OFF[kind]
    assert off.mean() < OFF[kind] / 6


def generated(engine: NativeEngine, asked: list[GenerateRequest]) -> list[Completion]:
    return [completion for group in engine.generate(asked) for completion in group]


def theirs(network: PreTrainedModel, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """Logprobs of a completion by transformers."""
    ids = torch.from_numpy(np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int64))
    with torch.no_grad():
        logprobs = network(ids[None]).logits[0].log_softmax(-1)
    return logprobs[:-1].gather(1, ids[1:, None])[len(request.prompt_ids) - 1 :, 0].numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_near_those_of_transformers(family: str, kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, FAMILIES[family], seed=5, std=0.15)
    asked = requests()
    check_near(tmp_path, kind, asked, generated(engine_of(load_decoder(tmp_path), kind), asked))


def agreeing(a: Completion, b: Completion) -> int:
    """Tokens before the first that differs."""
    differ = np.flatnonzero(a.token_ids[: len(b.token_ids)] != b.token_ids[: len(a.token_ids)])
    return int(differ[0]) if len(differ) else min(len(a.token_ids), len(b.token_ids))


def check_alike(found: list[Completion], expected: list[Completion], kind: str) -> None:
    """The same tokens, but for draws within rounding of a border: a number that rounds to another whole one in other company
    makes a difference of that size."""
    same = sum(a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(found, expected, strict=True))
    assert same >= len(expected) * (3 if kind == "int16" else 1) // 4
    for a, b in zip(found, expected, strict=True):
        until = agreeing(a, b)
        np.testing.assert_allclose(a.logprobs[:until], b.logprobs[:until], atol=OFF[kind])


def test_it_does_not_matter_who_computes_a_token(kind: str, folder: Path) -> None:
    """In prompts of others, in company, alone, or again after it gave way."""
    decoder, asked = load_decoder(folder), requests(24)
    alone = [generated(engine_of(decoder, kind), [request])[0] for request in asked]
    per_block = 2 * 16 * 1 * 32 * 4 * 2  # keys and values of a block of two layers
    others = {
        "together": engine_of(decoder, kind),
        "few tokens a step": engine_of(decoder, kind, max_num_batched_tokens=32),
        "preempted": engine_of(decoder, kind, kv_cache_memory_bytes=24 * per_block),
    }
    for engine in others.values():
        check_alike(generated(engine, asked), alone, kind)
    assert others["preempted"].stats.preemptions > 0


def test_rows_that_decode_have_the_same_bits_in_any_company(kind: str, folder: Path) -> None:
    """Prompts of one token each begin together, and nothing else comes in between."""
    decoder = load_decoder(folder)
    asked = [GenerateRequest(np.array([5], np.int32), SamplingParams(max_tokens=40, seed=seed)) for seed in range(13)]
    pairs = generated(engine_of(decoder, kind), asked[:2])
    for a, b in zip(pairs, generated(engine_of(decoder, kind), asked)[:2], strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()


def test_guesses_are_verified_by_the_same_network(kind: str, folder: Path) -> None:
    decoder, prompt = load_decoder(folder), np.arange(2, 30, dtype=np.int32)
    asked = [GenerateRequest(prompt, SamplingParams(max_tokens=60, seed=seed, temperature=0.1)) for seed in range(12)]
    engine = engine_of(decoder, kind, speculation="always")
    check_alike(generated(engine, asked), generated(engine_of(decoder, kind), asked), kind)
    assert engine.stats.accepted_tokens > 0


def test_steps_are_one_call_of_c_by_the_copy(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(load_decoder(folder), kind)
    assert isinstance(engine._runner, CpuRunner)
    monkeypatch.setattr(engine._runner, "_layer_by_layer", None)
    generated(engine, requests())


def test_a_new_version_is_sampled_from_its_own_weights(kind: str, folder: Path, tmp_path: Path) -> None:
    write_model(other := tmp_path / "other", llama(**SHAPE), seed=6, std=0.15)
    decoder, asked = load_decoder(folder), requests()
    engine = engine_of(decoder, kind)
    before = generated(engine, asked)
    with torch.no_grad():
        for parameter, fresh in zip(decoder.parameters(), load_decoder(other).parameters(), strict=True):
            parameter.copy_(fresh)
    engine.apply(WeightUpdate(1, "all", 0))
    after = generated(engine, asked)
    assert [c.token_ids.tolist() for c in before] != [c.token_ids.tolist() for c in after]
    check_near(other, kind, asked, after)


def test_weights_that_came_before_the_first_step_count(kind: str, folder: Path, tmp_path: Path) -> None:
    """As those of a checkpoint do, which is read into a network that an engine has already."""
    write_model(other := tmp_path / "other", llama(**SHAPE), seed=6, std=0.15)
    decoder = load_decoder(folder)
    engine = engine_of(decoder, kind)
    with torch.no_grad():
        for parameter, fresh in zip(decoder.parameters(), load_decoder(other).parameters(), strict=True):
            parameter.copy_(fresh)
    expected = generated(engine_of(load_decoder(other), kind), requests())
    assert [c.token_ids.tolist() for c in generated(engine, requests())] == [c.token_ids.tolist() for c in expected]


def test_a_trained_adapter_counts_from_the_version_on_that_has_it(kind: str, folder: Path) -> None:
    decoder, asked = load_decoder(folder), requests()
    assert isinstance(decoder, Decoder)
    engine = engine_of(decoder, kind)
    before = generated(engine, asked)
    add_adapter(decoder, LoraConfig(rank=4, alpha=8), torch.float32, seed=0)
    linears = [module for module in decoder.modules() if isinstance(module, AdaptedLinear)]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for linear in linears:
            linear.lora_b.normal_(0, 0.2, generator=generator)
    engine.apply(WeightUpdate(1, "all", 0))
    after = generated(engine, asked)
    assert [c.token_ids.tolist() for c in before] != [c.token_ids.tolist() for c in after]
    plain = NativeEngine(decoder, EngineConfig(max_num_seqs=16, kv_cache_memory_bytes=2**22))
    wholes = [np.concatenate([r.prompt_ids, c.token_ids]) for r, c in zip(asked, after, strict=True)]
    scored = generated(plain, [GenerateRequest(ids, SamplingParams(max_tokens=1, prompt_logprobs=True)) for ids in wholes])
    for request, found, score in zip(asked, after, scored, strict=True):
        np.testing.assert_allclose(found.logprobs, score.prompt_logprobs[len(request.prompt_ids) :], atol=OFF[kind])


def test_it_sleeps_and_wakes(kind: str, folder: Path) -> None:
    engine, asked = engine_of(load_decoder(folder), kind), requests()
    before = [c.token_ids.tolist() for c in generated(engine, asked)]
    held = engine.memory()["quantized_weights"]
    assert held > 0
    assert engine.sleep().weight_bytes == held
    assert "quantized_weights" not in engine.memory()
    assert engine.wake().weight_bytes == held
    assert [c.token_ids.tolist() for c in generated(engine, asked)] == before


def test_a_network_in_bfloat16_is_sampled_too(kind: str, folder: Path) -> None:
    asked = requests()
    found = generated(engine_of(load_decoder(folder, "cpu", torch.bfloat16), kind), asked)
    network = exact(folder)
    off = np.concatenate([np.abs(c.logprobs - theirs(network, r, c)) for r, c in zip(asked, found, strict=True)])
    assert off.mean() < OFF[kind] / 6 + 0.1  # bfloat16's own


def test_the_trainers_network_stays_as_it_is(kind: str, folder: Path) -> None:
    decoder = load_decoder(folder)
    before = {name: parameter.clone() for name, parameter in decoder.named_parameters()}
    generated(engine_of(decoder, kind), requests())
    after = dict(decoder.named_parameters())
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert decoder.head is None  # type: ignore[union-attr]


MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Qwen3MoeConfig(**{**SMALL, **MOE, "head_dim": 32}), "has experts"),
        (llama(**{**SHAPE, "intermediate_size": 100}), "multiples of 16"),
    ],
    ids=["experts", "odd rows"],
)
def test_other_networks_are_refused(config: object, said: str, kind: str, tmp_path: Path) -> None:
    write_model(tmp_path, config, seed=5)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=said):
        engine_of(load_decoder(tmp_path), kind)


def test_without_a_compiler_it_is_refused_with_what_to_do(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "quantized_products", lambda _: None)
    monkeypatch.setattr(quantized, "why_none", lambda: "there is no C compiler; install gcc 9 or newer")
    with pytest.raises(ConfigError, match="install gcc") as caught:
        engine_of(load_decoder(folder), kind)
    assert caught.value.hint == "set engine.quantization=none"


def test_adapters_by_name_are_refused(kind: str, folder: Path) -> None:
    decoder = load_decoder(folder)
    bank = make_bank(decoder, ServedEngineConfig(max_loras=1))
    with pytest.raises(ConfigError, match="adapters by name"):
        NativeEngine(decoder, EngineConfig(quantization=kind), bank=bank)  # type: ignore[arg-type]
