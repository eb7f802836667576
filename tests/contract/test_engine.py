"""What every engine promises (`ports.Engine`), held against transformers.

An engine joins by an entry in `ENGINES`: how to make one from a Hugging Face folder, and how to look at it from outside."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest
import torch
from fresh_memory import fresh_memory_is_nan
from small_models import CONFIGS, VOCAB_SIZE, randomize, write_model
from transformers import PreTrainedModel

from redline.engine import NativeEngine
from redline.errors import EngineError
from redline.models.hf import load_decoder
from redline.ports import Engine
from redline.types import Completion, FinishReason, GenerateRequest, SamplingParams, VersionSpan, WeightUpdate

MAX_POSITIONS = 256


class Bench(Protocol):
    """One engine, and what a test needs to do around it."""

    engine: Engine

    def change_weights(self, folder: Path) -> None:
        """Put the weights of this folder where the engine reads them, as weight sync does before `apply`."""
        ...

    def count_tokens(self, action: Callable[[], Any]) -> int:
        """Tokens that went through the network during `action`."""
        ...


class NativeBench:
    def __init__(self, folder: Path, max_num_seqs: int, max_num_batched_tokens: int, dtype: torch.dtype) -> None:
        self._decoder = load_decoder(folder, dtype=dtype)
        self.engine = NativeEngine(self._decoder, max_num_seqs, max_num_batched_tokens)

    @torch.no_grad()
    def change_weights(self, folder: Path) -> None:
        fresh = dict(load_decoder(folder).named_parameters())
        for name, parameter in self._decoder.named_parameters():
            parameter.copy_(fresh[name])

    def count_tokens(self, action: Callable[[], Any]) -> int:
        counts: list[int] = []
        hook = self._decoder.register_forward_pre_hook(lambda module, args: counts.append(len(args[0])))
        action()
        hook.remove()
        return sum(counts)


ENGINES: dict[str, Callable[[Path, int, int, torch.dtype], Bench]] = {"native": NativeBench}


@dataclass
class Setup:
    """A model as transformers has it, and engines on the same weights."""

    oracle: PreTrainedModel
    folder: Path
    kind: str

    def bench(self, max_num_seqs: int = 256, max_num_batched_tokens: int = 8192, dtype: torch.dtype = torch.float32) -> Bench:
        return ENGINES[self.kind](self.folder, max_num_seqs, max_num_batched_tokens, dtype)

    def generate(self, requests: Sequence[GenerateRequest], **limits: int) -> list[list[Completion]]:
        return self.bench(**limits).engine.generate(requests)

    def greedy(self, prompt: np.ndarray, max_tokens: int, stops: tuple[int, ...] = ()) -> list[int]:
        """What transformers generates."""
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        out = self.oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=list(stops) or None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    @torch.no_grad()
    def logprobs(self, prompt: np.ndarray, tokens: np.ndarray, temperature: float) -> np.ndarray:
        """Teacher-forced, by transformers: the whole sequence in one pass, without a cache."""
        whole = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))
        logits = self.oracle(whole[None]).logits[0, len(prompt) - 1 : -1].double() / temperature
        return torch.log_softmax(logits, dim=-1).gather(1, whole[len(prompt) :, None]).squeeze(1).numpy()


@pytest.fixture(scope="module", params=ENGINES)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def setup(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(kind, "llama, untied", tmp_path_factory.mktemp("model"))


def make_setup(kind: str, family: str, folder: Path) -> Setup:
    # Weights this wide give distributions with a few likely tokens each, so that choices are choices.
    return Setup(write_model(folder, CONFIGS[family], seed=5, std=0.3), folder, kind)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, length).astype(np.int32)


def ask(length: int, max_tokens: int = 12, seed: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(prompt(length, seed), SamplingParams(max_tokens=max_tokens, seed=seed, **sampling))


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """The same tokens, and logprobs that differ by no more than the order of a sum."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


VARIED = [
    ask(length, max_tokens, seed=seed, n=n, temperature=temperature)
    for seed, (length, max_tokens, n, temperature) in enumerate(
        [(5, 30, 3, 1.0), (1, 1, 1, 1.0), (40, 7, 2, 0.7), (17, 60, 1, 1.3), (3, 2, 4, 1.0), (60, 25, 1, 0.0), (8, 45, 2, 1.0)]
    )
]
"""Requests with nothing in common."""


# ── what is sampled ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("family", ["llama, tied", "mistral, own head size", "qwen2, yarn rope", "qwen3, biases"])
def test_greedy_generation_equals_transformers(kind: str, family: str, tmp_path: Path) -> None:
    setup = make_setup(kind, family, tmp_path)
    requests = [ask(length, 40, seed=length, temperature=0.0) for length in (1, 2, 9, 33, 70)]
    for request, [completion] in zip(requests, setup.generate(requests), strict=True):
        assert completion.token_ids.tolist() == setup.greedy(request.prompt_ids, 40)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_logprobs_equal_a_teacher_forced_recomputation(setup: Setup, temperature: float) -> None:
    requests = [ask(length, 30, seed=length, n=3, temperature=temperature) for length in (1, 6, 25, 80)]
    for request, completions in zip(requests, setup.generate(requests), strict=True):
        for completion in completions:
            expected = setup.logprobs(request.prompt_ids, completion.token_ids, temperature)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_greedy_logprobs_are_those_at_temperature_one(setup: Setup) -> None:
    request = ask(9, 20, temperature=0.0)
    [[completion]] = setup.generate([request])
    expected = setup.logprobs(request.prompt_ids, completion.token_ids, 1.0)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_logprobs_in_bfloat16_are_near_the_float32_ones(setup: Setup) -> None:
    """Rounding at eight bits moves them, a mistake would move them by nats."""
    requests = [ask(length, 30, seed=length, n=3) for length in (6, 25, 80)]
    gaps = []
    for request, completions in zip(requests, setup.bench(dtype=torch.bfloat16).engine.generate(requests), strict=True):
        for completion in completions:
            gaps.append(completion.logprobs - setup.logprobs(request.prompt_ids, completion.token_ids, 1.0))
    assert np.abs(np.concatenate(gaps)).mean() < 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_are_drawn_as_often_as_the_policy_says(setup: Setup, temperature: float) -> None:
    """Chi-square over the first two tokens of 6,000 samples, against what transformers computes."""
    n = 6000
    request = ask(7, 2, seed=11, n=n, temperature=temperature)
    [completions] = setup.generate([request], max_num_seqs=n)
    drawn = np.stack([c.token_ids for c in completions])
    first = np.exp([setup.logprobs(request.prompt_ids, np.array([v]), temperature)[0] for v in range(VOCAB_SIZE)])
    assert_frequencies(drawn[:, 0], first)
    likeliest = int(first.argmax())
    after = np.concatenate([request.prompt_ids, [likeliest]])
    second = np.exp([setup.logprobs(after, np.array([v]), temperature)[0] for v in range(VOCAB_SIZE)])
    assert_frequencies(drawn[drawn[:, 0] == likeliest, 1], second)


def assert_frequencies(drawn: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square within five standard deviations, rare tokens pooled so that each cell expects at least five."""
    assert len(drawn) > 500
    counts, expected = np.bincount(drawn, minlength=len(probabilities)), len(drawn) * probabilities
    rare = expected < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], max(expected[rare].sum(), 1e-9))
    assert len(expected) > 5, "too sharp a distribution to tell anything"
    chi_square, freedom = ((counts - expected) ** 2 / np.maximum(expected, 1)).sum(), len(expected) - 1
    assert chi_square < freedom + 5 * math.sqrt(2 * freedom)


# ── where a completion ends ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stop_token_ends_a_completion_and_is_part_of_it(setup: Setup) -> None:
    request = ask(9, 40, temperature=0.0)
    free = setup.greedy(request.prompt_ids, 40)
    stop = next(token for position, token in enumerate(free) if position >= 5 and token not in free[:position])
    stopping = replace(request, sampling=replace(request.sampling, stop_token_ids=(stop,)))
    [[completion]] = setup.generate([stopping])
    assert completion.token_ids.tolist() == free[: free.index(stop) + 1]
    assert completion.token_ids.tolist() == setup.greedy(request.prompt_ids, 40, (stop,))
    assert completion.finish_reason == FinishReason.STOP


def test_any_of_several_stop_tokens_ends_a_completion(setup: Setup) -> None:
    stops = tuple(range(2, 80))
    [completions] = setup.generate([ask(9, 60, n=32, stop_token_ids=stops)])
    ended = [c for c in completions if c.finish_reason == FinishReason.STOP]
    assert len(ended) > 10
    for completion in completions:
        assert not set(completion.token_ids[:-1].tolist()) & set(stops)
        assert (completion.token_ids[-1] in stops) == (completion.finish_reason == FinishReason.STOP)


def test_stop_tokens_belong_to_their_own_request(setup: Setup) -> None:
    alone = [setup.generate([ask(9, 30, seed=s, n=4)])[0] for s in range(2)]
    stop = int(alone[0][0].token_ids[3])
    together = setup.generate([ask(9, 30, seed=0, n=4, stop_token_ids=(stop,)), ask(9, 30, seed=1, n=4)])
    assert_same(together[1], alone[1])
    assert together[0][0].finish_reason == FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [1, 2, 17])
def test_a_completion_without_a_stop_has_the_most_tokens_allowed(setup: Setup, max_tokens: int) -> None:
    [completions] = setup.generate([ask(9, max_tokens, n=3)])
    assert [len(c.token_ids) for c in completions] == [max_tokens] * 3
    assert {c.finish_reason for c in completions} == {FinishReason.LENGTH}


def test_a_stop_token_in_the_last_place_is_a_stop(setup: Setup) -> None:
    free = setup.greedy(prompt(9), 6)
    [[completion]] = setup.generate([ask(9, free.index(free[5]) + 1, temperature=0.0, stop_token_ids=(free[5],))])
    assert completion.finish_reason == FinishReason.STOP


def test_a_prompt_may_use_every_position_but_those_it_asks_for(setup: Setup) -> None:
    request = ask(MAX_POSITIONS - 4, 4, temperature=0.0)
    [[completion]] = setup.generate([request])
    assert completion.token_ids.tolist() == setup.greedy(request.prompt_ids, 4)


# ── in any company ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_same_request_gives_the_same_completions_again(setup: Setup) -> None:
    engine = setup.bench().engine
    for first, second in zip(engine.generate(VARIED), engine.generate(VARIED), strict=True):
        assert_same(first, second)


def test_a_request_gives_the_same_completions_alone_and_among_others(setup: Setup) -> None:
    alone = [setup.generate([request])[0] for request in VARIED]
    for found, expected in zip(setup.generate(VARIED), alone, strict=True):
        assert_same(found, expected)
    for found, expected in zip(reversed(setup.generate(VARIED[::-1])), alone, strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("max_num_seqs", [4, 5, 9])
def test_more_sequences_than_fit_at_once_change_nothing(setup: Setup, max_num_seqs: int) -> None:
    for found, expected in zip(setup.generate(VARIED, max_num_seqs=max_num_seqs), setup.generate(VARIED), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("max_num_batched_tokens", [1, 16, 64])
def test_prompts_longer_than_the_prefill_budget_change_nothing(setup: Setup, max_num_batched_tokens: int) -> None:
    found = setup.generate(VARIED, max_num_batched_tokens=max_num_batched_tokens)
    for one, expected in zip(found, setup.generate(VARIED), strict=True):
        assert_same(one, expected)


def test_rows_that_end_at_very_different_times_keep_their_own_outputs(setup: Setup) -> None:
    """From two rows per step down to one long survivor in the middle: every way to drop and move rows."""
    lengths = [1, 1, 2, 3, 100, 3, 5, 8, 13, 21, 34, 55, 89, 2, 1, 40]
    requests = [ask(1 + 3 * i, length, seed=i, n=1 + i % 3) for i, length in enumerate(lengths)]
    together = setup.generate(requests)
    for request, length, completions in zip(requests, lengths, together, strict=True):
        assert_same(completions, setup.generate([request])[0])
        for completion in completions:
            assert len(completion.token_ids) == length
            expected = setup.logprobs(request.prompt_ids, completion.token_ids, 1.0)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_row_that_ends_at_once_while_the_others_go_on_does_no_harm(setup: Setup) -> None:
    """It may stay in the batch for a while, but it has used up its own room."""
    requests = [ask(60, 1), *(ask(3, 50, seed=seed) for seed in range(1, 9))]
    for request, completions in zip(requests, setup.generate(requests), strict=True):
        assert_same(completions, setup.generate([request])[0])


def test_memory_that_nobody_wrote_is_never_read(setup: Setup) -> None:
    """A key that is masked out still meets a weight of zero, and zero times whatever lies in fresh memory may be NaN."""
    expected = setup.generate(VARIED)
    with fresh_memory_is_nan():
        found = setup.generate(VARIED)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


def test_completions_of_a_request_differ(setup: Setup) -> None:
    [completions] = setup.generate([ask(9, 12, n=16)])
    assert len({tuple(c.token_ids.tolist()) for c in completions}) == 16


def test_asking_for_fewer_completions_gives_the_first_of_them(setup: Setup) -> None:
    [many], [few] = setup.generate([ask(9, 12, n=8)]), setup.generate([ask(9, 12, n=3)])
    assert_same(few, many[:3])


def test_another_seed_gives_other_completions(setup: Setup) -> None:
    one, other = (
        setup.generate([GenerateRequest(prompt(9), SamplingParams(max_tokens=12, n=8, seed=seed))])[0] for seed in (1, 2)
    )
    tokens = [{tuple(c.token_ids.tolist()) for c in completions} for completions in (one, other)]
    assert not tokens[0] & tokens[1]


def test_a_prompt_goes_through_the_network_once_however_many_completions_it_has(setup: Setup) -> None:
    bench = setup.bench()
    requests = [ask(10, 1, n=8), ask(23, 1, seed=1, n=16)]
    assert bench.count_tokens(lambda: bench.engine.generate(requests)) == 33


def test_no_requests_give_no_completions(setup: Setup) -> None:
    assert setup.generate([]) == []


# ── the record ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_completion_is_flat_arrays_with_the_times_it_took(setup: Setup) -> None:
    for completions in setup.generate(VARIED, max_num_seqs=4):
        for completion in completions:
            assert completion.token_ids.dtype == np.int32
            assert completion.logprobs.dtype == np.float32
            assert completion.token_ids.shape == completion.logprobs.shape
            assert np.all(completion.logprobs <= 0)
            assert completion.queue_s >= 0
            assert completion.prefill_s > 0
            assert completion.decode_s >= 0


def test_completions_carry_the_version_that_was_applied_last(setup: Setup) -> None:
    engine = setup.bench().engine
    assert engine.generate([ask(3)])[0][0].versions == VersionSpan(0, 0)
    for version in (1, 2, 7):
        engine.apply(WeightUpdate(version, (), 0))
        assert engine.generate([ask(3)])[0][0].versions == VersionSpan(version, version)


def test_after_an_update_the_engine_samples_from_the_new_weights(setup: Setup, tmp_path: Path) -> None:
    """Nothing of the old policy may linger: no packed copy of a weight, no cached key."""
    bench = setup.bench()
    request = ask(20, 30, temperature=0.0)
    before = bench.engine.generate([request])[0][0]
    oracle = write_model(tmp_path, CONFIGS["llama, untied"])
    randomize(oracle, seed=6, std=0.3)
    oracle.save_pretrained(tmp_path)
    changed = tuple(name for name, _ in oracle.named_parameters())
    bench.change_weights(tmp_path)
    bench.engine.apply(WeightUpdate(1, changed, 0))
    after = bench.engine.generate([request])[0][0]
    new = replace(setup, oracle=oracle)
    assert after.token_ids.tolist() == new.greedy(request.prompt_ids, 30)
    assert after.token_ids.tolist() != before.token_ids.tolist()
    np.testing.assert_allclose(after.logprobs, new.logprobs(request.prompt_ids, after.token_ids, 1.0), atol=1e-4)


# ── what is refused ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("request_", "message", "hint"),
    [
        (ask(0), "no tokens", "at least one token"),
        (ask(MAX_POSITIONS - 3, 4), "exceed the model's 256 positions", "max_new_tokens"),
        (ask(MAX_POSITIONS + 1, 1), "exceed the model's 256 positions", "shorten the prompt"),
        (ask(3, n=5), "n = 5 does not fit engine.max_num_seqs = 4", "raise engine.max_num_seqs"),
        (ask(3, n=0), "n = 0", ""),
        (ask(3, 0), "max_tokens = 0", "at least one token"),
        (GenerateRequest(np.array([5, VOCAB_SIZE], dtype=np.int32), SamplingParams(4)), "outside the vocabulary", "tokenizer"),
        (GenerateRequest(np.array([5, -1], dtype=np.int32), SamplingParams(4)), "outside the vocabulary", "tokenizer"),
    ],
    ids=[
        "empty",
        "too long",
        "longer than the model",
        "too many",
        "none asked for",
        "no new tokens",
        "unknown token",
        "negative token",
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_anything_runs(
    setup: Setup, request_: GenerateRequest, message: str, hint: str
) -> None:
    bench = setup.bench(max_num_seqs=4)

    def try_it() -> None:
        with pytest.raises(EngineError, match=message) as caught:
            bench.engine.generate([ask(5), request_])
        assert hint in caught.value.hint

    assert bench.count_tokens(try_it) == 0
