"""Where completions end: stop tokens, stop strings, and callers who give up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from support.tiny_engines import (
    Letters,
    Model,
    ask,
    assert_nothing_held,
    assert_same,
    changed,
    finish,
    make_model,
    steps,
    text_of,
)

from redline.engine import NativeEngine
from redline.errors import EngineError
from redline.types import Completion, Delta, FinishReason


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


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


@pytest.mark.parametrize(("begin", "end"), [(20, 22), (20, 21), (21, 22), (21, 23), (19, 25), (0, 1), (58, 60), (11, 40)])
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


# ── giving up ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_until(engine: NativeEngine, condition: Any) -> None:
    for _ in range(200):
        if condition():
            return
        assert not any(isinstance(piece, EngineError) for _, piece in engine.step())
    pytest.fail("it never came to that")


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


def test_one_completion_can_be_ended_where_it_is_and_the_others_go_on(model: Model) -> None:
    engine = model.engine()
    request = ask(9, 30, n=3)
    number = engine.submit(request, streaming=4)
    seen: dict[int, int] = dict.fromkeys(range(3), 0)
    found: dict[int, Completion] = {}
    while engine.has_work:
        for _, piece in engine.step():
            assert isinstance(piece, Delta)
            assert piece.completion is not None or len(piece.token_ids) == 4
            seen[piece.index] += len(piece.token_ids)
            if piece.completion is not None:
                found[piece.index] = piece.completion
        if seen[1] == 8 and 1 not in found:
            engine.end(number, 1)
            engine.end(number, 7)
    assert found[1].finish_reason == FinishReason.ABORT
    assert found[1].token_ids.tolist() == model.alone(request)[1].token_ids[:8].tolist()
    assert_same([found[0], found[2]], [model.alone(request)[i] for i in (0, 2)])
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
