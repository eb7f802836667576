"""What `SglangEngine` says to SGLang, and makes of what it hears. A hand-written package stands in for SGLang's."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from support.small_models import CONFIGS

from redline.config.sections.engine import EngineConfig
from redline.engine.adapters.sglang import SglangEngine
from redline.errors import EngineError
from redline.types import FinishReason, GenerateRequest, SamplingParams, WeightUpdate


def answer(tokens: list[int], finish: dict[str, Any] | None = None, **about: Any) -> dict[str, Any]:
    """In the shape of SGLang 0.5.23: (logprob, id, text) for each sampled token."""
    plain = {
        "output_token_logprobs": [(-0.5 * (i + 1), token, None) for i, token in enumerate(tokens)],
        "finish_reason": finish or {"type": "length", "length": len(tokens)},
        "cached_tokens": 2,
        "e2e_latency": 3.0,
    }
    return {"text": "", "output_ids": tokens, "meta_info": plain | about}


@dataclass
class FakeSglang:
    """An `sglang.Engine` that remembers what it was asked, and answers with `answers`."""

    arguments: dict[str, Any] = field(default_factory=dict)
    calls: list[dict[str, Any]] = field(default_factory=list)
    answers: list[dict[str, Any]] = field(default_factory=list)
    updates: list[list[tuple[str, torch.Tensor]]] = field(default_factory=list)
    update_result: tuple[bool, str] = (True, "Success")
    told: list[Any] = field(default_factory=list)
    """Calls about memory, caches and the end."""

    def make(self, **arguments: Any) -> FakeSglang:
        self.arguments = arguments
        return self

    def generate(self, **call: Any) -> list[dict[str, Any]]:
        self.calls.append(call)
        found, self.answers = self.answers[: len(call["input_ids"])], self.answers[len(call["input_ids"]) :]
        return found or [answer([7])] * len(call["input_ids"])

    def update_weights_from_tensor(self, named_tensors: Any, flush_cache: bool) -> tuple[bool, str]:
        assert flush_cache
        self.updates.append(named_tensors)
        return self.update_result

    def flush_cache(self) -> None:
        self.told.append("flush")

    def release_memory_occupation(self, tags: list[str]) -> None:
        self.told.append(("release", *tags))

    def resume_memory_occupation(self, tags: list[str]) -> None:
        self.told.append(("resume", *tags))

    def shutdown(self) -> None:
        self.told.append("shutdown")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeSglang:
    fake, module = FakeSglang(), ModuleType("sglang")
    module.Engine = fake.make  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang", module)
    return fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CONFIGS["llama, untied"].save_pretrained(tmp_path)
    return tmp_path


def make(folder: Path, **options: Any) -> SglangEngine:
    return SglangEngine(folder, EngineConfig(max_num_seqs=8, max_num_batched_tokens=512), **options)


def ask(**sampling: Any) -> GenerateRequest:
    return GenerateRequest(np.array([3, 4, 5], np.int32), SamplingParams(**{"max_tokens": 2, **sampling}))


def test_without_sglang_the_engine_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sglang", None)
    with pytest.raises(EngineError, match="needs the package") as caught:
        make(folder)
    assert caught.value.hint == "pip install 'sglang>=0.5.23'"


def test_the_engine_is_made_so_that_seeds_count(fake: FakeSglang, folder: Path) -> None:
    make(folder, dtype="bfloat16", tp_size=2)
    assert fake.arguments == {
        "model_path": str(folder),
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "context_length": 256,
        "max_running_requests": 8,
        "chunked_prefill_size": 512,
        "disable_radix_cache": False,
        "mem_fraction_static": 0.5,
        "tp_size": 2,
        "enable_deterministic_inference": True,
    }


def test_what_sglang_knows_beyond_our_keys_is_passed_on(fake: FakeSglang, folder: Path) -> None:
    config = EngineConfig(max_num_seqs=8, options={"enable_memory_saver": True, "mem_fraction_static": 0.7})
    SglangEngine(folder, config)
    assert (fake.arguments["enable_memory_saver"], fake.arguments["mem_fraction_static"]) == (True, 0.7)


def test_memory_that_was_given_back_is_taken_back(fake: FakeSglang, folder: Path) -> None:
    engine = make(folder)
    for level in (1, 2):
        engine.sleep(level)
        engine.wake()
    kv, both = ("kv_cache",), ("kv_cache", "weights")
    assert fake.told == [("release", *kv), ("resume", *kv), ("release", *both), ("resume", *both)]


def test_the_radix_cache_is_flushed_and_the_processes_end_when_told(fake: FakeSglang, folder: Path) -> None:
    engine = make(folder)
    engine.reset_prefix_cache()
    engine.close()
    assert fake.told == ["flush", "shutdown"]


def test_a_call_that_waited_for_an_update_is_of_the_new_version(fake: FakeSglang, folder: Path) -> None:
    engine = make(folder)
    engine.submit(ask())
    engine.update_weights([("w", torch.ones(1))])
    engine.apply(WeightUpdate(1, ("w",), 4))
    [(_, piece)] = engine.step()
    assert not isinstance(piece, EngineError)
    assert piece.completion is not None
    assert (piece.completion.versions.oldest, piece.completion.versions.newest) == (1, 1)


def test_every_completion_is_a_request_with_a_seed_of_its_own(fake: FakeSglang, folder: Path) -> None:
    groups = make(folder).generate([ask(n=2, seed=1), ask(n=3, seed=2)])
    [call] = fake.calls
    assert [len(group) for group in groups] == [2, 3]
    assert call["input_ids"] == [[3, 4, 5]] * 5
    assert call["return_logprob"] is True
    assert len({sampling["sampling_seed"] for sampling in call["sampling_params"]}) == 5


def test_what_a_request_asks_for_reaches_sglang_in_its_own_names(fake: FakeSglang, folder: Path) -> None:
    (folder / "tokenizer.json").touch()
    request = ask(max_tokens=9, temperature=0.5, stop=("end",), stop_token_ids=(1,), min_tokens=3, logit_bias={8: 1.5})
    make(folder).generate([request])
    [sampling] = fake.calls[0]["sampling_params"]
    sampling.pop("sampling_seed")
    assert sampling == {
        "max_new_tokens": 9,
        "temperature": 0.5,
        "stop": ["end"],
        "stop_token_ids": [1],
        "ignore_eos": False,
        "min_new_tokens": 3,
        "logit_bias": {"8": 1.5},
    }


def test_without_stop_tokens_the_models_own_end_is_ignored(fake: FakeSglang, folder: Path) -> None:
    make(folder).generate([ask()])
    assert fake.calls[0]["sampling_params"][0]["ignore_eos"] is True


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"allowed_token_ids": (7,)}], ids=str)
def test_what_its_logprobs_would_leave_out_is_refused(fake: FakeSglang, folder: Path, sampling: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=next(iter(sampling))):
        make(folder).generate([ask(), ask(**sampling)])
    assert fake.calls == []


def test_a_completion_holds_every_sampled_token_with_its_logprob(fake: FakeSglang, folder: Path) -> None:
    stopped = {"type": "stop", "matched": 1}
    fake.answers = [answer([7, 1], stopped, queue_time=0.5, first_token_latency=1.0), answer([8, 9])]
    [[first, second]] = make(folder).generate([ask(n=2, stop_token_ids=(1,))])
    assert first.token_ids.tolist() == [7, 1]
    assert first.logprobs.tolist() == [-0.5, -1.0]
    assert (first.finish_reason, second.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert first.stop is None
    assert (first.queue_s, first.prefill_s, first.decode_s) == (0.5, 0.5, 2.0)
    assert first.cached_tokens == 2


def test_a_stop_string_is_told(fake: FakeSglang, folder: Path) -> None:
    (folder / "tokenizer.json").touch()
    fake.answers = [answer([7], {"type": "stop", "matched": "end"})]
    assert make(folder).generate([ask(stop=("end",))])[0][0].stop == "end"


def test_a_completion_that_sglang_gave_up_is_an_error_in_its_words(fake: FakeSglang, folder: Path) -> None:
    fake.answers = [answer([], {"type": "abort", "message": "out of memory"})]
    with pytest.raises(EngineError, match="out of memory"):
        make(folder).generate([ask()])


def test_the_likeliest_tokens_are_asked_for_per_request(fake: FakeSglang, folder: Path) -> None:
    fake.answers = [answer([7], output_top_logprobs=[[(-0.1, 7, None), (-2.0, 5, None)]])]
    [[completion]] = make(folder).generate([ask(max_tokens=1, top_logprobs=2)])
    assert fake.calls[0]["top_logprobs_num"] == [2]
    assert completion.top_logprobs is not None
    assert completion.top_logprobs.token_ids.tolist() == [[7, 5]]


def test_logprobs_under_the_model_come_from_a_second_pass(fake: FakeSglang, folder: Path) -> None:
    scored = [(None, 3, None), (-1.0, 4, None), (-2.0, 5, None), (-3.0, 7, None)]
    fake.answers = [answer([7]), answer([0], input_token_logprobs=scored)]
    [[completion]] = make(folder).generate([ask(max_tokens=1, temperature=0.5, raw_logprobs=True, prompt_logprobs=True)])
    assert fake.calls[1]["input_ids"] == [[3, 4, 5, 7]]
    assert fake.calls[1]["logprob_start_len"] == 0
    np.testing.assert_array_equal(completion.prompt_logprobs, [np.nan, -1.0, -2.0])
    np.testing.assert_array_equal(completion.raw_logprobs, [-3.0])


def test_an_adapter_goes_with_each_request_that_names_it(fake: FakeSglang, folder: Path) -> None:
    engine = make(folder, adapters={"tune": Path("tune")})
    engine.generate([ask(), GenerateRequest(np.array([3], np.int32), SamplingParams(1), adapter="tune")])
    assert fake.arguments["lora_paths"] == {"tune": "tune"}
    assert fake.calls[0]["lora_path"] == [None, "tune"]


def test_new_weights_come_before_their_version(fake: FakeSglang, folder: Path) -> None:
    engine = make(folder)
    with pytest.raises(EngineError, match="version 1 never came"):
        engine.apply(WeightUpdate(1, ("w",), 0))
    engine.update_weights(iter([("w", torch.ones(2))]))
    engine.apply(WeightUpdate(1, ("w",), 0))
    assert [name for name, _ in fake.updates[0]] == ["w"]
    assert engine.generate([ask()])[0][0].versions.oldest == 1


def test_weights_that_sglang_does_not_take_are_an_error(fake: FakeSglang, folder: Path) -> None:
    fake.update_result = (False, "shapes differ")
    with pytest.raises(EngineError, match="shapes differ"):
        make(folder).update_weights([])


def test_no_requests_are_not_sent(fake: FakeSglang, folder: Path) -> None:
    assert make(folder).generate([]) == []
    assert fake.calls == []
