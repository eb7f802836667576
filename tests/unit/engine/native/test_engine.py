"""What the engine samples, against transformers and against itself in other company."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from support.tiny_engines import (
    FEW,
    MIXED,
    PREFIX,
    SETTINGS,
    Model,
    ask,
    assert_nothing_held,
    assert_same,
    changed,
    finish,
    log_softmax,
    make_model,
    prompt,
    steps,
)

from redline.engine.native.running.sampler import stream
from redline.types import Completion, Delta, GenerateRequest, SamplingParams

VARIED = [
    *(ask(length, 14, seed=length, temperature=0.0) for length in (1, 2, 4, 9, 33, 70)),
    *(GenerateRequest(np.concatenate([PREFIX, prompt(n, n)]), SamplingParams(14, temperature=0.0)) for n in (1, 2, 3, 11)),
]
"""Prompts around the sizes of a block, and some that begin alike."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def each_alone(model: Model) -> list[list[Completion]]:
    return [model.alone(request) for request in MIXED]


# ── what is sampled ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def greedy(model: Model) -> list[list[int]]:
    return [model.greedy(request.prompt_ids, 14) for request in VARIED]


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_greedy_generation_equals_transformers(model: Model, greedy: list[list[int]], settings: dict[str, Any]) -> None:
    engine = model.engine(**settings)
    first = [completion.token_ids.tolist() for [completion] in engine.generate(VARIED)]
    again = [completion.token_ids.tolist() for [completion] in engine.generate(VARIED[::-1])]
    assert first == again[::-1] == greedy
    stats = engine.stats
    assert (stats.preemptions > 0) == ("num_blocks" in settings)
    assert (stats.prefix_hit_tokens > 0) == settings.get("enable_prefix_caching", True)
    if "max_num_batched_tokens" in settings:
        assert stats.steps > 2 * 70 / 7
    assert_nothing_held(engine)


@pytest.mark.parametrize("settings", FEW.values(), ids=FEW)
def test_sampled_logprobs_equal_a_teacher_forced_recomputation(model: Model, settings: dict[str, Any]) -> None:
    requests = [
        ask(length, 15, seed=length, n=1 + length % 3, temperature=temperature)
        for length, temperature in [(1, 1.0), (6, 0.7), (25, 1.5), (40, 1.0), (3, 0.0)]
    ]
    for request, completions in zip(requests, model.generate(requests, **settings), strict=True):
        for completion in completions:
            whole = np.concatenate([request.prompt_ids, completion.token_ids])
            logits = model.logits(whole)[len(request.prompt_ids) - 1 : -1] / (request.sampling.temperature or 1.0)
            expected = log_softmax(logits)[np.arange(15), completion.token_ids]
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4)


def test_a_prompt_and_what_decodes_meanwhile_go_through_the_network_in_one_pass(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model.engine()
    assert engine._runner is not None
    sizes: list[int] = []
    forward = engine._runner._forward

    def counted(tokens_T: Any, *rest: Any) -> Any:
        sizes.append(len(tokens_T))
        return forward(tokens_T, *rest)

    monkeypatch.setattr(engine._runner, "_forward", counted)
    early, late = ask(9, 8, seed=1, n=2), ask(33, 4, seed=2, n=3)
    first = engine.submit(early)
    events = [*engine.step(), *engine.step()]
    second = engine.submit(late)
    events += engine.step()
    assert sizes == [9, 2, 33 + 2]
    while engine.has_work:
        events += engine.step()
    for number, request in ((first, early), (second, late)):
        whole = {piece.index: piece.completion for found, piece in events if found == number and isinstance(piece, Delta)}
        assert_same([completion for _, completion in sorted(whole.items()) if completion], model.alone(request))


@pytest.mark.parametrize("settings", FEW.values(), ids=FEW)
def test_a_request_gives_the_same_in_any_company(
    model: Model, each_alone: list[list[Completion]], settings: dict[str, Any]
) -> None:
    settings = {**settings, "max_num_seqs": max(4, settings.get("max_num_seqs", 256))}
    if "num_blocks" in settings:
        settings["num_blocks"] = 26
    engine = model.engine(**settings)
    for found, expected in zip(engine.generate(MIXED), each_alone, strict=True):
        assert_same(found, expected)
    assert (engine.stats.preemptions > 0) == ("num_blocks" in settings)
    for found, expected in zip(reversed(engine.generate(MIXED[::-1])), each_alone, strict=True):
        assert_same(found, expected)
    assert_nothing_held(engine)


GAMMA = 0x9E3779B97F4A7C15


@pytest.mark.parametrize("length", [7, 8])
def test_n_completions_are_those_of_n_requests_with_the_same_streams(model: Model, length: int) -> None:
    """Completion i draws from the i-th number of splitmix64 after the seed, so that shifting the seed makes it the first."""
    request = ask(length, 20, seed=123, n=5)
    shifted = [(123 + index * GAMMA + 2**63) % 2**64 - 2**63 for index in range(5)]
    assert [stream(seed, 0) for seed in shifted] == [stream(123, index) for index in range(5)]
    [together] = model.generate([request])
    apart = [completion for seed in shifted for completion in model.alone(changed(request, n=1, seed=seed))]
    assert_same(together, apart)
    assert len({tuple(completion.token_ids.tolist()) for completion in together}) == 5


def test_a_prompt_is_computed_once_however_many_completions_it_has(model: Model) -> None:
    engine = model.engine()
    engine.generate([ask(10, 2, n=8), ask(23, 2, seed=1, n=16)])
    assert engine.stats.prompt_tokens == 33
    assert engine.stats.generated_tokens == 2 * (8 + 16)


# ── how a token is chosen ──────────────────────────────────────────────────────────────────────────────────────────────


def distribution(logits: np.ndarray, sampling: SamplingParams, num_sampled: int) -> np.ndarray:
    """float64[V] log-probabilities, as the fields of `SamplingParams` say."""
    logits = logits.copy()
    if sampling.allowed_token_ids is not None:
        logits[np.setdiff1d(np.arange(len(logits)), sampling.allowed_token_ids)] = -np.inf
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if num_sampled < sampling.min_tokens:
        logits[list(sampling.stop_token_ids)] = -np.inf
    logits /= sampling.temperature or 1.0
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        logits[order[sampling.top_k :]] = -np.inf
    share = np.exp(log_softmax(logits))[order]
    logits[order[np.cumsum(share) - share >= sampling.top_p]] = -np.inf
    logprobs = log_softmax(logits)
    logits[logprobs < logprobs.max() + math.log(sampling.min_p or 1e-300)] = -np.inf
    return log_softmax(logits)


EVERYTHING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "bias": {"logit_bias": {5: 4.0, 6: -2.0, 7: -math.inf}},
    "allowed": {"allowed_token_ids": tuple(range(10, 40))},
    "min_tokens": {"min_tokens": 6, "stop_token_ids": tuple(range(2, 10)), "logit_bias": {2: 8.0}},
    "greedy": {"temperature": 0.0, "logit_bias": {5: 2.0}},
    "all at once": {
        "temperature": 1.4,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "logit_bias": {12: 3.0, 13: -math.inf},
        "allowed_token_ids": tuple(range(2, 60)),
        "stop_token_ids": (12, 90),
        "min_tokens": 4,
    },
}


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 22}], ids=["roomy", "preempted"])
def test_logprobs_and_alternatives_are_those_of_the_distribution_asked_for(model: Model, settings: dict[str, Any]) -> None:
    requests = [
        ask(9, 16, seed=seed, n=2, raw_logprobs=True, top_logprobs=seed % 5 + 1, **fields)
        for seed, fields in enumerate(EVERYTHING.values())
    ]
    engine = model.engine(**settings)
    for request, completions in zip(requests, engine.generate(requests), strict=True):
        for completion in completions:
            assert_distribution(model, request, completion)
    assert (engine.stats.preemptions > 0) == bool(settings)


def assert_distribution(model: Model, request: GenerateRequest, completion: Completion) -> None:
    sampling, tokens = request.sampling, completion.token_ids
    logits = model.logits(np.concatenate([request.prompt_ids, tokens]))[len(request.prompt_ids) - 1 : -1]
    expected = np.stack([distribution(row, sampling, position) for position, row in enumerate(logits)])
    np.testing.assert_allclose(completion.logprobs, expected[np.arange(len(tokens)), tokens], atol=1e-4)
    assert completion.raw_logprobs is not None
    np.testing.assert_allclose(completion.raw_logprobs, log_softmax(logits)[np.arange(len(tokens)), tokens], atol=1e-4)
    top, k = completion.top_logprobs, sampling.top_logprobs
    assert top is not None
    assert top.token_ids.shape == top.logprobs.shape == (len(tokens), k)
    assert (top.token_ids.dtype, top.logprobs.dtype) == (np.int32, np.float32)
    np.testing.assert_allclose(top.logprobs, -np.sort(-expected, axis=1)[:, :k], atol=1e-4)
    possible = top.logprobs > -np.inf
    np.testing.assert_allclose(
        np.take_along_axis(expected, top.token_ids.astype(np.int64), axis=1)[possible], top.logprobs[possible], atol=1e-4
    )


def test_what_was_not_asked_for_is_not_there(model: Model) -> None:
    plain, rich = ask(9), ask(9, seed=1, raw_logprobs=True, top_logprobs=3, prompt_logprobs=True)
    [[without], [with_]] = model.generate([plain, rich])
    assert (without.raw_logprobs, without.top_logprobs, without.prompt_logprobs) == (None, None, None)
    assert with_.raw_logprobs is not None
    assert with_.top_logprobs is not None
    assert with_.prompt_logprobs is not None


# ── scored prompts ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("settings", FEW.values(), ids=FEW)
def test_prompt_logprobs_are_the_models_own(model: Model, settings: dict[str, Any]) -> None:
    """Whatever the sampling, for every completion, in chunks, after a preemption, and of a prompt that is cached already."""
    requests = [
        ask(length, 20, seed=length, n=n, prompt_logprobs=True, temperature=0.5, logit_bias={5: 9.0})
        for length, n in [(1, 1), (2, 2), (9, 3), (33, 2), (33, 1), (16, 1)]
    ]
    for request, completions in zip(requests, model.generate(requests, **settings), strict=True):
        tokens = request.prompt_ids
        expected = log_softmax(model.logits(tokens))[np.arange(len(tokens) - 1), tokens[1:]]
        for completion in completions:
            assert completion.prompt_logprobs is not None
            assert (completion.prompt_logprobs.dtype, completion.prompt_logprobs.shape) == (np.float32, (len(tokens),))
            assert math.isnan(completion.prompt_logprobs[0])
            np.testing.assert_allclose(completion.prompt_logprobs[1:], expected, atol=1e-4)


def test_a_prompt_that_was_given_up_is_scored_as_far_as_it_was_computed(model: Model) -> None:
    engine = model.engine(max_num_batched_tokens=8)
    number = engine.submit(ask(20, prompt_logprobs=True))
    engine.step()
    engine.abort(number)
    [completion] = finish(engine)[number]
    expected = log_softmax(model.logits(prompt(20)))[np.arange(19), prompt(20)[1:]]
    np.testing.assert_allclose(completion.prompt_logprobs[1:9], expected[:8], atol=1e-4)
    assert np.isnan(completion.prompt_logprobs[9:]).all()
    assert len(completion.prompt_logprobs) == 20


# ── pieces ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 7}, {"num_blocks": 26}], ids=["roomy", "chunks", "small"])
def test_pieces_put_together_are_the_completion(
    model: Model, each_alone: list[list[Completion]], settings: dict[str, Any]
) -> None:
    engine = model.engine(**settings)
    streamed = [engine.submit(changed(request, top_logprobs=2), streaming=True) for request in MIXED]
    quiet = engine.submit(MIXED[0])
    pieces: dict[tuple[int, int], list[Delta]] = {}
    for number, piece in steps(engine):
        assert isinstance(piece, Delta)
        pieces.setdefault((number, piece.index), []).append(piece)
    for number, expected in zip([*streamed, quiet], [*each_alone, each_alone[0]], strict=True):
        for index, completion in enumerate(expected):
            assert_pieces(pieces[number, index], completion, is_streamed=number != quiet)
    assert (engine.stats.preemptions > 0) == ("num_blocks" in settings)
    assert_nothing_held(engine)


def assert_pieces(pieces: list[Delta], expected: Completion, *, is_streamed: bool) -> None:
    *before, last = pieces
    assert all(piece.completion is None for piece in before)
    assert last.completion is not None
    assert_same([last.completion], [expected])
    if not is_streamed:
        assert (len(before), len(last.token_ids)) == (0, 0)
        return
    assert np.concatenate([piece.token_ids for piece in pieces]).tolist() == last.completion.token_ids.tolist()
    assert np.concatenate([piece.logprobs for piece in pieces]).tolist() == last.completion.logprobs.tolist()
    tops = [piece.top_logprobs for piece in pieces if piece.top_logprobs is not None]
    assert np.array_equal(np.concatenate([top.token_ids for top in tops]), last.completion.top_logprobs.token_ids)
    assert np.array_equal(np.concatenate([top.logprobs for top in tops]), last.completion.top_logprobs.logprobs)
    assert all(len(piece.token_ids) == 1 for piece in before), "a piece as soon as there is a token"


# ── the record, the counts ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_completion_says_how_long_it_took(model: Model) -> None:
    for completions in model.generate(MIXED, max_num_seqs=4):
        for completion in completions:
            assert completion.token_ids.dtype == np.int32
            assert completion.logprobs.dtype == np.float32
            assert completion.queue_s >= 0
            assert completion.prefill_s > 0
            assert (completion.decode_s > 0) == (len(completion.token_ids) > 1)


def test_the_counts_are_those_of_what_happened(model: Model) -> None:
    engine = model.engine(num_blocks=10, max_num_seqs=2)
    for seed in range(2):
        engine.submit(ask(9, 6, seed=seed, n=2))
    assert (engine.stats.running, engine.stats.waiting, engine.stats.steps) == (0, 4, 0)
    engine.step()
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.steps, stats.batch_size) == (2, 2, 1, 0)
    assert (stats.prompt_tokens, stats.generated_tokens, stats.requests) == (9, 2, 0)
    assert (stats.kv_blocks_used, stats.kv_blocks_total) == (2 + 2, 10)
    assert stats.kv_use == pytest.approx(0.4)
    engine.step()
    assert (engine.stats.batch_size, engine.stats.generated_tokens) == (2, 4)
    finish(engine)
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.requests, stats.kv_blocks_used) == (0, 0, 2, 0)
    assert (stats.prompt_tokens, stats.generated_tokens) == (18, 24)
    assert stats.tokens_per_s > 0


def test_completions_without_a_free_row_follow_on_the_computed_prompt_and_are_what_they_are_alone(model: Model) -> None:
    engine = model.engine(max_num_seqs=3)
    engine.submit(ask(9, 6, seed=1, n=2))
    split = engine.submit(ask(33, 8, seed=2, n=3))
    engine.step()
    assert (engine.stats.running, engine.stats.waiting) == (3, 2)
    assert_same(finish(engine)[split], model.alone(ask(33, 8, seed=2, n=3)))
    assert engine.stats.prompt_tokens == 9 + 33 + 1, "the last token is computed once more, to sample after it"


def test_completions_of_a_prompt_may_be_asked_for_in_several_requests(model: Model) -> None:
    whole = model.alone(ask(9, 12, seed=7, n=3))
    engine = model.engine()
    [first, second] = engine.generate([ask(9, 12, seed=7, n=1), ask(9, 12, seed=7, n=2, first_index=1)])
    assert_same([*first, *second], whole)


def test_nothing_to_do_is_a_step_without_events(model: Model) -> None:
    engine = model.engine()
    assert engine.step() == []
    assert engine.generate([]) == []


def test_generating_keeps_what_comes_out_for_others(model: Model) -> None:
    engine = model.engine()
    early = engine.submit(ask(9, 30, seed=1), streaming=True)
    engine.step()
    assert_same(engine.generate([ask(5, 8, seed=2)])[0], model.alone(ask(5, 8, seed=2)))
    found = finish(engine)
    assert_same(found[early], model.alone(ask(9, 30, seed=1)))
    assert_nothing_held(engine)
