"""What every engine promises (`ports.Engine`), held against transformers. The engines are in `engine_benches.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engine_benches import ENGINES, FAMILIES, Bench, Kind, Size, Workshop, letters, write_tokenizer
from support.fresh_memory import fresh_memory_is_nan
from support.small_models import VOCAB_SIZE, randomize, write_model
from transformers import PreTrainedModel

from redline.errors import EngineError
from redline.types import Completion, FinishReason, GenerateRequest, SamplingParams, VersionSpan, WeightUpdate

MAX_POSITIONS = 256


@dataclass
class Setup:
    """A model as transformers has it, and engines on the same weights."""

    oracle: PreTrainedModel
    folder: Path
    name: str
    workshop: Workshop

    @property
    def kind(self) -> Kind:
        return ENGINES[self.name]

    def needs(self, ability: str) -> None:
        if not getattr(self.kind, ability):
            pytest.skip(f"{self.name}: {ability} is False")

    def bench(self, *, fresh: bool = False, **size: Any) -> Bench:
        return self.workshop.bench(self.name, self.folder, Size(**size), fresh=fresh)

    def generate(self, requests: Sequence[GenerateRequest], **size: Any) -> list[list[Completion]]:
        return self.bench(**size).engine.generate(requests)

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
    def model_logprobs(self, whole: np.ndarray) -> torch.Tensor:
        """[tokens, V]: of each next token, by transformers, in one pass without a cache."""
        return torch.log_softmax(self.oracle(torch.from_numpy(whole.astype(np.int64))[None]).logits[0].double(), dim=-1)

    def table(self, request: GenerateRequest, tokens: np.ndarray) -> torch.Tensor:
        """[tokens, V]: logprobs under the distribution that each of the tokens is sampled from."""
        whole = np.concatenate([request.prompt_ids, tokens])
        return shaped(self.model_logprobs(whole)[len(request.prompt_ids) - 1 : -1], request.sampling)

    def logprobs(self, request: GenerateRequest, tokens: np.ndarray) -> np.ndarray:
        return self.table(request, tokens)[np.arange(len(tokens)), tokens].numpy()


def shaped(logits_TV: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """What a sampler does to logits, one thing after the other and in no hurry."""
    logits_TV = logits_TV.clone()
    for token, bias in sampling.logit_bias.items():
        logits_TV[:, token] += bias
    if sampling.allowed_token_ids is not None:
        others = [token for token in range(logits_TV.shape[1]) if token not in sampling.allowed_token_ids]
        logits_TV[:, others] = -math.inf
    logits_TV[: sampling.min_tokens, list(sampling.stop_token_ids)] = -math.inf
    probabilities_TV = torch.softmax(logits_TV / (sampling.temperature or 1.0), dim=-1)
    for row in probabilities_TV:
        likeliest = row.argsort(descending=True)
        before = row[likeliest].cumsum(0) - row[likeliest]
        kept = (before < sampling.top_p) & (row[likeliest] >= sampling.min_p * row.max())
        kept[sampling.top_k or len(row) :] = False
        row[likeliest[~kept]] = 0
    return torch.log(probabilities_TV / probabilities_TV.sum(dim=-1, keepdim=True))


@pytest.fixture(scope="module")
def workshop() -> Iterator[Workshop]:
    workshop = Workshop()
    yield workshop
    workshop.close()


@pytest.fixture(scope="module", params=[pytest.param(name, marks=kind.marks) for name, kind in ENGINES.items()])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def setup(name: str, workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    return make_setup(name, workshop, "llama, untied", tmp_path_factory.mktemp("model"))


def make_setup(name: str, workshop: Workshop, family: str, folder: Path) -> Setup:
    write_tokenizer(folder)
    # Weights this wide give distributions with a few likely tokens each, so that choices are choices.
    return Setup(write_model(folder, ENGINES[name].configs[family], seed=5, std=0.3), folder, name, workshop)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_generation_equals_transformers(name: str, workshop: Workshop, family: str, tmp_path: Path) -> None:
    if family not in ENGINES[name].configs:
        pytest.skip(f"{name} is not tested with {family}")
    setup = make_setup(name, workshop, family, tmp_path)
    requests = [ask(length, 40, seed=length, temperature=0.0) for length in (1, 2, 9, 33, 70)]
    for request, [completion] in zip(requests, setup.generate(requests), strict=True):
        assert completion.token_ids.tolist() == setup.greedy(request.prompt_ids, 40)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
def test_logprobs_equal_a_teacher_forced_recomputation(setup: Setup, temperature: float) -> None:
    requests = [ask(length, 30, seed=length, n=3, temperature=temperature) for length in (1, 6, 25, 80)]
    for request, completions in zip(requests, setup.generate(requests), strict=True):
        for completion in completions:
            expected = setup.logprobs(request, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_greedy_logprobs_are_those_at_temperature_one(setup: Setup) -> None:
    request = ask(9, 20, temperature=0.0)
    [[completion]] = setup.generate([request])
    expected = setup.logprobs(request, completion.token_ids)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_logprobs_in_bfloat16_are_near_the_float32_ones(setup: Setup) -> None:
    """Rounding at eight bits moves them, a mistake would move them by nats."""
    setup.needs("computes_bfloat16")
    requests = [ask(length, 30, seed=length, n=3) for length in (6, 25, 80)]
    gaps = []
    for request, completions in zip(requests, setup.bench(dtype=torch.bfloat16).engine.generate(requests), strict=True):
        for completion in completions:
            gaps.append(completion.logprobs - setup.logprobs(request, completion.token_ids))
    assert np.abs(np.concatenate(gaps)).mean() < 0.1


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_tokens_are_drawn_as_often_as_the_policy_says(setup: Setup, temperature: float) -> None:
    """Chi-square over the first two tokens of 6,000 samples, against what transformers computes."""
    n = 6000
    request = ask(7, 2, seed=11, n=n, temperature=temperature)
    [completions] = setup.generate([request], **({"max_num_seqs": n} if setup.kind.refuses_large_n else {}))
    drawn = np.stack([c.token_ids for c in completions])
    first = setup.table(request, np.array([0]))[0].exp().numpy()
    assert_frequencies(drawn[:, 0], first)
    likeliest = int(first.argmax())
    second = setup.table(request, np.array([likeliest, 0]))[1].exp().numpy()
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


SHAPINGS: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 5},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.2},
    "a filter and temperature": {"top_k": 8, "temperature": 0.7},
    "logit_bias": {"logit_bias": {7: 4.0, 9: -3.0, 30: 5.0}},
    "a forbidden token": {"logit_bias": dict.fromkeys(range(60), -math.inf), "temperature": 0.8},
    "allowed_token_ids": {"allowed_token_ids": tuple(range(10, 40))},
    "min_tokens": {"min_tokens": 15, "stop_token_ids": tuple(range(1, 9))},
}


@pytest.mark.parametrize("shaping", SHAPINGS)
def test_logprobs_are_those_of_the_distribution_sampled_from(setup: Setup, shaping: str) -> None:
    requests = [ask(length, 20, seed=length, n=3, **SHAPINGS[shaping]) for length in (6, 25)]
    for request, completions in zip(requests, setup.generate(requests), strict=True):
        for completion in completions:
            np.testing.assert_allclose(completion.logprobs, setup.logprobs(request, completion.token_ids), atol=1e-4)


def test_raw_logprobs_are_those_of_the_model_itself(setup: Setup) -> None:
    request = ask(9, 20, n=3, temperature=0.6, top_k=10, raw_logprobs=True)
    plain = replace(request, sampling=SamplingParams(max_tokens=20))
    for completion in setup.generate([request])[0]:
        assert completion.raw_logprobs is not None
        np.testing.assert_allclose(completion.raw_logprobs, setup.logprobs(plain, completion.token_ids), atol=1e-4)
        np.testing.assert_allclose(completion.logprobs, setup.logprobs(request, completion.token_ids), atol=1e-4)


def test_prompt_logprobs_leave_out_the_first_token_alone(setup: Setup) -> None:
    request = ask(40, 3, n=2, temperature=0.6, prompt_logprobs=True)
    expected = setup.model_logprobs(request.prompt_ids)[np.arange(39), request.prompt_ids[1:]]
    for completion in setup.generate([request])[0]:
        assert completion.prompt_logprobs is not None
        assert math.isnan(completion.prompt_logprobs[0])
        np.testing.assert_allclose(completion.prompt_logprobs[1:], expected, atol=1e-4)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_likeliest_tokens_come_in_order_with_their_logprobs(setup: Setup, temperature: float) -> None:
    setup.needs("names_tops_by_id")
    request = ask(9, 15, n=2, temperature=temperature, top_logprobs=5)
    for completion in setup.generate([request])[0]:
        expected = setup.table(request, completion.token_ids).topk(5, dim=-1)
        assert completion.top_logprobs is not None
        np.testing.assert_allclose(completion.top_logprobs.logprobs, expected.values, atol=1e-4)
        assert completion.top_logprobs.token_ids.tolist() == expected.indices.tolist()


def test_what_was_not_asked_for_is_not_there(setup: Setup) -> None:
    for completion in setup.generate([ask(9)])[0]:
        assert completion.raw_logprobs is None
        assert completion.prompt_logprobs is None
        assert completion.top_logprobs is None
        assert completion.stop is None


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
    stops = tuple(range(2, 10))
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


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it(setup: Setup) -> None:
    free = setup.greedy(prompt(9), 40)
    texts = [letters(free[:end]) for end in range(41)]
    end = next(end for end in range(7, 40) if texts[end] != texts[end - 1] and texts[end][-2:] not in texts[end - 1])
    stops = ("not there", texts[end][-2:])
    [[completion], [other]] = setup.generate(
        [ask(9, 40, temperature=0.0, stop=stops), ask(9, 40, temperature=0.0, stop=("not there",))]
    )
    assert completion.token_ids.tolist() == free[:end]
    assert completion.finish_reason == FinishReason.STOP
    assert completion.stop == stops[1]
    assert other.token_ids.tolist() == free
    assert other.finish_reason == FinishReason.LENGTH


def test_no_completion_is_shorter_than_its_least_number_of_tokens(setup: Setup) -> None:
    [completions] = setup.generate([ask(9, 60, n=32, min_tokens=12, stop_token_ids=tuple(range(2, 10)))])
    assert all(len(c.token_ids) > 12 for c in completions)
    assert sum(c.finish_reason == FinishReason.STOP for c in completions) > 10


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
    setup.needs("takes_max_num_seqs")
    for found, expected in zip(setup.generate(VARIED, max_num_seqs=max_num_seqs), setup.generate(VARIED), strict=True):
        assert_same(found, expected)


@pytest.mark.parametrize("max_num_batched_tokens", [1, 16, 64])
def test_prompts_longer_than_the_prefill_budget_change_nothing(setup: Setup, max_num_batched_tokens: int) -> None:
    setup.needs("takes_chunks")
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
            expected = setup.logprobs(request, completion.token_ids)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_row_that_ends_at_once_while_the_others_go_on_does_no_harm(setup: Setup) -> None:
    """It may stay in the batch for a while, but it has used up its own room."""
    requests = [ask(60, 1), *(ask(3, 50, seed=seed) for seed in range(1, 9))]
    for request, completions in zip(requests, setup.generate(requests), strict=True):
        assert_same(completions, setup.generate([request])[0])


def test_memory_that_nobody_wrote_is_never_read(setup: Setup) -> None:
    """A key that is masked out still meets a weight of zero, and zero times whatever lies in fresh memory may be NaN."""
    setup.needs("shows_tokens")
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
    setup.needs("shows_tokens")
    bench = setup.bench()
    requests = [ask(10, 1, n=8), ask(23, 1, seed=1, n=16)]
    assert bench.count_tokens(lambda: bench.engine.generate(requests)) == 33


def test_no_requests_give_no_completions(setup: Setup) -> None:
    assert setup.generate([]) == []


# ── the record ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_completion_is_flat_arrays_with_the_times_it_took(setup: Setup) -> None:
    for completions in setup.generate(VARIED):
        for completion in completions:
            assert completion.token_ids.dtype == np.int32
            assert completion.logprobs.dtype == np.float32
            assert completion.token_ids.shape == completion.logprobs.shape
            assert np.all(completion.logprobs <= 0)
            assert completion.queue_s >= 0
            assert completion.prefill_s > 0
            assert completion.decode_s >= 0


def test_completions_carry_the_version_that_was_applied_last(setup: Setup) -> None:
    engine = setup.bench(fresh=True).engine
    assert engine.generate([ask(3)])[0][0].versions == VersionSpan(0, 0)
    for version in (1, 2, 7):
        engine.apply(WeightUpdate(version, (), 0))
        assert engine.generate([ask(3)])[0][0].versions == VersionSpan(version, version)


def test_after_an_update_the_engine_samples_from_the_new_weights(setup: Setup, tmp_path: Path) -> None:
    """Nothing of the old policy may linger: no packed copy of a weight, no cached key."""
    setup.needs("takes_weights")
    bench = setup.bench(fresh=True)
    request = ask(20, 30, temperature=0.0)
    before = bench.engine.generate([request])[0][0]
    oracle = write_model(tmp_path, setup.kind.configs["llama, untied"])
    randomize(oracle, seed=6, std=0.3)
    oracle.save_pretrained(tmp_path)
    changed = tuple(name for name, _ in oracle.named_parameters())
    bench.change_weights(tmp_path)
    bench.engine.apply(WeightUpdate(1, changed, 0))
    after = bench.engine.generate([request])[0][0]
    new = replace(setup, oracle=oracle)
    assert after.token_ids.tolist() == new.greedy(request.prompt_ids, 30)
    assert after.token_ids.tolist() != before.token_ids.tolist()
    np.testing.assert_allclose(after.logprobs, new.logprobs(request, after.token_ids), atol=1e-4)


# ── what is refused ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("request_", "message", "hint"),
    [
        (ask(0), "no tokens", "at least one token"),
        (ask(MAX_POSITIONS - 3, 4), "exceed the model's 256 positions", "max_new_tokens"),
        (ask(MAX_POSITIONS + 1, 1), "exceed the model's 256 positions", "shorten the prompt"),
        (ask(3, n=0), "n = 0", ""),
        (ask(3, 0), "max_tokens = 0", "at least one token"),
        (ask(3, top_p=0.0), "top_p = 0.0", "above 0"),
        (GenerateRequest(np.array([5, -1], dtype=np.int32), SamplingParams(4)), "outside the vocabulary", "tokenizer"),
        (replace(ask(3), adapter="nobody"), "unknown adapter 'nobody'", "load it first"),
    ],
    ids=[
        "empty",
        "too long",
        "longer than the model",
        "none asked for",
        "no new tokens",
        "no top_p",
        "negative token",
        "unknown adapter",
    ],
)
def test_a_request_that_cannot_be_served_is_refused_before_anything_runs(
    setup: Setup, request_: GenerateRequest, message: str, hint: str
) -> None:
    bench = setup.bench()

    def try_it() -> None:
        with pytest.raises(EngineError, match=message) as caught:
            bench.engine.generate([ask(5), request_])
        assert hint in caught.value.hint

    if setup.kind.shows_tokens:
        assert bench.count_tokens(try_it) == 0
    else:
        try_it()


def test_an_id_outside_the_vocabulary_is_refused_and_harms_nobody_else(setup: Setup) -> None:
    expected = setup.generate([ask(5)])
    with pytest.raises(EngineError, match=r"vocab|range"):
        setup.generate([ask(5), GenerateRequest(np.array([5, VOCAB_SIZE], dtype=np.int32), SamplingParams(4))])
    assert_same(setup.generate([ask(5)])[0], expected[0])


def test_more_completions_than_can_start_together_are_refused(setup: Setup) -> None:
    setup.needs("refuses_large_n")
    with pytest.raises(EngineError, match=r"n = 5 does not fit engine\.max_num_seqs = 4") as caught:
        setup.generate([ask(3, n=5)], max_num_seqs=4)
    assert "raise engine.max_num_seqs" in caught.value.hint
