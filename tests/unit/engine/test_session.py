"""One engine, many callers: what each gets, and what none of them can do to the others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.small_models import CONFIGS, VOCAB_SIZE, write_model
from support.standing import standing

from redline.config.sections.engine import EngineConfig
from redline.engine import EngineSession, NativeEngine
from redline.engine import session as session_module
from redline.errors import EngineError, TornWeightsError
from redline.models.files.hf import load_decoder
from redline.telemetry import Recorder, recording, span
from redline.types import (
    Completion,
    Delta,
    EngineStats,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    VersionSpan,
    WeightUpdate,
)

CONFIG = EngineConfig(max_num_seqs=8, block_size=4)
SOON_S = 300
"""Long enough for a busy machine."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, CONFIGS["llama, untied"], seed=5, std=0.3)
    return folder


@pytest.fixture
def native(folder: Path) -> NativeEngine:
    return NativeEngine(load_decoder(folder), CONFIG)


@pytest.fixture
def running(native: NativeEngine) -> Iterator[EngineSession]:
    with EngineSession(native) as engine:
        yield engine


def ask(length: int, max_tokens: int = 10, seed: int = 0, **sampling: Any) -> GenerateRequest:
    ids = np.random.default_rng(seed).integers(2, VOCAB_SIZE, length).astype(np.int32)
    return GenerateRequest(ids, SamplingParams(max_tokens=max_tokens, seed=seed, **sampling))


LONG = ask(5, 240)
BAD = ask(0)


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[GenerateRequest], list[list[int]]]:
    """What a request gives without any of this."""
    engine = NativeEngine(load_decoder(folder), CONFIG)
    return lambda request: tokens(engine.generate([request])[0])


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    async def within_reason() -> Any:
        return await asyncio.wait_for(coroutine, SOON_S)

    return asyncio.run(within_reason())


async def collect(engine: EngineSession, request: GenerateRequest) -> list[Delta]:
    return [delta async for delta in engine.stream(request)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def idle(engine: EngineSession) -> EngineStats:
    """Once nothing is under way any more."""
    await until(lambda: engine.stats.running == engine.stats.waiting == 0)
    return engine.stats


# ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_complete_gives_all_completions_in_order(running: EngineSession, alone: Any) -> None:
    request = ask(9, 12, n=4)
    assert tokens(run(running.complete(request))) == alone(request)


def test_a_stream_gives_pieces_that_make_up_each_completion(running: EngineSession, alone: Any) -> None:
    request = ask(9, 12, n=3)
    pieces = run(collect(running, request))
    for index, expected in enumerate(alone(request)):
        own = [piece for piece in pieces if piece.index == index]
        assert 1 < len(own) <= 12, "a token each, or several where their reader was late"
        assert np.concatenate([piece.token_ids for piece in own]).tolist() == expected
        assert [piece.completion is not None for piece in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].completion.token_ids.tolist() == expected


def test_streams_and_calls_run_at_the_same_time(running: EngineSession, alone: Any) -> None:
    requests = [ask(3 + seed, 5 + 2 * seed, seed=seed, n=1 + seed % 2) for seed in range(10)]

    async def all_at_once() -> tuple[list[list[Delta]], list[list[Completion]]]:
        streams = asyncio.gather(*(collect(running, request) for request in requests[:5]))
        calls = asyncio.gather(*(running.complete(request) for request in requests[5:]))
        return await streams, await calls

    streams, calls = run(all_at_once())
    for request, pieces in zip(requests[:5], streams, strict=True):
        done = {piece.index: piece.completion for piece in pieces if piece.completion is not None}
        assert tokens([done[index] for index in sorted(done)]) == alone(request)
    for request, completions in zip(requests[5:], calls, strict=True):
        assert tokens(completions) == alone(request)
    assert running.stats.steps < sum(request.sampling.max_tokens for request in requests), "they shared steps"


def test_a_stream_begins_before_its_completion_is_done(running: EngineSession) -> None:
    async def first_piece() -> Delta:
        stream = running.stream(LONG)
        piece = await anext(stream)
        await stream.aclose()
        return piece

    piece = run(first_piece())
    assert piece.completion is None
    assert 1 <= len(piece.token_ids) < LONG.sampling.max_tokens // 2, "a token, or a few where the reader was late"


def test_two_event_loops_in_two_threads_use_one_engine(running: EngineSession, alone: Any) -> None:
    found: dict[int, list[list[list[int]]]] = {}

    def user(number: int) -> None:
        async def several() -> list[list[Completion]]:
            return await asyncio.gather(*(running.complete(ask(5, 15, seed=10 * number + i)) for i in range(4)))

        found[number] = [tokens(completions) for completions in run(several())]

    threads = [threading.Thread(target=user, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SOON_S)
    assert found == {number: [alone(ask(5, 15, seed=10 * number + i)) for i in range(4)] for number in range(2)}


# ── giving up ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_closing_a_stream_gives_its_request_up(running: EngineSession, native: NativeEngine) -> None:
    goes_on = standing(native, lambda stats: stats.generated_tokens > 3)

    async def close_early() -> EngineStats:
        stream = running.stream(LONG)
        await anext(stream)
        await stream.aclose()
        goes_on.set()
        return await idle(running)

    stats = run(close_early())
    assert (stats.requests, stats.kv_blocks_used) == (1, 0)
    assert stats.generated_tokens < 240


def test_cancelling_a_call_gives_its_request_up(running: EngineSession, native: NativeEngine, alone: Any) -> None:
    goes_on = standing(native, lambda stats: stats.running == 2)

    async def cancel() -> EngineStats:
        call = asyncio.create_task(running.complete(LONG))
        other = asyncio.create_task(running.complete(ask(5, 30, seed=2)))
        await until(lambda: running.stats.running == 2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        goes_on.set()
        assert tokens(await other) == alone(ask(5, 30, seed=2))
        return await idle(running)

    assert run(cancel()).generated_tokens < 240 + 30


def test_a_loop_that_ends_with_a_stream_open_leaves_the_engine_to_others(running: EngineSession, alone: Any) -> None:
    """Nobody closes the stream, as where a thread dies; its pieces have nowhere to go."""
    stream = running.stream(LONG)
    loop = asyncio.new_event_loop()
    loop.run_until_complete(anext(stream))
    loop.close()
    assert tokens(run(running.complete(ask(5, 240, seed=3)))) == alone(ask(5, 240, seed=3))
    assert running.stats.generated_tokens == 2 * 240, "the other one was computed to its end, for nobody"
    assert running.is_alive


# ── errors ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_error_reaches_the_one_who_made_it_and_nobody_else(running: EngineSession, alone: Any) -> None:
    async def good_and_bad() -> list[Any]:
        calls = [
            running.complete(ask(5, 20, seed=1)),
            running.complete(BAD),
            collect(running, BAD),
            running.complete(ask(6, 9)),
        ]
        return await asyncio.gather(*calls, return_exceptions=True)

    first, refused, also_refused, last = run(good_and_bad())
    assert tokens(first) == alone(ask(5, 20, seed=1))
    assert tokens(last) == alone(ask(6, 9))
    for error in (refused, also_refused):
        assert isinstance(error, EngineError)
        assert "no tokens" in str(error)


def test_a_request_that_makes_no_sense_at_all_does_not_stop_the_engine(running: EngineSession, alone: Any) -> None:
    nonsense = GenerateRequest(None, SamplingParams(4))  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        run(running.complete(nonsense))
    assert tokens(run(running.complete(ask(5)))) == alone(ask(5))


def test_nan_fails_the_request_it_is_in(native: NativeEngine, alone: Any) -> None:
    with EngineSession(native) as running:

        async def fall_ill() -> tuple[Any, Any]:
            sick = GenerateRequest(np.array([100, 5], np.int32), SamplingParams(4, n=2))
            well = ask(5, 20, seed=1, allowed_token_ids=tuple(range(2, 100)))
            await running.run(lambda engine: engine.decoder.embed.data[100].fill_(float("nan")))
            return await asyncio.gather(running.complete(sick), running.complete(well), return_exceptions=True)

        error, completions = run(fall_ill())
    assert isinstance(error, EngineError)
    assert "NaN" in error.message
    assert tokens(completions) == alone(ask(5, 20, seed=1, allowed_token_ids=tuple(range(2, 100))))


class Broken(NativeEngine):
    """Breaks down in its third step."""

    def step(self) -> Any:
        if self.stats.steps == 2:
            raise ZeroDivisionError("a cosmic ray")
        return super().step()


def test_where_the_engine_breaks_down_everybody_hears_why(folder: Path) -> None:
    async def two_calls(running: EngineSession) -> list[Any]:
        return await asyncio.gather(running.complete(LONG), collect(running, LONG), return_exceptions=True)

    with EngineSession(Broken(load_decoder(folder), CONFIG)) as running:
        for error in run(two_calls(running)):
            assert isinstance(error, EngineError)
            assert "a cosmic ray" in error.message
        with pytest.raises(EngineError, match="a cosmic ray"):
            run(running.complete(LONG))
        assert isinstance(running.failure, ZeroDivisionError)
        assert not running.is_alive


class Stuck(NativeEngine):
    """Never ends its third step."""

    def step(self) -> Any:
        if self.stats.steps == 2:
            threading.Event().wait()
        return super().step()


def test_a_step_that_can_never_end_is_given_up_when_its_reason_is_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where another process of the engine has died and a collective waits for it."""
    monkeypatch.setattr("redline.engine.session.GRACE_S", 0.2)
    reason: list[str] = []
    running = EngineSession(Stuck(load_decoder(folder), CONFIG), lambda: reason[0] if reason else None)

    async def two_calls() -> list[Any]:
        calls = [asyncio.create_task(running.complete(LONG)), asyncio.create_task(collect(running, LONG))]
        await until(lambda: running.stats.steps == 2 and running.step_s > 0.05)
        assert running.is_alive
        reason.append("rank 1 has ended")
        return await asyncio.gather(*calls, return_exceptions=True)

    with running:
        for error in run(two_calls()):
            assert isinstance(error, EngineError)
            assert "rank 1 has ended" in error.message
        with pytest.raises(EngineError, match="rank 1 has ended"):
            run(running.complete(LONG))
        assert not running.is_alive


def test_the_time_of_a_step_counts_only_while_there_is_one(running: EngineSession) -> None:
    assert running.step_s == 0
    run(running.complete(ask(5)))
    run(until(lambda: running.step_s == 0))


# ── the end ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_stopping_tells_everybody_who_still_waits(native: NativeEngine) -> None:
    running, goes_on = EngineSession(native), standing(native, lambda stats: stats.running == 2)

    async def stop_in_between() -> list[Any]:
        calls = [asyncio.create_task(running.complete(LONG)), asyncio.create_task(collect(running, LONG))]
        await until(lambda: running.stats.running == 2)
        closing = asyncio.create_task(asyncio.to_thread(running.close))
        await until(lambda: not running.is_alive)
        goes_on.set()
        await closing
        return await asyncio.gather(*calls, return_exceptions=True)

    with running:
        errors = run(stop_in_between())
    for error in errors:
        assert isinstance(error, EngineError)
        assert "stopped" in error.message
    assert not running.is_alive
    assert running.failure is None
    assert native.stats.kv_blocks_used == 0


def test_a_stopped_engine_takes_nothing_more(native: NativeEngine) -> None:
    with EngineSession(native) as running:
        pass
    for attempt in (running.complete(ask(5)), collect(running, ask(5)), running.run(lambda engine: None)):
        with pytest.raises(EngineError, match="has stopped"):
            run(attempt)
    running.close()


def test_an_engine_that_was_never_started_can_be_stopped(native: NativeEngine) -> None:
    running = EngineSession(native)
    with pytest.raises(EngineError, match="has stopped"):
        run(running.complete(ask(5)))
    running.close()


def test_nobody_waits_for_ever_however_close_to_the_end_he_comes(native: NativeEngine) -> None:
    """Requests pour in while the engine stops; each is either served or told."""

    async def pour_in(running: EngineSession) -> list[Any]:
        calls = []
        for seed in range(200):
            calls.append(asyncio.create_task(running.complete(ask(3, 2, seed=seed))))
            calls.append(asyncio.create_task(running.run(lambda engine: engine.version)))
            await asyncio.sleep(0)
            if seed == 50:
                stopper.start()
            if seed == 198:
                await asyncio.to_thread(stopper.join)
        return await asyncio.gather(*calls, return_exceptions=True)

    for _ in range(3):
        running = EngineSession(native)
        stopper = threading.Thread(target=running.close)
        with running:
            results = run(pour_in(running))
        stopper.join()
        assert len(results) == 400
        for result in results:
            assert isinstance(result, list | int) or (isinstance(result, EngineError) and "stopped" in result.message)
        assert any(isinstance(result, EngineError) for result in results)
        list(iter(native.step, []))


# ── between two steps ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_action_runs_on_the_engines_thread_between_two_steps(running: EngineSession, native: NativeEngine) -> None:
    goes_on = standing(native, lambda stats: stats.generated_tokens > 3)

    async def update_under_way() -> tuple[Any, list[Completion]]:
        call = asyncio.create_task(running.complete(ask(5, 100)))
        await until(lambda: running.stats.generated_tokens > 3)
        name = asyncio.create_task(running.run(lambda engine: threading.current_thread().name))
        update = asyncio.create_task(running.run(lambda engine: engine.apply(WeightUpdate(7, (), 0))))
        await asyncio.sleep(0)
        goes_on.set()
        await update
        return await name, await call

    name, [completion] = run(update_under_way())
    assert name == "redline-engine"
    assert completion.versions == VersionSpan(0, 7)
    assert completion.finish_reason == FinishReason.LENGTH
    assert running.stats.version == 7


def test_requests_under_way_wait_while_the_engine_sleeps(running: EngineSession, native: NativeEngine, alone: Any) -> None:
    goes_on = standing(native, lambda stats: stats.generated_tokens > 3)

    async def sleep_in_between() -> list[list[Completion]]:
        calls = [asyncio.create_task(running.complete(ask(5, 60, seed=1)))]
        await until(lambda: running.stats.generated_tokens > 3)
        asleep = asyncio.create_task(running.run(lambda engine: engine.sleep()))
        await asyncio.sleep(0)
        goes_on.set()
        await asleep
        calls.append(asyncio.create_task(running.complete(ask(5, 10, seed=2))))
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in calls)
        await running.run(lambda engine: engine.wake())
        return await asyncio.gather(*calls)

    assert [tokens(found) for found in run(sleep_in_between())] == [alone(ask(5, 60, seed=1)), alone(ask(5, 10, seed=2))]


def test_an_action_that_raises_is_its_callers_problem(running: EngineSession, alone: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        run(running.run(lambda engine: 1 / 0))
    assert tokens(run(running.complete(ask(5)))) == alone(ask(5))


def test_an_action_nobody_waits_for_any_more_does_no_harm(running: EngineSession, alone: Any) -> None:
    held = threading.Event()

    async def walk_away() -> None:
        loop = asyncio.get_running_loop()
        problems: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda loop, context: problems.append(context))
        action = asyncio.create_task(running.run(lambda engine: held.wait(SOON_S)))
        await asyncio.sleep(0.01)
        action.cancel()
        with pytest.raises(asyncio.CancelledError):
            await action
        held.set()
        assert tokens(await running.complete(ask(5))) == alone(ask(5))
        assert problems == []

    run(walk_away())
    assert running.is_alive


def test_statistics_are_those_of_the_last_step(running: EngineSession) -> None:
    assert running.stats.steps == 0
    run(running.complete(ask(9, 5, n=2)))
    stats = running.stats
    assert (stats.prompt_tokens, stats.generated_tokens, stats.requests) == (9, 10, 1)


# ── one thread has the engine ──────────────────────────────────────────────────────────────────────────────────────────


class Pieces:
    """Receives, and remembers in which thread."""

    def __init__(self) -> None:
        self.whole: dict[int, list[Completion]] = {}
        self.errors: dict[int, Exception] = {}
        self.threads: set[str] = set()

    def receive(self, pieces: Sequence[tuple[int, Delta | Exception]]) -> None:
        self.threads.add(threading.current_thread().name)
        for number, piece in pieces:
            if isinstance(piece, Exception):
                self.errors[number] = piece
            elif piece.completion is not None:
                self.whole.setdefault(number, []).append(piece.completion)


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(params=["its own thread", "its caller"])
def session(request: pytest.FixtureRequest, native: NativeEngine) -> Iterator[EngineSession]:
    """Stepped by the one or the other."""
    session = EngineSession(native)
    if request.param == "its own thread":
        session.start()
    yield session
    session.close()


def test_whoever_steps_the_engine_a_caller_gets_all_completions_in_order(session: EngineSession, alone: Any) -> None:
    requests = [ask(5, 12, seed=1, n=3), ask(9, 7, seed=2)]
    assert [tokens(found) for found in session.generate(requests)] == [alone(request) for request in requests]


def test_a_caller_who_holds_the_engine_steps_the_requests_of_others_too(session: EngineSession, alone: Any) -> None:
    pieces = Pieces()
    with session.held():
        number = session.submit(ask(5, 4), pieces)
        [found] = session.generate([ask(7, 30, seed=4)])
    assert tokens(found) == alone(ask(7, 30, seed=4))
    assert tokens(pieces.whole[number]) == alone(ask(5, 4))
    assert pieces.threads == {"MainThread"}


def test_a_refusal_reaches_the_caller_and_leaves_nothing_behind(session: EngineSession, alone: Any) -> None:
    with pytest.raises(EngineError, match="no tokens"):
        session.generate([ask(5, 20, seed=1), BAD])
    assert [tokens(found) for found in session.generate([ask(6, 9)])] == [alone(ask(6, 9))]
    assert session.stats.running == session.stats.waiting == 0


def test_an_update_holds_the_engine_for_its_own_time(session: EngineSession, native: NativeEngine) -> None:
    session.apply(WeightUpdate(3, (), 0))
    assert native.version == 3
    [[completion]] = session.generate([ask(5, 3)])
    assert completion.versions == VersionSpan(3, 3)


def test_nothing_more_comes_of_a_request_that_was_aborted(session: EngineSession, native: NativeEngine) -> None:
    pieces = Pieces()
    with session.held():
        number = session.submit(LONG, pieces)
        session.step_until(lambda: bool(session.sampled_tokens(number).get(0)))
        session.abort(number)
        assert session.sampled_tokens(number) == {}
        session.generate([ask(5, 3)])
        assert native.stats.kv_blocks_used == 0
    assert pieces.whole == pieces.errors == {}


def test_the_stepping_thread_waits_in_the_span_that_its_holder_names(
    native: NativeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation is no wait for weights."""
    begun = {"wait.for_evaluation": threading.Event(), "wait.for_weights": threading.Event()}

    def noticed(name: str) -> AbstractContextManager[None]:
        if name in begun and threading.current_thread().name == "redline-engine":
            begun[name].set()
        return span(name)

    monkeypatch.setattr(session_module, "span", noticed)
    with recording(Recorder()) as recorder, EngineSession(native) as session:
        with session.held("wait.for_evaluation"), session.held():
            session.generate([ask(5, 3)])
            assert begun["wait.for_evaluation"].wait(60)
        session.apply(WeightUpdate(3, (), 0))
        with session.held():
            session.generate([ask(5, 3)])
            assert begun["wait.for_weights"].wait(60)
        lane = recorder.ledger().lanes["redline-engine"]
    waited = [span.name for span in recorder.drain() if span.lane == "redline-engine" and span.name.startswith("wait.")]
    names = list(dict.fromkeys(name for name in waited if name != "wait.for_requests"))
    assert names == ["wait.for_evaluation", "wait.for_weights"]
    assert lane.rows["wait.for_evaluation"] > 0


def test_holds_nest_and_the_engine_goes_on_after_the_last(running: EngineSession, alone: Any) -> None:
    pieces = Pieces()
    with running.held(), running.held():
        pass
    running.hold()
    running.hold()
    steps = running.stats.steps
    sender = threading.Thread(target=lambda: running.submit(ask(5), pieces))
    sender.start()
    sender.join(SOON_S)
    running.resume()
    time.sleep(0.05)
    assert running.stats.steps == steps, "it is still held once"
    assert not pieces.whole
    running.resume()
    wait_for(lambda: pieces.whole)
    [found] = pieces.whole.values()
    assert tokens(found) == alone(ask(5))
    assert pieces.threads == {"redline-engine"}


def test_two_threads_take_turns_in_holding_the_engine(running: EngineSession) -> None:
    has_it, order = threading.Event(), list[str]()

    def other() -> None:
        has_it.wait(SOON_S)
        with running.held():
            order.append("second")

    thread = threading.Thread(target=other)
    thread.start()
    with running.held():
        has_it.set()
        time.sleep(0.05)
        order.append("first")
    thread.join(SOON_S)
    assert order == ["first", "second"]


def test_the_device_is_waited_for_whenever_the_engine_changes_hands_and_not_in_between(native: NativeEngine) -> None:
    waits: list[str] = []
    session = EngineSession(native, wait_for_device=lambda: waits.append(threading.current_thread().name))
    session.generate([ask(5)])
    assert not waits, "one thread launches on one stream"
    session.start()
    with session.held():
        session.apply(WeightUpdate(1, (), 0))
        session.generate([ask(5)])
        assert waits == ["MainThread"]
    assert waits == ["MainThread"] * 2
    session.close()


def test_who_wants_to_hold_an_engine_that_broke_down_hears_why(folder: Path) -> None:
    pieces = Pieces()
    with EngineSession(Broken(load_decoder(folder), CONFIG)) as running:
        running.submit(LONG, pieces)
        wait_for(lambda: pieces.errors)
        with pytest.raises(ZeroDivisionError):
            running.hold()
        with pytest.raises(EngineError, match="a cosmic ray"):
            running.submit(LONG, pieces)


# ── what none of them can do to the others ─────────────────────────────────────────────────────────────────────────────


def in_another_thread(call: Callable[[], Any]) -> BaseException | None:
    """What it raises there."""
    raised: list[BaseException] = []

    def guarded() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()
    return raised[0] if raised else None


def test_who_waits_behind_a_holder_that_never_resumes_hears_of_the_end(native: NativeEngine) -> None:
    running = EngineSession(native)
    running.start()
    assert in_another_thread(running.hold) is None
    closer = threading.Timer(0.05, running.close)
    closer.start()
    error = in_another_thread(running.hold)
    closer.join()
    assert isinstance(error, EngineError)
    assert "has stopped" in error.message


def test_a_closed_session_cannot_be_held(session: EngineSession) -> None:
    session.close()
    with pytest.raises(EngineError, match="has stopped"):
        session.hold()


def test_a_session_that_is_closed_while_it_is_held_can_be_resumed(session: EngineSession) -> None:
    with session.held():
        session.close()
    assert not session.is_alive


def test_only_the_holder_resumes(session: EngineSession) -> None:
    with session.held():
        assert isinstance(in_another_thread(session.resume), AssertionError)
        session.reset_prefix_cache()


class Refuses:
    """A receiver that fails at whatever it gets."""

    def receive(self, pieces: Sequence[tuple[int, Delta | Exception]]) -> None:
        raise ValueError("a bad receiver")


def test_a_receiver_that_raises_keeps_nothing_from_the_others(session: EngineSession, alone: Any) -> None:
    pieces = Pieces()
    with session.held():
        session.submit(ask(5, 3), Refuses())
        number = session.submit(ask(5, 3), pieces)
        with pytest.raises(ValueError, match="a bad receiver"):
            session.step_until(lambda: bool(pieces.whole))
    assert tokens(pieces.whole[number]) == alone(ask(5, 3))


def test_a_step_that_raises_has_ended(folder: Path) -> None:
    session = EngineSession(Broken(load_decoder(folder), CONFIG))
    with pytest.raises(ZeroDivisionError):
        session.generate([LONG])
    assert session.step_s == 0


def test_where_no_thread_would_take_an_order_it_is_refused(native: NativeEngine, alone: Any) -> None:
    session, pieces = EngineSession(native), Pieces()
    number = session.submit(ask(5), pieces)
    with session.held():
        for order in (
            lambda: session.submit(ask(5), Pieces()),
            lambda: session.between_steps(lambda engine: engine.version),
            lambda: session.abort(number),
        ):
            error = in_another_thread(order)
            assert isinstance(error, EngineError)
            assert "another thread holds the engine" in error.message
        session.step_until(lambda: bool(pieces.whole))
    assert tokens(pieces.whole[number]) == alone(ask(5))
    assert in_another_thread(lambda: session.between_steps(lambda engine: engine.version).result(SOON_S)) is None


def test_threads_take_turns_in_a_session_that_was_not_started(native: NativeEngine) -> None:
    session, order = EngineSession(native), list[str]()

    def other() -> None:
        with session.held():
            order.append("second")

    thread = threading.Thread(target=other)
    with session.held():
        thread.start()
        time.sleep(0.05)
        order.append("first")
        session.reset_prefix_cache()
    thread.join(SOON_S)
    assert order == ["first", "second"]


@pytest.mark.parametrize("by", ["an order", "its holder"])
def test_an_engine_that_must_not_go_on_takes_no_further_step_and_everybody_hears_why(native: NativeEngine, by: str) -> None:
    steps, plain, pieces = list[str](), native.step, Pieces()
    native.step = lambda: (steps.append("step"), plain())[1]  # type: ignore[method-assign]
    torn = TornWeightsError("its weights are of two versions", "start the engine again")
    with EngineSession(native) as session:
        with session.held():
            number = session.submit(LONG, pieces)
            if by == "its holder":
                session.fail(torn)
        if by == "an order":
            session.between_steps(lambda engine: (session.fail(torn), steps.clear()))
        wait_for(lambda: number in pieces.errors)
        assert steps == []
        assert "its weights are of two versions" in str(pieces.errors[number])
        with pytest.raises(TornWeightsError):
            session.hold()
        with pytest.raises(EngineError, match="its weights are of two versions"):
            session.submit(ask(5), Pieces())
