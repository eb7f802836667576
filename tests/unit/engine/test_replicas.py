"""Several engines as one: who gets a request, and what becomes of it when its engine is lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from redline.engine import EngineSession
from redline.engine.native.admission import Limits
from redline.engine.prefix_routes import PrefixMemory, blocks_of
from redline.engine.replicas import Event, Replicas
from redline.errors import EngineError, EngineLostError
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

SOON_S = 300
POISON = 13
"""An engine dies of a prompt that begins with this token."""


def ask(*tokens: int, seed: int = 0, n: int = 1, max_tokens: int = 4) -> GenerateRequest:
    return GenerateRequest(np.array(tokens, np.int32), SamplingParams(max_tokens=max_tokens, n=n, seed=seed))


def tokens_of(request: GenerateRequest, index: int) -> list[int]:
    """What every engine samples for a request: it depends on nothing else."""
    start = int(request.prompt_ids.sum()) + 1000 * request.sampling.seed + 100 * index
    return [start + position for position in range(request.sampling.max_tokens)]


@dataclass
class FakeEngine:
    """Samples a token of every sequence in each `take`; can be lost at any time."""

    name: str
    steps_held: bool = False
    """While set, nothing comes."""
    why_lost: str | None = None
    limits: Any = None
    version: int = 0
    under_way: dict[int, tuple[GenerateRequest, bool, dict[int, int]]] = field(default_factory=dict)
    given: list[GenerateRequest] = field(default_factory=list)
    is_closed: bool = False
    num_done: int = 0
    calls: list[str] = field(default_factory=list)

    def check(self, request: GenerateRequest) -> None:
        if not len(request.prompt_ids):
            raise EngineError("a prompt has no tokens")
        if self.limits is not None and len(request.prompt_ids) > self.limits.cache_tokens:
            raise EngineError("it exceeds the KV cache")

    def submit(self, request: GenerateRequest, *, streaming: bool = False) -> int:
        self._alive()
        number = len(self.given)
        self.given.append(request)
        self.under_way[number] = (request, streaming, dict.fromkeys(request.sampling.indices, 0))
        return number

    def flush(self) -> None: ...

    def abort(self, request_id: int) -> None:
        self._alive()
        self.under_way.pop(request_id, None)

    def end(self, request_id: int, index: int) -> None:
        self._alive()
        self.calls.append(f"end {request_id} {index}")

    def sampled_tokens(self, request_id: int) -> Mapping[int, int]:
        return self.under_way[request_id][2] if request_id in self.under_way else {}

    def take(self) -> list[Event]:
        if any(request.prompt_ids[0] == POISON for request, _, _ in self.under_way.values()):
            self.why_lost = self.why_lost or "ended by SIGSEGV"
        self._alive()
        return [] if self.steps_held else [event for number in list(self.under_way) for event in self._advance(number)]

    def step(self) -> Sequence[Event]:
        return self.take()

    def _advance(self, number: int) -> Iterator[Event]:
        request, streaming, counts = self.under_way[number]
        for index in list(counts):
            counts[index] += 1
            whole = np.array(tokens_of(request, index)[: counts[index]], np.int32)
            new = whole[-1:] if streaming else whole[:0]
            done = counts[index] == request.sampling.max_tokens
            completion = None
            if done:
                del counts[index]
                versions = VersionSpan(self.version, self.version)
                completion = Completion(whole, np.zeros(len(whole), np.float32), FinishReason.LENGTH, versions, 0.0, 0.0, 0.0)
            if streaming or done:
                yield number, Delta(index, new, np.zeros(len(new), np.float32), None, completion)
        if not counts:
            del self.under_way[number]
            self.num_done += 1

    def apply(self, update: WeightUpdate) -> None:
        self._alive()
        self.version = update.version

    def reset_prefix_cache(self) -> None:
        self._alive()
        self.calls.append("reset")

    def sleep(self, *, weights: bool = False) -> None:
        self.calls.append("sleep")

    def wake(self) -> None:
        self.calls.append("wake")

    @property
    def has_work(self) -> bool:
        return bool(self.under_way)

    @property
    def stats(self) -> EngineStats:
        rate = 500.0 if self.num_done else 0.0
        return EngineStats(
            running=len(self.under_way), requests=self.num_done, kv_blocks_total=10, version=self.version, tokens_per_s=rate
        )

    def unanswered(self) -> Mapping[str, float]:
        return {"seconds since it was heard of": 3.0}

    def stack(self) -> Sequence[str]:
        return ["thread engine"] if self.steps_held else []

    def close(self) -> None:
        self.is_closed = True

    def _alive(self) -> None:
        if self.why_lost is not None:
            raise EngineLostError(f"{self.name} is lost: {self.why_lost}")


@dataclass
class Fleet:
    """Fake engines, and how they are started again."""

    engines: list[FakeEngine]
    replicas: Replicas
    told: list[str]

    def finish(self) -> dict[int, dict[int, list[int]]]:
        """Step until nothing is left; the tokens of every completion, each of which must come once."""
        found: dict[int, dict[int, list[int]]] = {}
        for number, piece in self.events():
            assert isinstance(piece, Delta), piece
            if piece.completion is not None:
                assert piece.index not in found.setdefault(number, {}), "delivered twice"
                found[number][piece.index] = piece.completion.token_ids.tolist()
        return found

    def events(self) -> Iterator[Event]:
        until = time.monotonic() + SOON_S
        while self.replicas.has_work:
            assert time.monotonic() < until, "nothing more came"
            yield from self.replicas.step()


@pytest.fixture
def fleet() -> Iterator[Callable[..., Fleet]]:
    made: list[Replicas] = []

    def make(count: int = 2, max_restarts: int = 3, start: Callable[[int], FakeEngine] | None = None) -> Fleet:
        engines = [FakeEngine(f"engine {index}") for index in range(count)]

        def restart(index: int) -> FakeEngine:
            engines[index] = start(index) if start else FakeEngine(f"engine {index}")
            return engines[index]

        told: list[str] = []
        replicas = Replicas(engines, restart, max_restarts=max_restarts, arrived=threading.Event(), tell=told.append)
        made.append(replicas)
        return Fleet(engines, replicas, told)

    yield make
    for replicas in made:
        replicas.close()


def test_requests_are_spread_over_the_engines_and_all_are_answered(fleet: Callable[..., Fleet]) -> None:
    several = fleet(3)
    requests = [ask(index + 20, seed=index, n=2) for index in range(9)]
    numbers = [several.replicas.submit(request) for request in requests]
    assert [len(engine.given) for engine in several.engines] == [3, 3, 3]
    found = several.finish()
    for number, request in zip(numbers, requests, strict=True):
        assert found[number] == {index: tokens_of(request, index) for index in range(2)}
    assert several.replicas.stats.requests == 9


def test_what_one_of_the_engines_cannot_serve_is_refused_whichever_would_have_got_it() -> None:
    engines = [
        FakeEngine(f"engine {index}", limits=Limits(100, 64, 8, tokens, 4, 4, True)) for index, tokens in enumerate((9, 3))
    ]
    replicas = Replicas(engines, lambda index: engines[index], max_restarts=0, arrived=threading.Event())
    assert replicas.limits == Limits(100, 64, 8, 3, 4, 4, True)
    for _ in range(2):
        with pytest.raises(EngineError, match="exceeds the KV cache"):
            replicas.submit(ask(1, 2, 3, 4))
    replicas.submit(ask(1, 2, 3))
    replicas.close()


def test_a_prompt_goes_where_its_beginning_is_cached_unless_that_engine_has_far_too_much_to_do(
    fleet: Callable[..., Fleet],
) -> None:
    several = fleet(3)
    conversation = list(range(100, 148))
    several.replicas.submit(ask(*range(500, 532)))
    several.replicas.submit(ask(*conversation))
    assert [len(engine.given) for engine in several.engines] == [1, 1, 0]
    several.replicas.submit(ask(*conversation, *range(7, 23)))
    assert [len(engine.given) for engine in several.engines] == [1, 2, 0]
    several.replicas.submit(ask(*conversation, n=99))
    several.replicas.submit(ask(*conversation))
    assert [len(engine.given) for engine in several.engines] == [1, 3, 1]


def test_a_new_version_and_a_reset_forget_what_was_cached(fleet: Callable[..., Fleet]) -> None:
    several = fleet(2)
    prompt = list(range(100, 148))
    several.replicas.submit(ask(*prompt))
    several.replicas.apply(WeightUpdate(4, (), 0))
    several.replicas.submit(ask(*prompt))
    assert [len(engine.given) for engine in several.engines] == [1, 1]
    assert several.replicas.stats.version == 4
    several.replicas.reset_prefix_cache()
    assert [engine.calls for engine in several.engines] == [["reset"], ["reset"]]


def test_what_a_short_prompt_shares_with_all_others_decides_nothing() -> None:
    memory = PrefixMemory()
    memory.add(blocks_of(ask(*range(64))))
    assert memory.num_known(blocks_of(ask(*range(48), 1, 2, 3))) == 3
    assert memory.num_known(blocks_of(ask(*range(1, 40)))) == 0
    memory.clear()
    assert memory.num_known(blocks_of(ask(*range(64)))) == 0


def test_requests_of_a_lost_engine_are_answered_elsewhere_each_completion_once_with_the_same_tokens(
    fleet: Callable[..., Fleet],
) -> None:
    several = fleet(2)
    requests = [ask(index + 20, seed=index, n=3, max_tokens=6) for index in range(6)]
    numbers = [several.replicas.submit(request) for request in requests]
    several.replicas.step()
    several.engines[0].why_lost = "ended by SIGKILL"
    found = several.finish()
    for number, request in zip(numbers, requests, strict=True):
        assert found[number] == {index: tokens_of(request, index) for index in range(3)}
    soon(lambda: len(several.replicas.recoveries) == 1)
    assert several.replicas.recoveries[0].name == "engine 0"
    assert "SIGKILL" in several.told[0]


def test_completions_that_were_delivered_are_not_sampled_again(fleet: Callable[..., Fleet]) -> None:
    several = fleet(1)
    number = several.replicas.submit(ask(20, n=4, max_tokens=3))
    engine = several.engines[0]
    engine.under_way[0][2].update({0: 2, 1: 2})
    several.replicas.step()
    engine.why_lost = "ended by SIGKILL"
    rest = several.finish()[number]
    assert sorted(rest) == [2, 3]
    assert several.engines[0].given[0].sampling.indices == range(2, 4)


def test_a_streamed_request_goes_on_where_it_was(fleet: Callable[..., Fleet]) -> None:
    several = fleet(1)
    request = ask(20, max_tokens=8)
    several.replicas.submit(request, streaming=True)
    streamed: list[int] = []
    for count, (_, piece) in enumerate(several.events()):
        assert isinstance(piece, Delta)
        streamed += piece.token_ids.tolist()
        if count == 3:
            several.engines[0].why_lost = "ended by SIGKILL"
    assert streamed == tokens_of(request, 0)


def test_a_streamed_request_whose_beginning_would_change_fails_with_the_reason(fleet: Callable[..., Fleet]) -> None:
    class Newer(FakeEngine):
        def submit(self, request: GenerateRequest, *, streaming: bool = False) -> int:
            return super().submit(ask(99, seed=1, max_tokens=8), streaming=streaming)

    several = fleet(1, start=lambda index: Newer("engine 0"))
    several.replicas.submit(ask(20, max_tokens=8), streaming=True)
    several.replicas.step()
    several.engines[0].why_lost = "ended by SIGKILL"
    *_, (_, error) = several.events()
    assert isinstance(error, EngineError)
    assert "the weights have changed since" in error.message


def test_of_a_request_in_larger_pieces_the_whole_counts_where_its_beginning_changes(fleet: Callable[..., Fleet]) -> None:
    class Newer(FakeEngine):
        def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
            return super().submit(ask(99, seed=1, max_tokens=8), streaming=streaming)

    several = fleet(1, start=lambda index: Newer("engine 0"))
    number = several.replicas.submit(ask(20, max_tokens=8), streaming=4)
    several.replicas.step()
    several.replicas.end(number, 0)
    assert several.engines[0].calls == ["end 0 0"]
    several.engines[0].why_lost = "ended by SIGKILL"
    *_, (_, last) = several.events()
    assert isinstance(last, Delta)
    assert last.completion is not None
    assert last.completion.token_ids.tolist() == tokens_of(ask(99, seed=1, max_tokens=8), 0)


def test_a_completion_is_not_ended_by_what_a_lost_engine_had_sampled_of_it(fleet: Callable[..., Fleet]) -> None:
    several = fleet(1, start=lambda index: FakeEngine("engine 0", steps_held=True))
    number = several.replicas.submit(ask(20, max_tokens=8), streaming=4)
    several.replicas.step()
    lost = several.engines[0]
    lost.why_lost = "ended by SIGKILL"
    until = time.monotonic() + SOON_S
    while several.engines[0] is lost or not several.engines[0].given:
        assert time.monotonic() < until, "no other engine got it"
        several.replicas.step()
    several.replicas.end(number, 0)
    assert several.engines[0].calls == []
    several.engines[0].steps_held = False
    assert several.finish() == {number: {0: tokens_of(ask(20, max_tokens=8), 0)}}


def test_a_request_that_kills_every_engine_fails_alone_and_the_others_are_answered(fleet: Callable[..., Fleet]) -> None:
    several = fleet(2)
    good = [ask(index + 20, seed=index, max_tokens=3) for index in range(8)]
    numbers = [several.replicas.submit(request) for request in good]
    poison = several.replicas.submit(ask(POISON, 7))
    found: dict[int, list[int]] = {}
    failures: dict[int, EngineError] = {}
    for number, piece in several.events():
        if isinstance(piece, EngineError):
            failures[number] = piece
        elif piece.completion is not None:
            found[number] = piece.completion.token_ids.tolist()
    assert found == {number: tokens_of(request, 0) for number, request in zip(numbers, good, strict=True)}
    assert list(failures) == [poison]
    assert "3 engines were lost while they had this request" in failures[poison].message
    assert "SIGSEGV" in failures[poison].message
    again = several.replicas.submit(ask(44))
    assert several.finish() == {again: {0: tokens_of(ask(44), 0)}}


def test_an_engine_that_is_lost_too_often_ends_everything_with_who_and_why(fleet: Callable[..., Fleet]) -> None:
    def dies_at_once(index: int) -> FakeEngine:
        return FakeEngine(f"engine {index}", why_lost="no memory left")

    several = fleet(1, max_restarts=2, start=dies_at_once)
    session = EngineSession(several.replicas)
    several.engines[0].why_lost = "ended by SIGKILL"
    with pytest.raises(EngineLostError, match=r"engine 0 is lost: no memory left; it was started again 2 times") as caught:
        session.generate([ask(20), ask(21)])
    assert "placement.max_restarts" in caught.value.hint


def test_an_engine_that_does_not_start_again_is_tried_as_often_as_it_may_be(fleet: Callable[..., Fleet]) -> None:
    tries: list[int] = []

    def fails_once(index: int) -> FakeEngine:
        tries.append(index)
        if len(tries) < 2:
            raise EngineLostError("engine 0 did not start: the port is taken")
        return FakeEngine("engine 0")

    several = fleet(1, start=fails_once)
    several.replicas.submit(ask(20))
    several.engines[0].why_lost = "ended by SIGKILL"
    assert several.finish() == {0: {0: tokens_of(ask(20), 0)}}
    assert tries == [0, 0]


def test_a_restart_that_fails_for_a_reason_of_the_machine_ends_everything_too(fleet: Callable[..., Fleet]) -> None:
    def has_no_room(index: int) -> FakeEngine:
        raise OSError(28, "No space left on device")

    several = fleet(1, max_restarts=1, start=has_no_room)
    session = EngineSession(several.replicas)
    several.engines[0].why_lost = "ended by SIGKILL"
    with pytest.raises(EngineLostError, match="No space left on device"):
        session.generate([ask(20)])


def test_the_loss_of_an_engine_that_has_nothing_to_do_is_noticed(fleet: Callable[..., Fleet]) -> None:
    several = fleet(2)
    several.engines[1].why_lost = "ended by SIGKILL"
    soon(lambda: len(several.replicas.recoveries) == 1)
    number = several.replicas.submit(ask(20))
    assert several.finish()[number] == {0: tokens_of(ask(20), 0)}
    assert not several.replicas.has_work


def test_a_call_to_all_engines_passes_by_one_that_is_lost(fleet: Callable[..., Fleet]) -> None:
    several = fleet(2)
    several.engines[0].why_lost = "ended by SIGKILL"
    several.replicas.apply(WeightUpdate(2, (), 0))
    assert several.engines[1].version == 2


def test_an_aborted_request_is_forgotten_wherever_it_is(fleet: Callable[..., Fleet]) -> None:
    several = fleet(1)
    number = several.replicas.submit(ask(20, max_tokens=100))
    several.replicas.step()
    assert several.replicas.sampled_tokens(number) == {0: 1}
    several.replicas.abort(number)
    several.replicas.abort(number)
    assert several.replicas.sampled_tokens(number) == {}
    assert not several.engines[0].under_way
    assert not several.replicas.has_work
    with pytest.raises(EngineError, match="a prompt has no tokens"):
        several.replicas.submit(ask())


def test_sums_of_lost_engines_stay_in_the_statistics(fleet: Callable[..., Fleet]) -> None:
    several = fleet(1)
    several.replicas.submit(ask(20))
    several.finish()
    several.engines[0].why_lost = "ended by SIGKILL"
    several.replicas.submit(ask(21))
    several.finish()
    assert several.replicas.stats.requests == 2
    assert several.replicas.stats.kv_blocks_total == 10


@pytest.fixture
def never() -> Iterator[Callable[[int], FakeEngine]]:
    """Starts an engine that does not come while a test lasts."""
    is_over = threading.Event()

    def start(index: int) -> FakeEngine:
        is_over.wait(SOON_S)
        raise EngineLostError("engine 0 did not start")

    yield start
    is_over.set()


def test_what_a_lost_engine_was_doing_is_no_longer_said(
    fleet: Callable[..., Fleet], never: Callable[[int], FakeEngine]
) -> None:
    several = fleet(1, start=never)
    several.replicas.submit(ask(20))
    several.finish()
    assert several.replicas.stats.tokens_per_s == 500.0
    several.engines[0].why_lost = "ended by SIGKILL"
    several.replicas.step()
    assert several.replicas.stats.tokens_per_s == 0.0


def test_a_person_sees_what_each_engine_has_not_answered_and_where_it_is(
    fleet: Callable[..., Fleet], never: Callable[[int], FakeEngine]
) -> None:
    several = fleet(2, start=never)
    several.engines[1].steps_held = True
    assert several.replicas.unanswered() == {f"engine {index}: seconds since it was heard of": 3.0 for index in range(2)}
    assert several.replicas.stacks() == {"engine 1": ["thread engine"]}
    several.engines[0].why_lost = "ended by SIGKILL"
    several.replicas.step()
    assert set(several.replicas.unanswered()) == {
        "engine 0: seconds since it is started again",
        "engine 1: seconds since it was heard of",
    }


def soon(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
