"""The engine on tiny networks, against transformers and against itself in other company."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import CONFIGS, VOCAB_SIZE, random_model, write_model
from transformers import PreTrainedModel

from redline.config.schema import EngineConfig
from redline.engine import NativeEngine
from redline.engine.sampler import stream, uniform
from redline.errors import EngineError
from redline.models.hf import load_decoder
from redline.types import Completion, Delta, FinishReason, GenerateRequest, SamplingParams, VersionSpan, WeightUpdate

FAMILY = "llama, untied"
BLOCK_SIZE = 4
BYTES_PER_BLOCK = 2 * 2 * BLOCK_SIZE * 2 * 8 * 4
"""Keys and values, layers, tokens, key heads, head size, bytes."""


@dataclass
class Model:
    """One set of weights: transformers' network, and engines on it."""

    oracle: PreTrainedModel
    folder: Path
    known: dict[str, list[Completion]] = field(default_factory=dict)

    def engine(self, num_blocks: int | None = None, tokenizer: Any = None, **config: Any) -> NativeEngine:
        if num_blocks is not None:
            config["kv_cache_memory_bytes"] = (num_blocks + 1) * BYTES_PER_BLOCK
        return NativeEngine(load_decoder(self.folder), EngineConfig(**{"block_size": BLOCK_SIZE, **config}), tokenizer)

    def generate(self, requests: Sequence[GenerateRequest], **config: Any) -> list[list[Completion]]:
        return self.engine(**config).generate(requests)

    def alone(self, request: GenerateRequest) -> list[Completion]:
        """What it gives in an engine of its own with room for everything; worked out once."""
        key = f"{request.prompt_ids.tolist()} {request.sampling}"
        if key not in self.known:
            [self.known[key]] = self.generate([request])
        return self.known[key]

    @torch.no_grad()
    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """float64[tokens, V]: the whole sequence in one pass, without a cache."""
        return self.oracle(torch.from_numpy(tokens.astype(np.int64))[None]).logits[0].double().numpy()

    def greedy(self, prompt: np.ndarray, max_tokens: int) -> list[int]:
        """What transformers generates."""
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        out = self.oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    # Weights this wide give distributions with a few likely tokens each, so that choices are choices.
    return Model(write_model(folder, CONFIGS[FAMILY], seed=5, std=0.3), folder)


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, length).astype(np.int32)


def ask(length: int, max_tokens: int = 12, seed: int = 0, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(prompt(length, seed), SamplingParams(max_tokens=max_tokens, **{"seed": seed, **sampling}))


def changed(request: GenerateRequest, **sampling: Any) -> GenerateRequest:
    return replace(request, sampling=replace(request.sampling, **sampling))


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """The same tokens, and logprobs that differ by no more than the order of a sum."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert one.finish_reason == other.finish_reason
        assert one.stop == other.stop
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


def steps(engine: NativeEngine) -> Iterator[tuple[int, Delta | EngineError]]:
    """Until nothing is left to do."""
    while engine.has_work:
        yield from engine.step()


def finish(engine: NativeEngine) -> dict[int, list[Completion]]:
    """Step until nothing is left to do; the completions of every request."""
    found: dict[int, dict[int, Completion]] = {}
    for number, piece in steps(engine):
        assert isinstance(piece, Delta)
        if piece.completion is not None:
            found.setdefault(number, {})[piece.index] = piece.completion
    return {number: [one[index] for index in sorted(one)] for number, one in found.items()}


def assert_nothing_held(engine: NativeEngine) -> None:
    stats = engine.stats
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert sorted(engine._scheduler._free_rows) == list(range(engine._config.max_num_seqs))
    assert not engine.has_work


PREFIX = prompt(22, seed=99)
VARIED = [
    *(ask(length, 14, seed=length, temperature=0.0) for length in (1, 2, 4, 9, 33, 70)),
    *(GenerateRequest(np.concatenate([PREFIX, prompt(n, n)]), SamplingParams(14, temperature=0.0)) for n in (1, 2, 3, 11)),
]
"""Prompts around the sizes of a block, and some that begin alike."""
SETTINGS: dict[str, dict[str, Any]] = {
    "plenty of everything": {},
    "without prefix caching": {"enable_prefix_caching": False},
    "prompts in chunks": {"max_num_batched_tokens": 7},
    "chunks without prefix caching": {"max_num_batched_tokens": 7, "enable_prefix_caching": False},
    "a cache too small for all": {"num_blocks": 24},
    "too small, without prefix caching": {"num_blocks": 24, "enable_prefix_caching": False},
    "too small, in chunks": {"num_blocks": 24, "max_num_batched_tokens": 7},
    "too small, in chunks, without prefix caching": {
        "num_blocks": 24,
        "max_num_batched_tokens": 7,
        "enable_prefix_caching": False,
    },
    "three rows": {"max_num_seqs": 3},
    "blocks of sixteen": {"block_size": 16},
    "blocks of one": {"block_size": 1},
}
FEW = {
    name: SETTINGS[name]
    for name in (
        "plenty of everything",
        "prompts in chunks",
        "too small, in chunks, without prefix caching",
        "blocks of sixteen",
    )
}


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


def log_softmax(logits: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        centred = logits - logits.max(axis=-1, keepdims=True)
        return centred - np.log(np.exp(centred).sum(axis=-1, keepdims=True))


MIXED = [
    ask(5, 30, seed=1, n=3),
    ask(1, 1, seed=2),
    ask(40, 7, seed=3, n=2, temperature=0.7),
    ask(17, 30, seed=4, temperature=1.3, top_k=9, min_p=0.01),
    ask(4, 9, seed=5, n=4, top_p=0.8),
    ask(60, 25, seed=6, temperature=0.0),
    ask(8, 30, seed=7, n=2, stop_token_ids=(3, 30, 60, 90, 120)),
    ask(8, 30, seed=8, logit_bias={7: 3.0, 9: -math.inf}, allowed_token_ids=tuple(range(2, 60))),
]
"""Requests with nothing in common."""


@pytest.fixture(scope="module")
def each_alone(model: Model) -> list[list[Completion]]:
    return [model.alone(request) for request in MIXED]


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


# ── where a completion ends ────────────────────────────────────────────────────────────────────────────────────────────


def test_a_stop_token_ends_a_completion_and_is_part_of_it(model: Model) -> None:
    request = ask(9, 40, temperature=0.0)
    free = model.greedy(request.prompt_ids, 40)
    stop = next(token for position, token in enumerate(free) if position >= 5 and token not in free[:position])
    [completion] = model.alone(changed(request, stop_token_ids=(1, stop, 0)))
    assert completion.token_ids.tolist() == free[: free.index(stop) + 1]
    assert (completion.finish_reason, completion.stop) == (FinishReason.STOP, None)
    [completion] = model.alone(changed(request, stop_token_ids=(stop,), max_tokens=free.index(stop) + 1))
    assert completion.finish_reason == FinishReason.STOP, "in the very last place"


def test_without_a_stop_a_completion_has_the_most_tokens_allowed(model: Model) -> None:
    completions = model.alone(ask(9, 7, n=3))
    assert [(len(c.token_ids), c.finish_reason) for c in completions] == [(7, FinishReason.LENGTH)] * 3


@pytest.mark.parametrize("min_tokens", [0, 1, 5, 20])
def test_no_stop_token_comes_before_min_tokens(model: Model, min_tokens: int) -> None:
    stops = tuple(range(2, 10))
    completions = model.alone(
        ask(9, 20, n=8, min_tokens=min_tokens, stop_token_ids=stops, logit_bias=dict.fromkeys(stops, 9.0))
    )
    assert {len(c.token_ids) for c in completions} == {min(min_tokens + 1, 20)}
    for completion in completions:
        assert not set(completion.token_ids[:min_tokens].tolist()) & set(stops)


class Letters:
    """Tokens of two letters each; the second counts the first, so that no two are the same."""

    def piece(self, token: int) -> str:
        return chr(ord("a") + token % 26) + chr(ord("A") + token // 26)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(self.piece, token_ids))


class Bytes:
    """Tokens that are bytes of characters."""

    def __init__(self, *spelled: tuple[int, bytes]) -> None:
        self._bytes = dict(spelled)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return b"".join(self._bytes.get(int(token), b"x") for token in token_ids).decode(errors="replace")


def stopping(model: Model, *stops: str, min_tokens: int = 0) -> tuple[Completion, str]:
    """A greedy completion with these stop strings, and the text it would have without."""
    request = ask(9, 30, temperature=0.0)
    free = text_of(model.alone(request)[0])
    sampling = {"stop": stops, "min_tokens": min_tokens}
    [[completion]] = model.generate([changed(request, **sampling)], tokenizer=Letters())
    return completion, free


def text_of(completion: Completion) -> str:
    return Letters().decode(completion.token_ids.tolist(), skip_special_tokens=True)


@pytest.mark.parametrize(
    ("begin", "end"), [(20, 22), (20, 21), (21, 22), (21, 23), (19, 25), (0, 1), (58, 60), (11, 40)]
)
def test_a_completion_ends_with_the_token_that_completes_a_stop_string(model: Model, begin: int, end: int) -> None:
    """Whole tokens, halves of one, and strings over many."""
    _, free = stopping(model, "never")
    stop = free[begin:end]
    end = free.index(stop) + len(stop)
    completion, _ = stopping(model, stop)
    assert text_of(completion) == free[: end + end % 2]
    assert (completion.finish_reason, completion.stop) == (FinishReason.STOP, stop)
    assert len(completion.logprobs) == len(completion.token_ids)


def test_the_first_of_several_stop_strings_to_appear_ends_it(model: Model) -> None:
    _, free = stopping(model, "never")
    completion, _ = stopping(model, "never", free[31:35], free[16:20], free[41:45])
    assert completion.stop == free[16:20]
    assert text_of(completion) == free[:20]


def test_a_stop_string_that_never_comes_changes_nothing(model: Model) -> None:
    completion, free = stopping(model, "zZz", "never")
    assert text_of(completion) == free
    assert (completion.finish_reason, completion.stop) == (FinishReason.LENGTH, None)


def test_stop_strings_that_end_before_min_tokens_are_as_good_as_not_there(model: Model) -> None:
    _, free = stopping(model, "never")
    early, late = free[9:12], free[40:43]
    for min_tokens in (7, 9, 15):
        completion, _ = stopping(model, early, late, min_tokens=min_tokens)
        assert completion.stop == late, min_tokens
        assert text_of(completion) == free[:44]


def test_a_stop_string_may_be_completed_by_the_last_of_the_min_tokens(model: Model) -> None:
    _, free = stopping(model, "never")
    completion, _ = stopping(model, free[9:12], min_tokens=6)
    assert text_of(completion) == free[:12]
    assert completion.stop == free[9:12]


def test_a_stop_string_may_be_a_character_in_several_tokens(model: Model) -> None:
    request = ask(9, 30, temperature=0.0)
    free = model.greedy(request.prompt_ids, 30)
    at = next(i for i in range(4, 28) if len({*free[i : i + 3]}) == 3 and not {*free[i : i + 3]} & {*free[:i]})
    euro = Bytes(*zip(free[at : at + 3], (b"\xe2", b"\x82", b"\xac"), strict=True))
    [[completion]] = model.generate([changed(request, stop=("€",))], tokenizer=euro)
    assert completion.token_ids.tolist() == free[: at + 3]
    [[completion]] = model.generate([changed(request, stop=("€",), min_tokens=at + 2)], tokenizer=euro)
    assert completion.token_ids.tolist() == free[: at + 3], "its first bytes came before min_tokens, its last did not"


def test_stop_strings_are_found_under_preemption_and_cut_what_goes_with_the_tokens(model: Model) -> None:
    requests = [ask(9, 30, seed=seed, top_logprobs=2, raw_logprobs=True) for seed in range(8)]
    free = [Letters().decode(c.token_ids, skip_special_tokens=True) for [c] in model.generate(requests)]
    requests = [changed(request, stop=(text[25:29],)) for request, text in zip(requests, free, strict=True)]
    engine = model.engine(num_blocks=24, tokenizer=Letters())
    for text, [completion] in zip(free, engine.generate(requests), strict=True):
        assert text_of(completion) == text[:30]
        assert len(completion.logprobs) == len(completion.raw_logprobs) == len(completion.top_logprobs.token_ids) == 15
    assert engine.stats.preemptions > 0


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


# ── giving up ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_until(engine: NativeEngine, condition: Any) -> None:
    for _ in range(200):
        if condition():
            return
        assert not any(isinstance(piece, EngineError) for _, piece in engine.step())
    pytest.fail("it never came to that")


def aborted(engine: NativeEngine, number: int) -> list[Completion]:
    engine.abort(number)
    found = finish(engine)
    return found[number]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("stage", ["waiting", "prefilling", "decoding", "preempted"])
def test_a_request_can_be_given_up_at_any_time(model: Model, stage: str, streaming: bool) -> None:
    engine = model.engine(num_blocks=20, max_num_batched_tokens=9, max_num_seqs=4)
    others = [ask(9, 30, seed=seed) for seed in (1, 2)]
    request = ask(21, 30, seed=3, n=2)
    numbers = [engine.submit(other) for other in others]
    if stage == "waiting":
        numbers.append(engine.submit(ask(5, 5, seed=4, n=3)))
        others.append(ask(5, 5, seed=4, n=3))
    number = engine.submit(request, streaming=streaming)
    condition = {
        "waiting": lambda: engine.stats.steps == 1,
        "prefilling": lambda: bool(engine._scheduler.prefilling) and engine._scheduler.prefilling[0].request_id == number,
        "decoding": lambda: sum(s.request_id == number for s in engine._scheduler.decoding) == 2,
        "preempted": lambda: engine.stats.preemptions > 0,
    }[stage]
    run_until(engine, condition)
    engine.abort(number)
    engine.abort(number)
    found = finish(engine)
    for completion, whole in zip(found[number], model.alone(request), strict=True):
        assert completion.finish_reason == FinishReason.ABORT
        length = len(completion.token_ids)
        assert (length > 0) == (stage in ("decoding", "preempted"))
        assert completion.token_ids.tolist() == whole.token_ids[:length].tolist()
        assert len(completion.logprobs) == length
    for number, other in zip(numbers, others, strict=True):
        assert_same(found[number], model.alone(other))
    assert_nothing_held(engine)


def test_giving_up_what_is_unknown_or_finished_does_nothing(model: Model) -> None:
    engine = model.engine()
    engine.abort(17)
    number = engine.submit(ask(5))
    finish(engine)
    engine.abort(number)
    assert not engine.has_work


def test_the_completions_that_are_done_when_a_request_is_given_up_stay_done(model: Model) -> None:
    engine = model.engine()
    request = ask(9, 40, n=8, stop_token_ids=tuple(range(2, 10)))
    number = engine.submit(request)
    found = {}
    while not found:
        found = {piece.index: piece.completion for _, piece in engine.step()}
    engine.abort(number)
    given_up = {piece.index: piece.completion for _, piece in steps(engine)}
    assert found.keys() | given_up.keys() == set(range(8))
    assert not found.keys() & given_up.keys()
    assert {c.finish_reason for c in found.values()} == {FinishReason.STOP}
    assert {c.finish_reason for c in given_up.values()} == {FinishReason.ABORT}


# ── versions ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def change_weights(engine: NativeEngine, seed: int) -> Model:
    """New weights in the old storage, as a trainer puts them there."""
    fresh = Model(random_model(CONFIGS[FAMILY], seed=seed, std=0.3), Path())
    state = fresh.oracle.state_dict()
    weights = dict(engine.decoder.named_parameters())
    weights["embed"].copy_(state["model.embed_tokens.weight"])
    weights["norm"].copy_(state["model.norm.weight"])
    weights["lm_head"].copy_(state["lm_head.weight"])
    for index in range(2):
        ours, theirs = f"layers.{index}.", f"model.layers.{index}."
        weights[ours + "qkv.weight"].copy_(torch.cat([state[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv"]))
        weights[ours + "o.weight"].copy_(state[theirs + "self_attn.o_proj.weight"])
        weights[ours + "gate_up.weight"].copy_(torch.cat([state[f"{theirs}mlp.{x}_proj.weight"] for x in ("gate", "up")]))
        weights[ours + "down.weight"].copy_(state[theirs + "mlp.down_proj.weight"])
        weights[ours + "attn_norm"].copy_(state[theirs + "input_layernorm.weight"])
        weights[ours + "mlp_norm"].copy_(state[theirs + "post_attention_layernorm.weight"])
    return fresh


def test_after_an_update_nothing_of_the_old_policy_is_found(model: Model) -> None:
    engine = model.engine()
    request = GenerateRequest(np.concatenate([PREFIX, prompt(5)]), SamplingParams(20, temperature=0.0))
    for version in range(3):
        oracle = change_weights(engine, seed=20 + version)
        engine.apply(WeightUpdate(version, (), 0))
        for repetition in range(2):
            [[completion]] = engine.generate([request])
            assert completion.token_ids.tolist() == oracle.greedy(request.prompt_ids, 20)
            assert completion.versions == VersionSpan(version, version)
            assert completion.cached_tokens == (24 if repetition else 0)


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 9}, {"num_blocks": 30}], ids=["roomy", "chunks", "small"])
def test_requests_under_way_when_the_weights_change_spoil_nothing_for_those_that_come_later(
    model: Model, settings: dict[str, Any]
) -> None:
    """Their blocks mix two policies. Prompts that begin with theirs must be computed as if they had never been."""
    engine = model.engine(**settings)
    early = [GenerateRequest(np.concatenate([PREFIX, prompt(n, n)]), SamplingParams(16, temperature=0.0)) for n in (1, 5, 9)]
    early.append(changed(early[0], n=3, temperature=1.0))
    for request in early:
        engine.submit(request)
    for _ in range(6):
        engine.step()
    oracle = change_weights(engine, seed=31)
    engine.apply(WeightUpdate(1, (), 0))
    for _ in range(3):
        engine.step()
    half = finish(engine)
    for completions in half.values():
        for completion in completions:
            assert 0 <= completion.versions.oldest <= completion.versions.newest == 1
    assert any(c.versions.oldest == 0 for completions in half.values() for c in completions)
    turns = [
        GenerateRequest(
            np.concatenate([request.prompt_ids, half[number][0].token_ids, prompt(3)]), SamplingParams(9, temperature=0.0)
        )
        for number, request in enumerate(early)
    ]
    for request in [early[2], *turns[1:]]:
        [[completion]] = engine.generate([request])
        assert completion.token_ids.tolist() == oracle.greedy(request.prompt_ids, request.sampling.max_tokens)
        assert completion.versions == VersionSpan(1, 1)


def test_versions_cover_every_token_even_of_a_request_that_was_given_up(model: Model) -> None:
    engine = model.engine()
    numbers = [engine.submit(ask(5, 30, seed=seed), streaming=bool(seed)) for seed in range(2)]
    for version in range(3):
        engine.apply(WeightUpdate(version, (), 0))
        engine.step()
    for number in numbers:
        engine.abort(number)
    for [completion] in finish(engine).values():
        assert len(completion.token_ids) == 3
        assert completion.versions == VersionSpan(0, 2)


# ── prefixes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_cached_tokens_are_those_that_were_not_computed(model: Model) -> None:
    engine = model.engine()
    first = GenerateRequest(np.concatenate([PREFIX, prompt(1)]), SamplingParams(4))
    other = GenerateRequest(np.concatenate([PREFIX, prompt(9, 9)]), SamplingParams(4, n=3))
    assert [c.cached_tokens for c in engine.generate([first])[0]] == [0]
    computed = engine.stats.prompt_tokens
    assert [c.cached_tokens for c in engine.generate([other])[0]] == [20] * 3
    assert engine.stats.prompt_tokens - computed == len(other.prompt_ids) - 20
    assert engine.stats.prefix_query_tokens == 23 + 31
    assert engine.stats.prefix_hit_tokens == 20
    assert engine.stats.prefix_hit_rate == pytest.approx(20 / 54)


def test_a_next_turn_finds_what_was_said(model: Model) -> None:
    engine = model.engine()
    [[said]] = engine.generate([ask(10, 11, temperature=0.0)])
    turn = GenerateRequest(np.concatenate([prompt(10), said.token_ids, prompt(4, 4)]), SamplingParams(10, temperature=0.0))
    [[completion]] = engine.generate([turn])
    assert completion.cached_tokens == 20
    assert completion.token_ids.tolist() == model.greedy(turn.prompt_ids, 10)


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
    engine = model.engine(num_blocks=10, max_num_seqs=3)
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


# ── refusals ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def with_ids(*ids: int) -> GenerateRequest:
    return GenerateRequest(np.array(ids, np.int64), SamplingParams(4))


REFUSED: dict[str, tuple[GenerateRequest, str, str]] = {
    "no prompt": (ask(0), "no tokens", "at least one token"),
    "too long": (ask(60, 41), "exceed the model's 100 positions", "shorten the prompt"),
    "larger than the cache": (ask(60, 40), "exceed the KV cache of 80 tokens", "kv_cache_memory_bytes"),
    "more ends than blocks": (ask(74, 1, n=3), "n = 3 after a prompt of 74 tokens exceeds the KV cache", "lower n"),
    "an id beyond the vocabulary": (with_ids(5, VOCAB_SIZE), "outside the vocabulary", "tokenizer"),
    "an id beyond int32": (with_ids(5, 2**40), "outside the vocabulary", "tokenizer"),
    "a negative id": (with_ids(5, -1), "outside the vocabulary", "tokenizer"),
    "an unknown adapter": (replace(ask(5), adapter="poet"), "unknown adapter 'poet'", ""),
    "no new tokens": (ask(5, 0), "max_tokens = 0", "at least one"),
    "no completions": (ask(5, n=0), "n = 0", ""),
    "too many completions": (ask(5, n=5), "n = 5 does not fit engine.max_num_seqs = 4", "raise engine.max_num_seqs"),
    "a negative temperature": (ask(5, temperature=-0.1), "temperature = -0.1", "0, or between"),
    "a temperature of NaN": (ask(5, temperature=math.nan), "temperature = nan", ""),
    "an infinite temperature": (ask(5, temperature=math.inf), "temperature = inf", ""),
    "a temperature that overflows": (ask(5, temperature=1e-40), "temperature = 1e-40", ""),
    "top_k": (ask(5, top_k=-1), "top_k = -1", "0"),
    "a huge top_k": (ask(5, top_k=2**40), "top_k", ""),
    "top_p of 0": (ask(5, top_p=0.0), "top_p = 0.0", "above 0"),
    "top_p beyond 1": (ask(5, top_p=1.5), "top_p = 1.5", "at most 1"),
    "min_p": (ask(5, min_p=1.5), "min_p = 1.5", "between 0 and 1"),
    "min_p of NaN": (ask(5, min_p=math.nan), "min_p = nan", ""),
    "a seed beyond 64 bits": (ask(5, seed=2**63), "seed = ", "64-bit"),
    "min_tokens": (ask(5, 4, min_tokens=5), "min_tokens = 5", "max_tokens"),
    "top_logprobs": (ask(5, top_logprobs=21), "top_logprobs = 21", "20"),
    "negative top_logprobs": (ask(5, top_logprobs=-1), "top_logprobs = -1", ""),
    "too many stop tokens": (ask(5, stop_token_ids=tuple(range(9))), "9 stop tokens", "stop strings"),
    "a stop token beyond any vocabulary": (ask(5, stop_token_ids=(2**70,)), "stop_token_ids", "ids"),
    "stop strings without a tokenizer": (ask(5, stop=("x",)), "need a tokenizer", "stop_token_ids"),
    "a bias beyond the vocabulary": (ask(5, logit_bias={VOCAB_SIZE: 1.0}), "outside the vocabulary", ""),
    "a bias of NaN": (ask(5, logit_bias={3: math.nan}), "logit_bias", ""),
    "an infinite bias": (ask(5, logit_bias={3: math.inf}), "logit_bias", ""),
    "a mask beyond the vocabulary": (ask(5, allowed_token_ids=(3, -1)), "outside the vocabulary", ""),
    "an empty mask": (ask(5, allowed_token_ids=()), "allows no token", "at least one"),
    "a mask whose tokens are forbidden": (
        ask(5, allowed_token_ids=(3, 4), logit_bias={3: -math.inf, 4: -math.inf}),
        "allows no token",
        "-inf",
    ),
    "everything forbidden": (ask(5, logit_bias=dict.fromkeys(range(VOCAB_SIZE), -math.inf)), "allows no token", "-inf"),
    "only stop tokens, before min_tokens": (
        ask(5, allowed_token_ids=(3, 4, 5), stop_token_ids=(3, 4), min_tokens=1, logit_bias={5: -math.inf}),
        "min_tokens forbids them",
        "allow another",
    ),
    "all but a stop token forbidden, before min_tokens": (
        ask(5, stop_token_ids=(7,), min_tokens=1, logit_bias={t: -math.inf for t in range(VOCAB_SIZE) if t != 7}),
        "min_tokens forbids them",
        "",
    ),
}


@pytest.mark.parametrize(("request_", "message", "hint"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_served_is_refused_and_harms_nobody(
    model: Model, request_: GenerateRequest, message: str, hint: str
) -> None:
    engine = model.engine(num_blocks=20, max_num_seqs=4, max_model_len=100)
    good = [ask(9, 10, seed=1), ask(5, 10, seed=2)]
    numbers = [engine.submit(good[0])]
    engine.step()
    with pytest.raises(EngineError, match=message) as caught:
        engine.submit(request_)
    assert hint in caught.value.hint
    with pytest.raises(EngineError, match=message):
        engine.generate([ask(5, seed=3), request_])
    numbers.append(engine.submit(good[1]))
    found = finish(engine)
    assert found.keys() == set(numbers)
    for number, request in zip(numbers, good, strict=True):
        assert_same(found[number], model.alone(request))
    assert_nothing_held(engine)


def test_an_empty_stop_string_is_refused(model: Model) -> None:
    with pytest.raises(EngineError, match="a stop string is empty"):
        model.engine(tokenizer=Letters()).submit(ask(5, stop=("x", "")))


def test_a_cache_without_room_for_a_block_is_refused(model: Model) -> None:
    with pytest.raises(EngineError, match="does not hold one block") as caught:
        model.engine(kv_cache_memory_bytes=BYTES_PER_BLOCK)
    assert "kv_cache_memory_bytes" in caught.value.hint


def test_a_request_may_use_the_whole_cache_and_every_position(model: Model) -> None:
    engine = model.engine(num_blocks=20)
    request = ask(74, 6, temperature=0.0)
    assert engine.generate([request])[0][0].token_ids.tolist() == model.greedy(request.prompt_ids, 6)
    [completions] = engine.generate([ask(73, 4, n=2)])
    assert_same(completions, model.alone(ask(73, 4, n=2)))
    [[completion]] = model.generate([ask(250, 6, temperature=0.0)])
    assert completion.token_ids.tolist() == model.greedy(prompt(250), 6)


# ── NaN ────────────────────────────────────────────────────────────────────────────────────────────────────────────────

SICK = 100
"""A token whose embedding is NaN."""


def sick_engine(model: Model, **config: Any) -> NativeEngine:
    engine = model.engine(**config)
    with torch.no_grad():
        engine.decoder.embed[SICK] = math.nan
    return engine


def healthy(length: int, seed: int, **sampling: Any) -> GenerateRequest:
    """Neither reads nor writes the sick token."""
    request = ask(length, **{"max_tokens": 12, "seed": seed, "logit_bias": {SICK: -math.inf}, **sampling})
    request.prompt_ids[request.prompt_ids == SICK] = 2
    return request


def infected(request: GenerateRequest, at: int) -> GenerateRequest:
    ids = request.prompt_ids.copy()
    ids[at] = SICK
    return replace(request, prompt_ids=ids)


@pytest.mark.parametrize("n", [1, 3])
def test_weights_of_nan_are_an_error(model: Model, n: int) -> None:
    engine = model.engine(max_num_batched_tokens=16)
    with torch.no_grad():
        before = engine.decoder.layers[0].qkv.weight.clone()
        engine.decoder.layers[0].qkv.weight.fill_(math.nan)
    requests = [ask(9, 10, seed=1, n=n), ask(30, 10, seed=2), ask(9, 10, seed=3)]
    with pytest.raises(EngineError, match="the model gave NaN") as caught:
        engine.generate(requests)
    assert "NaN in the weights" in caught.value.hint
    assert_nothing_held(engine)
    with torch.no_grad():
        engine.decoder.layers[0].qkv.weight.copy_(before)
    engine.apply(WeightUpdate(1, (), 0))
    for found, request in zip(engine.generate(requests), requests, strict=True):
        assert_same(found, model.alone(request))


@pytest.mark.parametrize("at", [0, 10, 21])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 9}, {"num_blocks": 30}], ids=["roomy", "chunks", "small"])
def test_nan_in_one_request_is_nobody_elses_problem(model: Model, at: int, settings: dict[str, Any]) -> None:
    """Not of those beside it, not of those that begin alike, and not of those that get its blocks after it."""
    engine = sick_engine(model, **settings)
    requests = [healthy(22, 1), healthy(5, 2), healthy(22, 1, n=3, temperature=0.8), healthy(50, 3)]
    numbers = [engine.submit(request) for request in requests]
    sick = [engine.submit(infected(healthy(22, 1, n=n), at)) for n in (1, 3)]
    later = [engine.submit(request) for request in requests]
    errors, found = {}, {}
    for number, piece in steps(engine):
        if isinstance(piece, EngineError):
            errors[number] = piece
        elif piece.completion is not None:
            found.setdefault(number, {})[piece.index] = piece.completion
    assert errors.keys() == set(sick)
    for number, request in zip([*numbers, *later], [*requests, *requests], strict=True):
        assert_same([found[number][index] for index in sorted(found[number])], model.alone(request))
    assert_nothing_held(engine)
    fill = [healthy(40, seed) for seed in range(10, 14)]
    for completions, request in zip(engine.generate([*requests, *fill]), [*requests, *fill], strict=True):
        assert_same(completions, model.alone(request))


def test_nan_that_was_sampled_fails_its_request_and_no_other(model: Model) -> None:
    """The sick token is chosen at some time, and its embedding enters with the next step."""
    engine = sick_engine(model, num_blocks=40)
    doomed = engine.submit(healthy(9, 1, n=2, allowed_token_ids=(SICK,), logit_bias={}))
    well = engine.submit(healthy(9, 1))
    events = list(steps(engine))
    assert [number for number, piece in events if isinstance(piece, EngineError)] == [doomed]
    assert [number for number, piece in events if isinstance(piece, Delta)] == [well]
    for seed in range(6):
        assert_same(engine.generate([healthy(40, seed)])[0], model.alone(healthy(40, seed)))


def test_nan_that_nobody_lived_to_see_is_cleaned_up(model: Model) -> None:
    """Given up between two chunks of their prompts, before anything was sampled from the NaN in them."""
    engine = sick_engine(model, num_blocks=20, max_num_batched_tokens=16)
    for _ in range(2):
        numbers = [engine.submit(infected(healthy(40, 1, n=n), 2)) for n in (1, 2)]
        engine.step()
        for number in numbers:
            engine.abort(number)
        finish(engine)
    assert_nothing_held(engine)
    for seed in range(6):
        assert_same(engine.generate([healthy(40, seed)])[0], model.alone(healthy(40, seed)))


def test_a_request_that_failed_leaves_to_others_what_was_computed_before_the_nan(model: Model) -> None:
    """Attention that masks by adding -inf lets a NaN reach the tokens before it, but not those of an earlier chunk."""
    engine = sick_engine(model, max_num_batched_tokens=8)
    with pytest.raises(EngineError, match="NaN"):
        engine.generate([infected(healthy(22, 1), 15)])
    [completions] = engine.generate([healthy(22, 1)])
    assert_same(completions, model.alone(healthy(22, 1)))
    assert completions[0].cached_tokens == 8


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 8}], ids=["at once", "chunks"])
def test_whoever_builds_on_blocks_of_nan_fails_and_is_never_wrong(model: Model, settings: dict[str, Any]) -> None:
    """A prompt that begins alike takes blocks over while they are computed, before anybody could know."""
    engine = sick_engine(model, **settings)
    engine.submit(infected(healthy(22, 1), 6))
    near = [engine.submit(healthy(22, 1)) for _ in range(2)]
    far = engine.submit(healthy(22, 2))
    events = list(steps(engine))
    failed = {number for number, piece in events if isinstance(piece, EngineError)}
    assert far not in failed
    for number, piece in events:
        if isinstance(piece, Delta):
            assert_same([piece.completion], model.alone(healthy(22, 2) if number == far else healthy(22, 1)))
    assert_nothing_held(engine)
    assert_same(engine.generate([healthy(22, 1)])[0], model.alone(healthy(22, 1)))
    assert failed <= {0, *near}


# ── sleep ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_sleep_changes_nothing_but_the_time_it_takes(model: Model, each_alone: list[list[Completion]]) -> None:
    engine = model.engine(max_num_batched_tokens=24)
    requests = [changed(request, prompt_logprobs=True) for request in MIXED]
    numbers = [engine.submit(request) for request in requests]
    gone = engine.submit(ask(9, 30))
    found: dict[int, list[Completion]] = {}
    for _ in range(9):
        for number, piece in engine.step():
            if piece.completion is not None:
                found.setdefault(number, []).append(piece.completion)
        engine.sleep()
        with pytest.raises(EngineError, match="asleep"):
            engine.step()
        if engine.stats.steps == 4:
            engine.abort(gone)
        engine.wake()
    for number, completions in finish(engine).items():
        found.setdefault(number, []).extend(completions)
    for number, request, expected in zip(numbers, requests, each_alone, strict=True):
        completions = sorted(found[number], key=lambda c: [o.token_ids.tolist() for o in expected].index(c.token_ids.tolist()))
        assert_same(completions, expected)
        scores = log_softmax(model.logits(request.prompt_ids))[np.arange(len(request.prompt_ids) - 1), request.prompt_ids[1:]]
        for completion in completions:
            np.testing.assert_allclose(completion.prompt_logprobs[1:], scores, atol=1e-4)
    assert_nothing_held(engine)


def test_a_request_can_be_given_up_after_a_sleep(model: Model) -> None:
    engine = model.engine()
    engine.sleep()
    engine.wake()
    numbers = [engine.submit(ask(9, 30, logit_bias={3: 1.0})) for _ in range(2)]
    engine.step()
    engine.abort(numbers[0])
    engine.apply(WeightUpdate(1, (), 0))
    assert len(finish(engine)[numbers[1]][0].token_ids) == 30
    assert_nothing_held(engine)


# ── anything at all ────────────────────────────────────────────────────────────────────────────────────────────────────


def random_request(rng: np.random.Generator) -> GenerateRequest:
    """One of few, so that prompts often begin alike and nothing has to be worked out too often."""
    seed = int(rng.integers(12))
    start = PREFIX[: int(np.random.default_rng(seed).choice([0, 3, 8, 16, 21]))]
    ids = np.concatenate([start, prompt(1 + seed % 7, seed)]).astype(np.int32)
    stops = (3, 30, 60) if seed % 3 == 0 else ()
    temperature = [1.0, 0.0, 0.7][seed % 3]
    return GenerateRequest(
        ids, SamplingParams(4 + 2 * seed, n=1 + seed % 4, temperature=temperature, seed=seed, stop_token_ids=stops)
    )


def fuzz(model: Model, seed: int) -> None:
    rng = np.random.default_rng(seed)
    engine = model.engine(
        num_blocks=int(rng.integers(14, 40)),
        max_num_seqs=int(rng.integers(4, 9)),
        max_num_batched_tokens=int(rng.choice([5, 16, 200])),
        enable_prefix_caching=bool(rng.integers(2)),
    )
    asked: dict[int, GenerateRequest] = {}
    streamed: dict[tuple[int, int], list[int]] = {}
    found: dict[tuple[int, int], Completion] = {}

    def take(events: list[tuple[int, Delta | EngineError]]) -> None:
        for number, piece in events:
            assert isinstance(piece, Delta)
            streamed.setdefault((number, piece.index), []).extend(piece.token_ids.tolist())
            if piece.completion is not None:
                assert (number, piece.index) not in found
                found[number, piece.index] = piece.completion

    streaming = set()
    for action in rng.choice(["submit", "step", "abort", "apply", "refuse"], size=60, p=[0.3, 0.55, 0.07, 0.04, 0.04]):
        if action == "submit":
            request, flag = random_request(rng), bool(rng.integers(2))
            number = engine.submit(request, streaming=flag)
            asked[number] = request
            streaming |= {number} if flag else set()
        elif action == "step":
            take(engine.step())
        elif action == "abort" and asked:
            engine.abort(int(rng.choice(list(asked))))
        elif action == "apply":
            engine.apply(WeightUpdate(engine.version + 1, (), 0))
        elif action == "refuse":
            with pytest.raises(EngineError):
                engine.submit(ask(200, 50))
    take(list(steps(engine)))
    assert_nothing_held(engine)
    assert found.keys() == {(number, index) for number, request in asked.items() for index in range(request.sampling.n)}
    for (number, index), completion in found.items():
        assert_as_alone(model, asked[number], index, completion, model.alone(asked[number])[index])
        if number in streaming:
            assert streamed[number, index] == completion.token_ids.tolist()


def assert_as_alone(model: Model, request: GenerateRequest, index: int, found: Completion, alone: Completion) -> None:
    """Equal, or the beginning where it was given up. In other company a sum may be rounded otherwise, and a draw that falls on
    the very border between two tokens may then fall on its other side."""
    count = len(found.token_ids)
    if found.finish_reason != FinishReason.ABORT:
        assert found.finish_reason == alone.finish_reason
    same = found.token_ids == alone.token_ids[:count]
    if same.all():
        assert found.finish_reason == FinishReason.ABORT or count == len(alone.token_ids)
        np.testing.assert_allclose(found.logprobs, alone.logprobs[:count], atol=1e-4)
        return
    at = int(np.argmin(same))
    logits = model.logits(np.concatenate([request.prompt_ids, found.token_ids[:at]]))[-1]
    candidates = sorted([int(found.token_ids[at]), int(alone.token_ids[at])])
    if request.sampling.temperature == 0:
        assert abs(logits[candidates[0]] - logits[candidates[1]]) < 1e-4
        return
    share = np.exp(log_softmax(logits / request.sampling.temperature))
    draw = uniform(torch.tensor([stream(request.sampling.seed, index)]), torch.tensor([at])).item()
    assert abs(share[: candidates[0] + 1].sum() - draw) < 1e-5
    assert abs(share[: candidates[1]].sum() - draw) < 1e-5


@pytest.mark.parametrize("seed", range(4))
def test_whatever_happens_each_request_gives_what_it_gives_alone(model: Model, seed: int) -> None:
    fuzz(model, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1040))
def test_whatever_happens_for_long_each_request_gives_what_it_gives_alone(model: Model, seed: int) -> None:
    for number in range(10):
        fuzz(model, 100 * seed + number)
