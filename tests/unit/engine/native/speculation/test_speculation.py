"""With guessed tokens an engine samples what it samples without, in fewer steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ahead_engine import AheadEngine
from support.small_models import CONFIGS, write_model
from support.tiny_engines import (
    FAMILY,
    FEW,
    MIXED,
    Letters,
    Model,
    ask,
    assert_nothing_held,
    assert_same,
    changed,
    finish,
    make_model,
)

from redline.config.sections.engine import ServedEngineConfig
from redline.engine import NativeEngine
from redline.engine.native.running.verification import Drafts
from redline.engine.native.speculation.costs import ENOUGH, MEMORY
from redline.errors import BrokenModelError, EngineError
from redline.models.files.hf import load_decoder
from redline.types import Completion, Delta, GenerateRequest, WeightUpdate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("kind", [NativeEngine, AheadEngine])
@pytest.mark.parametrize("settings", FEW.values(), ids=FEW)
def test_the_second_time_the_same_is_sampled_in_fewer_steps(
    model: Model, settings: dict[str, Any], kind: type[NativeEngine]
) -> None:
    engine = model.engine(kind=kind, speculation="always", **settings)
    steps = []
    for _ in range(2):
        before = engine.stats.steps
        for found, request in zip(engine.generate(MIXED), MIXED, strict=True):
            assert_same(found, model.alone(request))
        steps.append(engine.stats.steps - before)
    counts = engine._speculation.counts
    assert 0 < counts.accepted_tokens <= counts.drafted_tokens
    assert steps[1] < steps[0] or kind is AheadEngine
    assert_nothing_held(engine)


def test_an_attempt_that_is_known_takes_a_step_for_every_dozen_tokens(model: Model) -> None:
    engine = model.engine(speculation="always")
    request = ask(9, 64, seed=3)
    [first] = engine.generate([request])
    before = engine.stats.steps
    [second] = engine.generate([request])
    assert_same(second, first)
    assert engine.stats.steps - before <= 8


def test_another_attempt_at_the_same_task_is_guessed_from_and_of_no_other(model: Model) -> None:
    known, request = ask(9, 48, seed=3), replace(ask(9, 48, seed=3), task="sum/1")
    engine, other = (model.engine(speculation="always") for _ in range(2))
    [[found]] = engine.generate([known])
    other.remember("sum/1", np.concatenate([known.prompt_ids, found.token_ids]))
    for task, is_known in (("sum/2", False), ("sum/1", True)):
        before = other.stats.accepted_tokens
        [[again]] = other.generate([replace(request, task=task)])
        assert again.token_ids.tolist() == found.token_ids.tolist()
        assert (other.stats.accepted_tokens - before > 40) == is_known


@pytest.mark.parametrize("token", [-1, 100_000])
def test_an_attempt_of_another_model_is_refused(model: Model, token: int) -> None:
    with pytest.raises(EngineError, match="outside the vocabulary"):
        model.engine(speculation="always").remember("sum/1", np.array([5, token], np.int32))


def test_a_text_that_repeats_itself_is_guessed_as_far_as_a_draft_goes(model: Model) -> None:
    engine = model.engine(speculation="always")
    request = ask(9, 60, seed=3, allowed_token_ids=(7,))
    before = engine.stats.steps
    [[found]] = engine.generate([request])
    assert found.token_ids.tolist() == [7] * 60
    assert engine.stats.steps - before < 30


def test_raw_and_top_logprobs_are_those_of_the_tokens_that_count(model: Model) -> None:
    request = ask(9, 40, seed=3, n=2, raw_logprobs=True, top_logprobs=3)
    [expected] = model.generate([request])
    engine = model.engine(speculation="always")
    for _ in range(2):
        [found] = engine.generate([request])
        assert_same(found, expected)
        for one, other in zip(found, expected, strict=True):
            assert one.raw_logprobs is not None
            assert other.raw_logprobs is not None
            assert one.top_logprobs is not None
            assert other.top_logprobs is not None
            np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=1e-4)
            assert one.top_logprobs.token_ids.tolist() == other.top_logprobs.token_ids.tolist()
    assert engine._speculation.counts.accepted_tokens


def test_stop_strings_end_a_completion_in_the_middle_of_what_was_accepted(model: Model) -> None:
    [free] = model.generate([ask(9, 40, seed=3)])
    letters = Letters()
    stop = letters.piece(int(free[0].token_ids[20]))
    request = ask(9, 40, seed=3, stop=(stop,))
    [expected] = model.generate([request], tokenizer=letters)
    engine = model.engine(speculation="always", tokenizer=letters)
    engine.generate([ask(9, 40, seed=3)])
    before = engine.stats.generated_tokens
    [found] = engine.generate([request])
    assert_same(found, expected)
    assert found[0].stop == stop
    assert engine.stats.generated_tokens - before == len(found[0].token_ids), "those behind the stop string do not count"
    assert engine._speculation.counts.accepted_tokens


def test_a_stop_token_is_sampled_and_never_guessed(model: Model) -> None:
    [free] = model.generate([ask(9, 40, seed=3)])
    stop = int(free[0].token_ids[20])
    for min_tokens in (0, 30):
        request = ask(9, 40, seed=3, stop_token_ids=(stop,), min_tokens=min_tokens)
        engine = model.engine(speculation="always")
        engine.generate([ask(9, 40, seed=3)])
        [found] = engine.generate([request])
        assert_same(found, model.alone(request))


@pytest.mark.parametrize("count", [20, pytest.param(600, marks=pytest.mark.slow)])
def test_weights_that_change_under_way_are_the_ones_that_sample(model: Model, tmp_path: Path, count: int) -> None:
    """Each completion says at which tokens the weights changed. Sampled alone, without guesses and with the weights changed
    there, it is the same."""
    write_model(tmp_path, CONFIGS[FAMILY], seed=21, std=0.3)
    engine = model.engine(speculation="always", max_num_seqs=24)
    weights = [dict(load_decoder(folder).named_parameters()) for folder in (model.folder, tmp_path)]
    requests = [request for request in crowd(count, seed=5) if not request.sampling.stop]
    engine.generate(requests)  # so that there is something to guess from
    numbers = [engine.submit(request) for request in requests]
    found: dict[tuple[int, int], Completion] = {}
    for step in itertools.count(1):
        if not engine.has_work:
            break
        found |= {(number, piece.index): piece.completion for number, piece in engine.step() if piece.completion is not None}
        if step % 3 == 0:
            change(engine, weights, engine.version + 1)
    assert engine._speculation.counts.accepted_tokens > 0
    assert any(completion.switches for completion in found.values())
    for number, request in zip(numbers, requests, strict=True):
        for index in range(request.sampling.n):
            assert_same([found[number, index]], [alone_with_changes(model, weights, request, index, found[number, index])])


@torch.no_grad()
def change(engine: NativeEngine, weights: Sequence[dict[str, torch.Tensor]], version: int) -> None:
    """Odd versions have one set of weights, even ones another."""
    for name, parameter in engine.decoder.named_parameters():
        parameter.copy_(weights[version % 2][name])
    engine.apply(WeightUpdate(version, (), 0))


def alone_with_changes(
    model: Model, weights: Sequence[dict[str, torch.Tensor]], request: GenerateRequest, index: int, like: Completion
) -> Completion:
    engine = model.engine()
    change(engine, weights, like.versions.oldest)
    number = engine.submit(changed(request, n=1, first_index=index))
    for count, version in like.switches:
        while engine.sampled_tokens(number)[index] < count:
            engine.step()
        change(engine, weights, version)
    return finish(engine)[number][0]


def test_a_model_of_nan_fails_its_request_and_no_other(model: Model) -> None:
    engine = model.engine(speculation="always")
    request = ask(9, 40, seed=3)
    engine.generate([request])
    with torch.no_grad():
        engine.decoder.norm.fill_(math.nan)
    with pytest.raises(BrokenModelError):
        engine.generate([request])


def test_weights_that_are_broken_for_a_token_break_only_what_it_is_sampled_in(model: Model) -> None:
    """A guess that is wrong, or behind a stop string, goes through the network too. What it leaves there reaches nobody."""
    letters = Letters()
    [[free]] = model.generate([ask(9, 40, seed=3)])
    said = free.token_ids.tolist()
    wrong = next(token for token in range(2, 100) if token not in said)
    stop = letters.piece(said[20])
    whole, stopped = (replace(ask(9, 40, seed=3, **more), task="sum") for more in ({}, {"stop": (stop,)}))
    for request, broken, known in (
        (whole, wrong, [*said[:12], wrong, *said[13:24], wrong, *said[25:]]),
        (stopped, said[21], said),
    ):
        if broken in said[:21]:
            continue
        plain, engine = (model.engine(speculation=mode, tokenizer=letters) for mode in ("off", "always"))
        for each in (plain, engine):
            break_token(each, broken)
        engine.remember("sum", np.concatenate([request.prompt_ids, known]).astype(np.int32))
        [expected], [found] = plain.generate([request]), engine.generate([request])
        assert_same(found, expected)
        assert engine.stats.drafted_tokens
        assert engine.stats.generated_tokens == len(found[0].token_ids)


@torch.no_grad()
def break_token(engine: NativeEngine, token: int) -> None:
    """Put NaN into its embedding, and not into its logits."""
    decoder = engine.decoder
    if decoder.lm_head is None:
        decoder.lm_head = torch.nn.Parameter(decoder.embed.detach().clone())
    decoder.embed[token] = math.nan


def test_auto_measures_plain_steps_first_and_guesses_where_that_pays(model: Model) -> None:
    engine = model.engine(speculation="auto")
    speculation, request = engine._speculation, ask(9, 60, seed=3)
    assert not speculation.may_draft(1, 256)
    [expected] = engine.generate([request])
    assert not speculation.costs.needs_plain(1)
    for tokens in [*range(2, 17)] * ENOUGH:
        speculation.costs.add_verifying(tokens, 1.0)
    for seconds, pays in [(1e-9, False), (1e9, True)]:  # no machine is faster than the one, and none slower than the other
        for _ in range(MEMORY):
            speculation.costs.add_plain(1, seconds)
        speculation._looks_again = 0.0
        before = engine.stats
        number = engine.submit(request)
        for _ in range(4):
            engine.step()
        assert (engine.stats.accepted_tokens > before.accepted_tokens) == pays
        engine.abort(number)
        finish(engine)
    [found] = engine.generate([request])
    assert_same(found, expected)


def test_saved_seconds_are_steps_not_taken_less_what_verifying_took_longer(model: Model) -> None:
    speculation = model.engine(speculation="auto")._speculation
    for _ in range(ENOUGH):
        speculation.took(2.0, 4, 1)
    speculation.learn({}, {})
    speculation._last = 12, 6
    speculation.took(2.5, 4, 1, 16)
    assert speculation.counts.saved_s == pytest.approx(6 / 4 * 2.0 - 0.5)
    speculation._last = 12, 0
    speculation.took(2.5, 4, 1, 16)
    assert speculation.counts.saved_s == pytest.approx(6 / 4 * 2.0 - 1.0)


def test_a_machine_that_stands_still_in_a_verifying_step_is_not_what_guessing_cost(model: Model) -> None:
    speculation = model.engine(speculation="auto")._speculation
    for _ in range(ENOUGH):
        speculation.took(2.0, 4, 1)
    for seconds in (2.5, 3600.0):
        speculation._last = 12, 6
        speculation.took(seconds, 4, 1, 16)
    assert speculation.counts.saved_s == pytest.approx(2 * (6 / 4 * 2.0 - 0.5))
    speculation._last = 12, 6
    speculation.took(4 * 3600.0, 4, 4, 16)
    assert speculation.counts.saved_s == pytest.approx(2 * (6 / 4 * 2.0 - 0.5) + 6 / 4 * 2.0 - 4 * 0.5)


def test_a_device_tries_guesses_that_fail_less_and_less_often(model: Model) -> None:
    engine = model.engine(speculation="auto")
    speculation, request = engine._speculation, ask(9, 60, seed=3)
    engine.submit(request)
    engine.step()
    [sequence] = engine._scheduler.decoding
    for _ in range(ENOUGH):
        speculation.took(1.0, 1, 1)
        speculation.took(1.5, 1, 1, 16)

    def launches_until_a_guess() -> int:
        return next(count for count in itertools.count() if speculation.guesses([sequence], 512))

    pauses = []
    for _ in range(4):
        pauses.append(launches_until_a_guess())
        for _ in range(2):  # the second was launched before the first was known
            speculation.learn_guesses([sequence], np.array([0]), np.array([4]), 60)
    assert pauses[0] == 0
    assert pauses[1] < pauses[2] < pauses[3]
    launches_until_a_guess()
    speculation.learn_guesses([sequence], np.array([60]), np.array([60]), 60)
    assert launches_until_a_guess() == 0


def test_few_plain_steps_are_launched_where_guesses_wait_for_their_measurement(model: Model) -> None:
    waiting, always = (model.engine(speculation=mode)._speculation for mode in ("auto", "always"))
    assert waiting.measures_plain(4)
    assert not waiting.measures_plain(1000), "so many rows guess nothing"
    assert not always.measures_plain(4), "nobody looks at a clock"
    for _ in range(ENOUGH):
        waiting.took(1.0, 4, 4)
    assert not waiting.measures_plain(4)


def test_off_guesses_nothing(model: Model) -> None:
    engine = model.engine()
    for _ in range(2):
        engine.generate([ask(9, 40, seed=3)])
    assert engine._speculation.counts.steps == 0


def test_tokens_count_up_to_the_first_that_is_not_its_draft() -> None:
    drafts = Drafts.of([[5, 6, 7], [], [8], [9, 9]])
    sampled = np.array([5, 6, 1, 2, 3, 8, 4, 9, 9, 9])
    assert drafts.num_counting(sampled, np.zeros(10, np.float32)).tolist() == [3, 1, 2, 3]
    broken = np.zeros(10, np.float32)
    broken[[0, 8]] = np.nan
    assert drafts.num_counting(sampled, broken).tolist() == [1, 1, 2, 2]


def test_processes_that_divide_a_model_do_not_guess() -> None:
    with pytest.raises(ValueError, match="clock"):
        ServedEngineConfig(speculation="auto", tensor_parallel_size=2)


# ── ten thousand ───────────────────────────────────────────────────────────────────────────────────────────────────────


def crowd(count: int, seed: int) -> list[GenerateRequest]:
    """Requests that sample `count` completions in all: stops, filters, masks, every temperature, prompts that repeat."""
    rng = np.random.default_rng(seed)
    requests: list[GenerateRequest] = []
    while count > 0:
        n, which = min(count, int(rng.integers(1, 9))), int(rng.integers(12))
        request = ask(
            3 + which % 11, int(rng.integers(8, 48)), seed=which, n=n, temperature=float(rng.choice([0, 0.4, 0.8, 1]))
        )
        request = changed(request, seed=int(rng.integers(6)) + 100 * which)
        filters: dict[str, Any] = rng.choice(  # type: ignore[assignment]
            np.array(
                [
                    {},
                    {"stop_token_ids": (3, 30, 60, 90, 120)},
                    {"stop_token_ids": (3, 30), "min_tokens": 6},
                    {"top_k": 5},
                    {"top_p": 0.8, "min_p": 0.02},
                    {"allowed_token_ids": tuple(range(2, 60)), "logit_bias": {7: 2.0}},
                    {"stop": ("aB", "cDe")},
                ],
                dtype=object,
            )
        )
        requests.append(changed(request, **filters))
        count -= n
    return requests


def sample_crowd(model: Model, speculation: str, count: int) -> list[Completion]:
    """In a cache too small for all, so that sequences give way, while versions come in."""
    engine = model.engine(speculation=speculation, tokenizer=Letters(), num_blocks=120, max_num_seqs=24)
    found: list[Completion] = []
    for seed in range(-(-count // 250)):
        numbers = [engine.submit(request) for request in crowd(min(count, 250), seed)]
        completions: dict[tuple[int, int], Completion] = {}
        for step in itertools.count(1):
            if not engine.has_work:
                break
            for number, piece in engine.step():
                assert isinstance(piece, Delta)
                if piece.completion is not None:
                    completions[number, piece.index] = piece.completion
            if step % 40 == 0:
                engine.apply(WeightUpdate(engine.version + 1, (), 0))
        assert {number for number, _ in completions} == set(numbers)
        found += [completions[key] for key in sorted(completions)]
    assert_nothing_held(engine)
    assert engine.stats.preemptions
    assert speculation == "off" or engine._speculation.counts.accepted_tokens > count / 4
    return found


ON_A_BORDER = 3000
"""Of so many completions one may differ: prompts that come in other company are rounded otherwise, and a draw may fall on the
border of two tokens. On two Xeon cores one of 6,500 did where MKL multiplied, 5e-7 from it, and none of 10,000 since."""


@pytest.mark.parametrize("count", [120, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_crowd_samples_the_same_with_and_without_guesses(model: Model, count: int) -> None:
    plain, guessed = (sample_crowd(model, speculation, count) for speculation in ("off", "always"))
    assert len(plain) == count
    pairs = list(zip(guessed, plain, strict=True))
    differ = [pair for pair in pairs if not np.array_equal(pair[0].token_ids, pair[1].token_ids)]
    assert len(differ) <= count // ON_A_BORDER
    for one, other in differ:
        before = next(index for index, (a, b) in enumerate(zip(one.token_ids, other.token_ids, strict=False)) if a != b)
        np.testing.assert_allclose(one.logprobs[:before], other.logprobs[:before], atol=1e-4)
    same = [pair for pair in pairs if np.array_equal(pair[0].token_ids, pair[1].token_ids)]
    assert_same([one for one, _ in same], [other for _, other in same])
