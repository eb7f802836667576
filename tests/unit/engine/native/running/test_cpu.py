"""The engine with C between its products, beside the one without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.small_models import SHAPE as SMALL
from support.small_models import VOCAB_SIZE, llama, write_model
from transformers import Qwen3Config

from redline.config.sections.engine import EngineConfig
from redline.config.sections.lora import LoraConfig
from redline.engine import NativeEngine
from redline.engine.native.running import cpu
from redline.engine.native.running.cpu import CpuRunner
from redline.kernels.cpu import matrix_products
from redline.kernels.cpu.compiled import library
from redline.kernels.cpu.matrix_products import MatrixProducts
from redline.models.files.hf import load_decoder
from redline.models.layers import few_rows
from redline.models.lora.trainable import add_adapter
from redline.types import Completion, GenerateRequest, SamplingParams

SHAPE = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 160}


def engine_of(folder: Path, dtype: torch.dtype = torch.float32, **settings: object) -> NativeEngine:
    config = EngineConfig(max_num_seqs=16, kv_cache_memory_bytes=2**22, **settings)  # type: ignore[arg-type]
    return NativeEngine(load_decoder(folder, "cpu", dtype), config)


def requests(temperature: float = 1.0) -> list[GenerateRequest]:
    drawn = np.random.default_rng(0)
    return [
        GenerateRequest(
            drawn.integers(2, VOCAB_SIZE, int(drawn.integers(1, 60))).astype(np.int32),
            SamplingParams(
                max_tokens=int(drawn.integers(5, 90)), n=int(drawn.integers(1, 4)), seed=number, temperature=temperature
            ),
        )
        for number in range(12)
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_model(tmp_path, llama(**SHAPE), seed=5, std=0.15)
    if not isinstance(engine_of(tmp_path)._runner, CpuRunner):
        pytest.skip("no compiler here, or torch computes with other threads")
    return tmp_path


def generated(engine: NativeEngine, asked: list[GenerateRequest]) -> list[Completion]:
    return [completion for group in engine.generate(asked) for completion in group]


@pytest.mark.parametrize("speculation", ["off", "always"])
def test_samples_and_logprobs_are_those_of_torch(folder: Path, speculation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = generated(engine_of(folder, speculation=speculation), requests())
    monkeypatch.setattr(cpu, "steps_for", lambda *_: None)
    plain = engine_of(folder)
    assert not isinstance(plain._runner, CpuRunner)
    expected = generated(plain, requests())
    same = [(a, b) for a, b in zip(found, expected, strict=True) if a.token_ids.tolist() == b.token_ids.tolist()]
    assert len(same) >= len(expected) - 1, "a draw may fall within float32's rounding of a border"
    for a, b in same:
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


FAMILIES = {
    "plain": llama(**SHAPE),
    "biases": llama(**SHAPE, attention_bias=True, mlp_bias=True),
    "norms of heads": Qwen3Config(**{**SMALL, **SHAPE, "head_dim": 32}),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16 by matrix units"])
def test_a_step_in_one_call_has_the_bits_of_one_layer_by_layer(
    family: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, FAMILIES[family], seed=5, std=0.15)
    compiled = library(matrix_products.SOURCE, "-DEMULATED=1")
    if compiled is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    for module in (cpu, few_rows):
        monkeypatch.setattr(module, "matrix_products", lambda: MatrixProducts(compiled))
    engine, calls = engine_of(tmp_path, dtype), []
    assert isinstance(engine._runner, CpuRunner)
    hidden = engine._runner._steps.hidden
    monkeypatch.setattr(engine._runner._steps, "hidden", lambda *of: (calls.append(1), hidden(*of))[1])
    found = generated(engine, requests())
    assert calls
    calls.clear()
    monkeypatch.setattr(cpu, "MOST_ROWS", 0)
    expected = generated(engine_of(tmp_path, dtype), requests())
    assert not calls
    for a, b in zip(found, expected, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs.tolist() == b.logprobs.tolist()


def test_bfloat16_is_scored_as_by_torch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = [replace(request, sampling=replace(request.sampling, n=1, max_tokens=1)) for request in requests()]
    found = generated(
        engine_of(folder, torch.bfloat16), [replace(r, sampling=replace(r.sampling, max_tokens=20)) for r in asked]
    )
    monkeypatch.setattr(cpu, "steps_for", lambda *_: None)
    plain = engine_of(folder, torch.bfloat16)
    off = []
    for request, completion in zip(asked, found, strict=True):
        whole = np.concatenate([request.prompt_ids, completion.token_ids]).astype(np.int32)
        scored = replace(request, prompt_ids=whole, sampling=replace(request.sampling, prompt_logprobs=True))
        [[again]] = plain.generate([scored])
        assert again.prompt_logprobs is not None
        off.append(np.abs(completion.logprobs - np.asarray(again.prompt_logprobs)[len(request.prompt_ids) :]).mean())
    assert np.mean(off) < 0.05


def test_steps_that_need_more_go_through_the_network_over_the_same_attention(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those with adapters."""
    engine = engine_of(folder)
    runner = engine._runner
    assert isinstance(runner, CpuRunner)
    monkeypatch.setattr(runner, "_may_be_plain", False)
    expected = [c.token_ids.tolist() for c in generated(engine_of(folder), requests())]
    found = [c.token_ids.tolist() for c in generated(engine, requests())]
    assert sum(a == b for a, b in zip(found, expected, strict=True)) >= len(expected) - 1


def test_an_adapter_that_the_network_is_given_later_takes_part(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def adapted() -> NativeEngine:
        engine = engine_of(folder)
        add_adapter(engine.decoder, LoraConfig(rank=4), torch.float32, seed=0)
        with torch.no_grad():
            for name, parameter in engine.decoder.named_parameters():
                if name.endswith("lora_b"):
                    parameter.normal_(generator=torch.Generator().manual_seed(len(name)))
        return engine

    found = generated(adapted(), requests(temperature=0.0))
    monkeypatch.setattr(cpu, "steps_for", lambda *_: None)
    expected = generated(adapted(), requests(temperature=0.0))
    assert [a.token_ids.tolist() for a in found] == [b.token_ids.tolist() for b in expected]


ASKING = {
    "top-p": {"top_p": 0.8},
    "a bias": {"logit_bias": {7: 1.0}},
    "a least length": {"stop_token_ids": (3,), "min_tokens": 9},
    "top logprobs": {"top_logprobs": 3, "raw_logprobs": True},
}


@pytest.mark.parametrize("what", ASKING)
def test_a_row_has_the_same_bits_whatever_the_others_ask_for(folder: Path, what: str) -> None:
    """The prompts are put through alone, where company rounds otherwise."""
    plain = [GenerateRequest(np.arange(2, 9, dtype=np.int32), SamplingParams(40, seed=s, temperature=0.7)) for s in range(4)]
    asking = GenerateRequest(np.arange(9, 30, dtype=np.int32), SamplingParams(60, seed=9, **ASKING[what]))  # type: ignore[arg-type]
    alone, together = engine_of(folder), engine_of(folder)
    number = together.submit(asking)
    together.step()
    found, expected = generated(together, plain), generated(alone, plain)
    together.abort(number)
    for a, b in zip(found, expected, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.logprobs[1:].tolist() == b.logprobs[1:].tolist()


def test_logprobs_of_many_rows_have_the_same_bits_with_guesses_and_without(folder: Path) -> None:
    """Sixteen rows and all their guesses are more tokens than a step takes in one call."""
    asked = [GenerateRequest(np.arange(2, 40, dtype=np.int32), SamplingParams(max_tokens=40, n=16, seed=1))]
    expected = generated(engine_of(folder), asked)
    guessing = engine_of(folder, speculation="always")
    generated(guessing, asked)  # from which all of the second time is guessed
    before = guessing.stats
    found = generated(guessing, asked)
    assert guessing.stats.accepted_tokens - before.accepted_tokens > 16 * 20
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.token_ids, b.token_ids)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
