"""What the engine cannot serve harms nobody else: requests that make no sense, and NaN."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.small_models import VOCAB_SIZE
from support.tiny_engines import (
    BYTES_PER_BLOCK,
    Letters,
    Model,
    ask,
    assert_nothing_held,
    assert_same,
    finish,
    make_model,
    prompt,
    steps,
)

from redline.engine import NativeEngine
from redline.errors import BrokenModelError, EngineError
from redline.types import Delta, GenerateRequest, SamplingParams, WeightUpdate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


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


def test_what_comes_out_beside_an_error_is_kept_for_its_own_caller(model: Model) -> None:
    engine = model.engine()
    with torch.no_grad():
        engine.decoder.embed[7] = float("nan")
    other = engine.submit(replace(ask(3, 1), prompt_ids=np.array([11, 12, 13], np.int32), order=(1, 0.0)))  # behind the other
    with pytest.raises(BrokenModelError):
        engine.generate([replace(ask(3, 3), prompt_ids=np.array([7, 7, 7], np.int32))])
    assert [number for number, piece in engine.step() if piece.completion is not None] == [other]
    assert not engine.has_work


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
