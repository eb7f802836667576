"""What is vLLM's own in `VllmEngine`; what it shares with all engines is in `test_engine.py`."""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.engine_benches import KV_CACHE_BYTES, WITH_WIDE_HEADS
from support.small_models import write_model
from transformers import PreTrainedModel

from redline.config.installation import how_to_install
from redline.config.sections.engine import EngineConfig
from redline.engine.adapters.limits import limits_of
from redline.engine.adapters.stepped import SteppedAdapter
from redline.engine.adapters.vllm import VllmEngine
from redline.errors import EngineError
from redline.types import Completion, Delta, FinishReason, GenerateRequest, SamplingParams, WeightUpdate

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
CONFIG = EngineConfig(kv_cache_memory_bytes=KV_CACHE_BYTES, block_size=32)
RANK, SCALE = 4, 2.0


def test_without_vllm_the_engine_names_the_extra_that_brings_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(EngineError, match="needs the package") as caught:
        VllmEngine(tmp_path, CONFIG)
    assert caught.value.hint == how_to_install("vllm")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    folder = tmp_path_factory.mktemp("model")
    return write_model(folder, WITH_WIDE_HEADS["llama, untied"], seed=5, std=0.3), folder


@pytest.fixture(scope="module")
def engine(oracle: tuple[PreTrainedModel, Path], tmp_path_factory: pytest.TempPathFactory) -> VllmEngine:
    """With an adapter, and without a tokenizer."""
    adapter = tmp_path_factory.mktemp("adapter")
    write_adapter(adapter, oracle[0])
    return VllmEngine(oracle[1], CONFIG, dtype="float32", adapters={"tune": adapter}, enforce_eager=True)


def write_adapter(folder: Path, model: PreTrainedModel) -> None:
    """A random LoRA adapter of every query and down projection, as PEFT writes it."""
    targets = ("q_proj", "down_proj")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": SCALE * RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, parameter in model.named_parameters():
        if name.split(".")[-2] in targets:
            rows, columns = parameter.shape
            prefix = f"base_model.model.{name.removesuffix('.weight')}"
            tensors[f"{prefix}.lora_A.weight"] = 0.2 * torch.randn(RANK, columns, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = 0.2 * torch.randn(rows, RANK, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")


def ask(adapter: str | None = None, **sampling: float) -> GenerateRequest:
    prompt = np.random.default_rng(3).integers(2, 131, 20).astype(np.int32)
    return GenerateRequest(prompt, SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **sampling}), adapter)


@torch.no_grad()
def greedy(model: PreTrainedModel, request: GenerateRequest) -> list[int]:
    ids = torch.from_numpy(request.prompt_ids.astype(np.int64))[None]
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=None, pad_token_id=0
    )
    return out[0, ids.shape[1] :].tolist()


@needs_vllm
def test_requests_with_and_without_an_adapter_share_a_batch(
    engine: VllmEngine, oracle: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    model = oracle[0]
    write_adapter(tmp_path, model)
    plain = greedy(model, ask())
    merged = type(model)(model.config).eval()
    merged.load_state_dict(merged_weights(model, tmp_path))
    tuned = greedy(merged, ask())
    [[first], [second], [third]] = engine.generate([ask(), ask("tune"), ask()])
    assert tuned != plain
    assert first.token_ids.tolist() == third.token_ids.tolist() == plain
    assert second.token_ids.tolist() == tuned


def merged_weights(model: PreTrainedModel, adapter: Path) -> dict[str, torch.Tensor]:
    tensors, weights = load_file(adapter / "adapter_model.safetensors"), dict(model.state_dict())
    for name in [name for name in tensors if name.endswith("lora_A.weight")]:
        target = name.removeprefix("base_model.model.").replace("lora_A.weight", "weight")
        weights[target] = weights[target] + SCALE * tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
    return weights


@needs_vllm
def test_an_adapter_goes_on_top_of_whatever_weights_there_are(
    engine: VllmEngine, oracle: tuple[PreTrainedModel, Path], tmp_path: Path
) -> None:
    model = write_model(tmp_path, WITH_WIDE_HEADS["llama, untied"], seed=6, std=0.3)
    write_adapter(tmp_path, model)
    merged = type(model)(model.config).eval()
    merged.load_state_dict(merged_weights(model, tmp_path))
    engine.update_weights(model.state_dict().items())
    [[plain], [tuned]] = engine.generate([ask(), ask("tune")])
    engine.update_weights(oracle[0].state_dict().items())
    engine.apply(WeightUpdate(0, (), 0))
    assert plain.token_ids.tolist() == greedy(model, ask())
    assert tuned.token_ids.tolist() == greedy(merged, ask())


@needs_vllm
def test_what_vllm_itself_refuses_is_told_in_its_words_and_harms_nobody_else(engine: VllmEngine) -> None:
    expected = engine.generate([ask()])[0][0].token_ids.tolist()
    with pytest.raises(EngineError, match=r"vLLM refuses the request: temperature must be in \[0, 2\]"):
        engine.generate([ask(), ask(temperature=3.0)])
    assert engine.generate([ask()])[0][0].token_ids.tolist() == expected


@needs_vllm
def test_without_a_tokenizer_stop_strings_are_refused(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="need a tokenizer"):
        engine.generate([GenerateRequest(np.array([3], np.int32), SamplingParams(4, stop=("end",)))])


@needs_vllm
def test_a_version_whose_weights_never_came_is_refused(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match="version 1 never came"):
        engine.apply(WeightUpdate(1, ("w",), 0))
    assert engine.version == 0


@needs_vllm
def test_a_prompt_seen_before_is_found_in_the_prefix_cache(engine: VllmEngine) -> None:
    long = GenerateRequest(np.arange(2, 100, dtype=np.int32), SamplingParams(2, n=3))
    engine.generate([long])
    assert all(completion.cached_tokens >= 32 for completion in engine.generate([long])[0])


# ── completions that are ended ─────────────────────────────────────────────────────────────────────────────────────────


def ended_after(engine: VllmEngine, count: int) -> list[int]:
    """The tokens of the first of two completions, which is ended once it has so many; the other goes on."""
    number = engine.submit(ask(n=2, temperature=0.0), streaming=4)
    found: dict[int, Completion] = {}
    came = 0
    while engine.has_work:
        for _, event in engine.step():
            assert isinstance(event, Delta)
            came += len(event.token_ids) if event.index == 0 else 0
            if event.completion is not None:
                found[event.index] = event.completion
        if came == count and 0 not in found:
            engine.end(number, 0)
            engine.end(number, 7)
    assert found[0].finish_reason == FinishReason.ABORT
    assert found[1].finish_reason == FinishReason.LENGTH
    assert len(found[1].token_ids) == 12
    np.testing.assert_array_equal(found[0].logprobs, found[1].logprobs[: len(found[0].logprobs)])
    return found[0].token_ids.tolist()


@needs_vllm
def test_vllm_samples_no_more_of_a_completion_that_is_ended(engine: VllmEngine) -> None:
    whole = engine.generate([ask()])[0][0].token_ids.tolist()
    assert ended_after(engine, 3) == whole[:3]


class OthersEngine:
    """Says 1, 2, 3, … to every request, as vLLM's engine does."""

    def __init__(self) -> None:
        self.said: dict[str, int] = {}
        self.aborted: list[str] = []

    def add_request(self, name: str, *given: object, **options: object) -> None:
        self.said[name] = 0

    def abort_request(self, names: list[str]) -> None:
        self.aborted += names
        for name in names:
            del self.said[name]

    def step(self) -> list[SimpleNamespace]:
        assert self.said, "nothing is left to step"
        return [self._output(name) for name in list(self.said)]

    def _output(self, name: str) -> SimpleNamespace:
        self.said[name] += 1
        count, is_over = self.said[name], self.said[name] == 12
        logprobs = SimpleNamespace(token_ids=[count], logprobs=[-count / 10])
        sampled = SimpleNamespace(
            token_ids=[count], logprobs=logprobs, finish_reason="length" if is_over else None, stop_reason=None
        )
        if is_over:
            del self.said[name]
        times = SimpleNamespace(scheduled_ts=0.0, first_token_ts=1.0, last_token_ts=float(count))
        return SimpleNamespace(request_id=name, outputs=[sampled], finished=is_over, metrics=times, num_cached_tokens=0)


def test_a_completion_that_is_ended_is_aborted_in_vllm_and_comes_with_what_it_has() -> None:
    """Without vLLM: what this class makes of what vLLM's engine says."""
    engine, others = VllmEngine.__new__(VllmEngine), OthersEngine()
    SteppedAdapter.__init__(engine, limits_of(64), 8)
    engine._engine, engine._running, engine._ended, engine._names, engine._adapters = others, {}, [], itertools.count(), {}
    engine._refusals = (ValueError,)
    engine._vllm = SimpleNamespace(
        SamplingParams=SimpleNamespace,
        sampling_params=SimpleNamespace(RequestOutputKind=SimpleNamespace(DELTA=0)),
        inputs=SimpleNamespace(engine=SimpleNamespace(tokens_input=lambda tokens, cache_salt: tokens)),
    )
    assert ended_after(engine, 3) == [1, 2, 3]
    assert others.aborted == ["0"]
