"""The engine when the device runs ahead of the host and takes several steps at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.ahead_engine import STEPS, AheadEngine
from support.tiny_engines import (
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
    prompt,
    steps,
    text_of,
)

from redline.engine import NativeEngine
from redline.errors import EngineError
from redline.types import Completion, Delta, FinishReason, GenerateRequest, SamplingParams, VersionSpan, WeightUpdate


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


def ahead(model: Model, **config: Any) -> NativeEngine:
    return model.engine(kind=AheadEngine, **config)


@pytest.mark.parametrize("settings", FEW.values(), ids=FEW)
def test_a_request_gives_what_it_gives_step_by_step(model: Model, settings: dict[str, Any]) -> None:
    requests = [changed(request, raw_logprobs=True, top_logprobs=1 + number % 3) for number, request in enumerate(MIXED)]
    if "num_blocks" in settings:
        settings = {**settings, "num_blocks": 26}
    engine = ahead(model, **settings)
    for found, request in zip(engine.generate(requests), requests, strict=True):
        expected = model.alone(request)
        assert_same(found, expected)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one.raw_logprobs, other.raw_logprobs, atol=1e-4)
            np.testing.assert_allclose(one.top_logprobs.logprobs, other.top_logprobs.logprobs, atol=1e-4)
    assert (engine.stats.preemptions > 0) == ("num_blocks" in settings)
    assert_nothing_held(engine)


def test_several_tokens_come_of_a_step_and_none_too_many(model: Model) -> None:
    engine = ahead(model)
    [[completion]] = engine.generate([ask(9, 30)])
    assert_same([completion], model.alone(ask(9, 30)))
    assert engine.stats.generated_tokens == 30
    assert engine.stats.steps < 30 / STEPS + 4


def test_sequences_do_not_run_ahead_while_prompts_queue(model: Model) -> None:
    """A step of few rows costs almost as much as one of many."""
    engine = ahead(model, max_num_seqs=4, max_num_batched_tokens=8)
    for seed in range(3):
        engine.submit(ask(8, 12, seed=seed))
    generated = []
    while engine.has_work:
        engine.step()
        generated.append(engine.stats.generated_tokens)
    per_step = np.diff(generated)
    assert per_step[:3].max() <= 3, "one token of each sequence while prompts queue"
    assert per_step.max() == 3 * STEPS, "as many as a launch takes afterwards"


def test_pieces_come_token_by_token_where_somebody_watches(model: Model) -> None:
    engine = ahead(model)
    watched = engine.submit(ask(9, 20, n=2), streaming=True)
    engine.submit(ask(5, 20, seed=1))
    pieces = [piece for number, piece in steps(engine) if number == watched]
    for index, expected in enumerate(model.alone(ask(9, 20, n=2))):
        own = [piece for piece in pieces if piece.index == index]
        assert [len(piece.token_ids) for piece in own] == [1] * 20
        assert np.concatenate([piece.token_ids for piece in own]).tolist() == expected.token_ids.tolist()
        assert_same([own[-1].completion], [expected])


def test_a_stop_string_cuts_what_the_device_sampled_beyond_it(model: Model) -> None:
    requests = [ask(9, 30, seed=seed, n=2, raw_logprobs=True) for seed in range(3)]
    texts = [text_of(model.alone(request)[0]) for request in requests]
    stopping = [changed(request, stop=(text[25:29],)) for request, text in zip(requests, texts, strict=True)]
    engine = ahead(model, tokenizer=Letters())
    for found, text in zip(engine.generate(stopping), texts, strict=True):
        assert text_of(found[0]) == text[:30]
        assert len(found[0].logprobs) == len(found[0].raw_logprobs) == 15
    assert_nothing_held(engine)


def test_nobody_gets_the_tokens_of_a_request_that_was_given_up(model: Model) -> None:
    """Its last launch comes back after its row has a new tenant."""
    engine = ahead(model, max_num_seqs=1)
    gone = engine.submit(ask(9, 40, seed=1))
    for _ in range(3):
        engine.step()
    kept = engine.submit(ask(9, 20, seed=2))
    engine.abort(gone)
    found = finish(engine)
    assert found[gone][0].finish_reason == FinishReason.ABORT
    count = len(found[gone][0].token_ids)
    assert found[gone][0].token_ids.tolist() == model.alone(ask(9, 40, seed=1))[0].token_ids[:count].tolist()
    assert_same(found[kept], model.alone(ask(9, 20, seed=2)))
    assert_nothing_held(engine)


def test_tokens_under_way_when_the_weights_change_are_of_the_version_that_sampled_them(model: Model) -> None:
    engine = ahead(model)
    number = engine.submit(ask(9, 20))
    for _ in range(3):
        engine.step()
    engine.apply(WeightUpdate(5, (), 0))
    sampled = engine.stats.generated_tokens
    assert sampled >= 2 * STEPS + 1, "all that was under way is in"
    engine.abort(number)
    [completion] = finish(engine)[number]
    assert (len(completion.token_ids), completion.versions) == (sampled, VersionSpan(0, 0))


def test_nan_is_noticed_late_and_still_harms_nobody_else(model: Model) -> None:
    engine = ahead(model, num_blocks=30)
    engine.decoder.embed.data[100] = float("nan")
    doomed = engine.submit(GenerateRequest(prompt(9), SamplingParams(20, n=2, allowed_token_ids=(100,))))
    well = ask(9, 20, seed=3, allowed_token_ids=tuple(range(2, 100)))
    well.prompt_ids[well.prompt_ids == 100] = 2
    number = engine.submit(well)
    events = list(steps(engine))
    assert [which for which, piece in events if isinstance(piece, EngineError)] == [doomed]
    found: list[Completion] = [piece.completion for which, piece in events if which == number and isinstance(piece, Delta)]
    assert_same(found, model.alone(well))
    for seed in range(4):
        again = changed(well, seed=seed)
        assert_same(engine.generate([again])[0], model.alone(again))
    assert_nothing_held(engine)
