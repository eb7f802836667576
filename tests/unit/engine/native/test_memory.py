"""A device without memory for a request: the request fails, and the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.tiny_engines import Model, ask, assert_same, make_model

from redline.engine import NativeEngine
from redline.engine.native.running import runner
from redline.engine.native.sleep import OffloadedWeights
from redline.errors import EngineError, EngineMemoryError
from redline.types import Completion, Delta


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("model"))


class ShortOfMemory:
    """In place of a runner's method: has no memory for some calls, and raises as torch does."""

    def __init__(self, method: Callable[..., Any], is_too_much: Callable[..., bool]) -> None:
        self._method, self._is_too_much = method, is_too_much
        self.num_raised = 0

    def __call__(self, *arguments: Any) -> Any:
        if self._is_too_much(*arguments):
            self.num_raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return self._method(*arguments)


def events_of(engine: NativeEngine) -> dict[int, list[Delta | EngineError]]:
    """All that comes until there is nothing left to do, by request."""
    found: dict[int, list[Delta | EngineError]] = {}
    while engine.has_work:
        for number, piece in engine.step():
            found.setdefault(number, []).append(piece)
    return found


def completions(pieces: list[Delta | EngineError]) -> list[Completion]:
    whole = {piece.index: piece.completion for piece in pieces if isinstance(piece, Delta) and piece.completion}
    return [whole[index] for index in sorted(whole)]


def test_a_prompt_that_the_device_has_no_memory_for_fails_by_itself(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = model.engine()
    assert engine._runner is not None
    short = ShortOfMemory(engine._runner.prefill, lambda chunks, *_: any(c.sequence.num_prompt == 40 for c in chunks))
    monkeypatch.setattr(engine._runner, "prefill", short)
    early = engine.submit(ask(7, 20, seed=5, n=2))
    engine.step()
    engine.step()
    asked = [ask(9, 6, seed=1, n=2), ask(40, 6, seed=2, n=3), ask(21, 6, seed=3), ask(40, 6, seed=2)]
    numbers = [engine.submit(request) for request in asked]
    found = events_of(engine)
    for number, request in zip(numbers, asked, strict=True):
        if len(request.prompt_ids) == 40:
            [error] = found[number]
            assert isinstance(error, EngineMemoryError)
            assert "no memory for a prompt of 40 tokens" in error.message
        else:
            assert_same(completions(found[number]), model.alone(request))
    assert_same(completions(found[early]), model.alone(ask(7, 20, seed=5, n=2)))
    assert short.num_raised == 3, "all at once, and then each of the two by itself"
    assert engine.stats.kv_blocks_used == 0
    monkeypatch.undo()
    assert_same(engine.generate([asked[1]])[0], model.alone(asked[1]))


def test_a_step_that_the_device_has_no_memory_for_fails_its_requests_and_the_engine_goes_on(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model.engine()
    assert engine._runner is not None
    first = engine.submit(ask(9, 6, seed=1, n=2))
    engine.step()
    monkeypatch.setattr(engine._runner, "decode", ShortOfMemory(engine._runner.decode, lambda *_: True))
    beside_prompts = ShortOfMemory(engine._runner.prefill, lambda chunks, copies, wants, decoding: decoding is not None)
    monkeypatch.setattr(engine._runner, "prefill", beside_prompts)
    second = engine.submit(ask(20, 6, seed=2))
    found = dict(engine.step())
    assert isinstance(found[first], EngineMemoryError)
    monkeypatch.undo()
    assert_same(completions(events_of(engine)[second]), model.alone(ask(20, 6, seed=2)))
    assert engine.stats.kv_blocks_used == 0


def test_the_first_bias_that_the_device_has_no_memory_for_fails_by_itself(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = model.engine()
    assert engine._runner is not None
    early = engine.submit(ask(7, 20, seed=5, n=2))
    engine.step()
    make, table = torch.zeros, (engine._runner.rows.dead_row + 1, engine.decoder.spec.vocab_size)

    def zeros(*size: Any, **how: Any) -> torch.Tensor:
        if size == (table,):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return make(*size, **how)

    monkeypatch.setattr(torch, "zeros", zeros)
    biased, plain = ask(9, 6, seed=1, logit_bias={7: 3.0}), ask(21, 6, seed=3)
    first, second = engine.submit(biased), engine.submit(plain)
    found = events_of(engine)
    [error] = found[first]
    assert isinstance(error, EngineMemoryError)
    assert_same(completions(found[second]), model.alone(plain))
    assert_same(completions(found[early]), model.alone(ask(7, 20, seed=5, n=2)))
    assert engine.stats.kv_blocks_used == 0
    monkeypatch.undo()
    assert_same(engine.generate([biased])[0], model.alone(biased))


@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_blocks_are_looked_at_some_at_a_time(model: Model, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = model.engine()
    assert engine._runner is not None
    cache = engine._runner.cache.blocks
    monkeypatch.setattr(runner, "SCRUBBED_BYTES", at_once * cache.nbytes // cache.shape[2])
    cache.fill_(1)
    cache[0, 0, 4].view(-1)[5] = float("nan")
    cache[-1, 1, 7].view(-1)[0] = float("inf")
    assert engine._runner.scrub([1, 2, 4, 5, 7, 8]) == [4, 7]
    assert not cache[:, :, [4, 7]].any()
    assert (cache[:, :, [1, 2, 3, 5, 6, 8]] == 1).all()
    assert engine._runner.scrub([]) == engine._runner.scrub([4, 7]) == []


def test_weights_that_find_no_memory_when_the_engine_wakes_are_not_lost(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = model.engine(), ask(9, 6, seed=1, n=2)
    engine.sleep()
    engine._offloaded = OffloadedWeights(engine.decoder)  # as on a GPU; a CPU's own memory has nowhere to go
    restore = OffloadedWeights.restore
    calls: list[int] = []

    def short(self: OffloadedWeights) -> None:
        calls.append(1)
        if len(calls) == 1:
            self._storages[0][0].resize_(self._storages[0][1])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        restore(self)

    monkeypatch.setattr(OffloadedWeights, "restore", short)
    with pytest.raises(torch.OutOfMemoryError):
        engine.wake()
    engine.wake()
    assert_same(engine.generate([asked])[0], model.alone(asked))


def test_weights_that_came_between_two_tries_to_wake_are_kept(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = model.engine()
    engine.sleep()
    engine._offloaded = OffloadedWeights(engine.decoder)
    make = engine._make_runner
    monkeypatch.setattr(engine, "_make_runner", ShortOfMemory(make, lambda: True))
    with pytest.raises(torch.OutOfMemoryError):
        engine.wake()
    weight = next(engine.decoder.parameters())
    with torch.no_grad():
        weight.fill_(0.25)
    monkeypatch.undo()
    engine.wake()
    assert (weight == 0.25).all()
