"""Engines of others as stepped ones: pieces, ends, errors and versions, with an engine that says what a test tells it to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from redline.engine import EngineSession
from redline.engine.adapters.limits import limits_of
from redline.engine.adapters.stepped import Call, Came, SteppedAdapter, Tokens
from redline.errors import EngineError
from redline.types import Completion, Delta, FinishReason, GenerateRequest, SamplingParams, VersionSpan, WeightUpdate


class CountingEngine(SteppedAdapter):
    """Each step adds a token to every call: 1, 2, 3, … Prompts that begin with 13 fail, and 14 is refused."""

    tells_progress = True

    def __init__(self) -> None:
        super().__init__(limits_of(64), max_num_seqs=4)
        self.calls: list[Call] = []
        self.cancelled: list[int] = []

    def begin(self, call: Call) -> None:
        if call.request.prompt_ids[0] == 14 and call.index == 1:
            raise EngineError("refused")
        self.calls.append(call)

    def cancel(self, calls: Sequence[Call]) -> None:
        self.calls = [call for call in self.calls if call not in calls]
        self.cancelled += [call.index for call in calls]

    def advance(self) -> list[tuple[Call, Came]]:
        return [(call, self._next(call)) for call in list(self.calls)]

    def _next(self, call: Call) -> Came:
        if call.request.prompt_ids[0] == 13:
            return EngineError("no luck")
        token = call.num_tokens + 1
        if token < call.request.sampling.max_tokens:
            return Tokens(np.array([token], np.int32), np.array([-float(token)], np.float32))
        self.calls.remove(call)
        tokens = np.arange(1, token + 1, dtype=np.int32)
        return Completion(tokens, -tokens.astype(np.float32), FinishReason.LENGTH, self.versions_of(call), 0.0, 0.0, 0.0)


def ask(first: int = 5, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(np.array([first, 6], np.int32), SamplingParams(**{"max_tokens": 3, **sampling}))


def pieces_of(engine: CountingEngine) -> list[tuple[int, Any]]:
    found: list[tuple[int, Any]] = []
    while engine.has_work:
        found += engine.step()
    return found


def test_completions_come_in_the_order_asked_for() -> None:
    found = CountingEngine().generate([ask(max_tokens=4), ask(n=2, max_tokens=1)])
    assert [[c.token_ids.tolist() for c in group] for group in found] == [[[1, 2, 3, 4]], [[1], [1]]]


def test_who_asked_for_a_stream_gets_every_token_once() -> None:
    engine = CountingEngine()
    engine.submit(ask(), streaming=True)
    pieces = [piece for _, piece in pieces_of(engine)]
    assert [piece.token_ids.tolist() for piece in pieces] == [[1], [2], [3]]
    assert [piece.completion is not None for piece in pieces] == [False, False, True]


def test_who_did_not_gets_the_whole_at_the_end() -> None:
    engine = CountingEngine()
    engine.submit(ask())
    [(_, piece)] = pieces_of(engine)
    assert isinstance(piece, Delta)
    assert piece.completion is not None
    assert piece.token_ids.tolist() == []
    assert piece.completion.token_ids.tolist() == [1, 2, 3]


def test_tokens_so_far_are_known_between_two_steps() -> None:
    engine = CountingEngine()
    number = engine.submit(ask(n=2, first_index=3))
    engine.step()
    assert engine.sampled_tokens(number) == {3: 1, 4: 1}
    pieces_of(engine)
    assert engine.sampled_tokens(number) == {}


def test_a_call_that_fails_ends_its_request_and_no_other() -> None:
    engine = CountingEngine()
    good, bad = engine.submit(ask()), engine.submit(ask(13, n=2))
    found = pieces_of(engine)
    assert [str(piece) for number, piece in found if number == bad] == ["no luck"]
    assert [number for number, piece in found if isinstance(piece, Delta)] == [good]


def test_a_request_that_is_refused_half_way_leaves_nothing_behind() -> None:
    engine = CountingEngine()
    with pytest.raises(EngineError, match="refused"):
        engine.submit(ask(14, n=2))
    assert not engine.has_work
    assert not engine.calls


def test_generate_gives_up_the_others_when_one_fails() -> None:
    engine = CountingEngine()
    with pytest.raises(EngineError, match="no luck"):
        engine.generate([ask(max_tokens=9), ask(13)])
    assert not engine.has_work
    assert not engine.calls


def test_nothing_more_comes_of_a_request_that_was_aborted() -> None:
    engine = CountingEngine()
    number = engine.submit(ask(n=2))
    engine.step()
    engine.abort(number)
    engine.abort(number)
    assert engine.cancelled == [0, 1]
    assert not engine.has_work


def test_a_call_that_outlives_an_update_carries_both_versions() -> None:
    engine = CountingEngine()
    engine.submit(ask())
    engine.step()
    engine.apply(WeightUpdate(1, (), 0))
    [(_, piece)] = pieces_of(engine)
    assert piece.completion.versions == VersionSpan(0, 1)
    assert piece.completion.switches == ((1, 1),)


def test_statistics_count_what_was_sampled() -> None:
    engine = CountingEngine()
    for _ in range(3):
        engine.submit(ask(n=2))
    assert (engine.stats.running, engine.stats.waiting) == (4, 2)
    pieces_of(engine)
    stats = engine.stats
    assert (stats.generated_tokens, stats.requests, stats.running, stats.decode_steps) == (18, 3, 0, 3)


def test_a_session_owns_it_as_it_owns_any_engine() -> None:
    session = EngineSession(CountingEngine())
    assert [c.token_ids.tolist() for [c] in session.generate([ask(), ask(max_tokens=2)])] == [[1, 2, 3], [1, 2]]
