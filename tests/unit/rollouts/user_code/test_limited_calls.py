"""Calls of the user's functions, with real threads and short limits."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.eventually import eventually

from redline.errors import TaskError
from redline.rollouts.user_code import limited_calls as calls_module
from redline.rollouts.user_code.coroutines import EventLoop
from redline.rollouts.user_code.failures import failure_of
from redline.rollouts.user_code.jobs import ThreadKind, UserFunction
from redline.rollouts.user_code.limited_calls import UserCalls
from redline.rollouts.user_code.permits import MAX_LATE_IN_A_ROW, Permits
from redline.telemetry import Recorder, recording
from redline.telemetry.stalls.calls import calls_now
from redline.types import Failure

pytestmark = pytest.mark.usefixtures("no_calls_of_others")

SPAN = "user.score"
OTHERS: set[threading.Thread] = set()


@pytest.fixture
def many() -> Iterator[UserCalls]:
    calls = UserCalls(UserFunction("reward", "score", None, "rollouts.reward_timeout_s"), ThreadKind("score", most=4))
    yield calls
    calls.close()
    calls.join(1.0)


@pytest.fixture
def limited() -> Iterator[UserCalls]:
    calls = UserCalls(UserFunction("reward", "score", 0.5, "rollouts.reward_timeout_s"))
    yield calls
    calls.close()
    calls.join(1.0)


@pytest.fixture(autouse=True)
def others() -> Iterator[None]:
    """Threads of tests before, which may have left some behind, are none of ours."""
    OTHERS.update(threading.enumerate())
    yield
    OTHERS.clear()


def num_threads() -> int:
    return sum(thread.name.startswith("score") for thread in set(threading.enumerate()) - OTHERS)


def waiting(number: int) -> Callable[[], int]:
    def work() -> int:
        time.sleep(0.03 if number % 2 else 0.04)
        return number

    return work


class Hanging:
    """Never returns while a test lasts."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.begun = 0

    def __call__(self) -> int:
        self.begun += 1
        self.end.wait(300)
        return 0


@pytest.fixture
def hanging() -> Iterator[Hanging]:
    work = Hanging()
    yield work
    work.end.set()


def test_answers_that_wait_are_scored_together_and_come_in_order(many: UserCalls) -> None:
    together = threading.Barrier(4, timeout=300)
    """Passed by the calls after the first, which waits so long that others help: only four at once get through."""

    def met(number: int) -> int:
        together.wait()
        return number

    works = [waiting(0), *(lambda n=n: met(n) for n in range(1, 13)), *(waiting(n) for n in range(13, 16))]  # type: ignore[misc]
    assert many.results(works) == list(range(16))
    assert num_threads() == 4
    assert many.results([waiting(n) for n in range(3)]) == list(range(3))


def test_answers_that_take_no_time_need_no_help(many: UserCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "HELP_AFTER_S", 60.0)  # a busy machine may keep a thread waiting for longer than that
    assert many.results([lambda: sum(range(100)) for _ in range(10)]) == [4950] * 10
    assert many.results([]) == []
    assert num_threads() == 1


def test_without_a_limit_and_with_one_thread_the_caller_makes_the_calls() -> None:
    calls = UserCalls(UserFunction("reward", "score", None, "rollouts.reward_timeout_s"))
    works = [lambda: (time.sleep(0.03), threading.current_thread())[1]] * 3
    assert calls.results(works) == [threading.current_thread()] * 3


def test_a_call_that_hangs_is_a_failure_with_its_place_and_the_others_are_made(limited: UserCalls, hanging: Hanging) -> None:
    began = time.perf_counter()
    first, late, last = limited.results([lambda: 1, hanging, lambda: 3])
    assert (first, last) == (1, 3)
    assert time.perf_counter() - began >= 0.5
    assert isinstance(late, Failure)
    assert late.reason == "`score` did not return within 0.5 s"
    assert late.where.startswith("test_limited_calls.py:")
    assert "self.end.wait(300)" in late.where
    assert "rollouts.reward_timeout_s" in late.hint
    assert not calls_now(), "nobody waits for it any more"


def test_what_was_left_behind_may_return_whenever_it_likes(limited: UserCalls, hanging: Hanging) -> None:
    assert isinstance(limited.results([hanging])[0], Failure)
    hanging.end.set()
    assert limited.results([lambda n=n: n for n in range(100)]) == list(range(100))  # type: ignore[misc]


def test_after_some_that_hang_in_a_row_the_rest_is_not_called(limited: UserCalls, hanging: Hanging) -> None:
    outcomes = limited.results([hanging] * 20)
    assert hanging.begun == MAX_LATE_IN_A_ROW
    assert all(isinstance(outcome, Failure) for outcome in outcomes)
    assert "was not called: the 3 calls before did not return" in str(outcomes[-1])
    assert limited.results([lambda: 7]) == [7], "the next batch is tried again"


def test_calls_that_were_given_up_are_bounded_and_daemonic(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MAX_STUCK", 4)
    calls = UserCalls(UserFunction("reward", "score", 0.2, "rollouts.reward_timeout_s"))
    before = set(threading.enumerate())
    for _ in range(2):
        assert isinstance(calls.results([hanging, hanging, lambda: 1])[0], Failure)
    stuck = {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("score")}
    assert all(thread.daemon for thread in stuck)
    with pytest.raises(TaskError, match=r"5 calls of `score` were given up after 0\.2 s"):
        calls.results([hanging])
    hanging.end.set()
    for thread in stuck:
        thread.join(60)
    assert calls.results([lambda: 2]) == [2], "those that have returned do not count"
    calls.close()
    calls.join(1.0)


def test_many_quick_calls_may_take_longer_than_the_limit_together() -> None:
    calls = UserCalls(UserFunction("reward", "score", 1.2, "rollouts.reward_timeout_s"))
    assert calls.results([waiting(n) for n in range(36)]) == list(range(36))
    calls.close()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_whatever_a_call_raises_is_its_failure_and_ends_nothing(limited: UserCalls, error: BaseException) -> None:
    def work() -> int:
        raise error

    failed, fine = limited.results([work, lambda: 1])
    assert fine == 1
    assert isinstance(failed, Failure)
    assert failed.reason.startswith(type(error).__name__)
    assert failed.where.endswith("in work: raise error")


def test_an_error_whose_own_message_raises_is_a_failure_too(limited: UserCalls) -> None:
    class SilentError(Exception):
        def __str__(self) -> str:
            raise KeyError("no message")

    def work() -> int:
        raise SilentError

    failed, fine = limited.results([work, lambda: 1])
    assert fine == 1
    assert isinstance(failed, Failure)
    assert failed.reason == "SilentError: its message raised KeyError"


def test_where_no_thread_can_be_started_it_is_said_and_nobody_waits_for_it(
    limited: UserCalls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        with pytest.raises(TaskError, match="no thread can be started to call `score`: can't start new thread"):
            limited.results([lambda: 1])
    assert limited.results([lambda: 1]) == [1], "as soon as one can be"


def test_the_lane_of_the_thread_adds_up_and_has_one_span_for_all_calls() -> None:
    with recording(Recorder()) as recorder:
        calls = UserCalls(UserFunction("reward", "score", 60.0, "rollouts.reward_timeout_s"))
        calls.results([waiting(n) for n in range(4)])
        calls.close()
        calls.join(1.0)
        lane = recorder.ledger().lanes["score"]
        spans = [mine for mine in recorder.drain() if mine.name == SPAN]
    assert lane.rows[SPAN] >= 4 * 0.03e9
    assert sum(lane.rows.values()) + lane.unaccounted_ns == lane.wall_ns
    assert len(spans) == 1, "one for all of them: there may be thousands"


# ── calls that come little by little ───────────────────────────────────────────────────────────────────────────────────


def test_calls_are_made_while_others_are_still_to_come(limited: UserCalls) -> None:
    made = threading.Event()
    with limited.gathering() as gathering:
        gathering.add([lambda: 1, lambda: made.set() or 2])  # type: ignore[func-returns-value]
        assert made.wait(60)
        gathering.add([])
        gathering.add([lambda: 3])
        assert gathering.results() == [1, 2, 3]


def test_those_that_wait_get_help_before_all_are_there(many: UserCalls) -> None:
    together = threading.Barrier(4, timeout=300)
    with many.gathering() as gathering:
        gathering.add([waiting(0), *[together.wait] * 4])
        eventually(lambda: num_threads() == 4 and together.n_waiting == 0, "nobody helps")
        gathering.add([waiting(5)])
        first, *_, last = gathering.results()
    assert (first, last) == (0, 5)


def test_those_that_compute_are_left_until_no_more_come(many: UserCalls) -> None:
    begun: list[int] = []

    def computing(number: int) -> int:
        begun.append(number)
        until = time.thread_time() + 2 * calls_module.HELP_AFTER_S
        while time.thread_time() < until:
            pass
        return number

    def left() -> bool:
        return not any(job.wants_a_thread for job in many._jobs)

    with many.gathering() as gathering:
        gathering.add([lambda: computing(0), lambda: computing(1)])
        eventually(left, "the second is made too")
        gathering.add([lambda: computing(2)])
        assert left()
        assert begun == [0]
        assert gathering.results() == [0, 1, 2]


def test_of_scores_that_come_one_by_one_the_seconds_are_added_up(limited: UserCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "HELP_AFTER_S", 0.1)
    begun: list[int] = []

    def computing(number: int) -> int:
        begun.append(number)
        until = time.thread_time() + 0.03
        while time.thread_time() < until:
            pass
        return number

    def are_left() -> bool:
        return limited._jobs[0].computes

    with limited.gathering() as gathering:
        for number in range(20):
            gathering.add([lambda n=number: computing(n)])  # type: ignore[misc]
            eventually(lambda n=number: are_left() or len(limited._jobs[0].outcomes) > n, "it is not made")  # type: ignore[misc]
            time.sleep(0.005)  # its thread has nothing left to do
        assert len(begun) < 10
        assert gathering.results() == list(range(20))


class HeldBack(UserCalls):
    """Its thread is slow to notice that no calls are left."""

    def __init__(self) -> None:
        self.gap, self.go_on = threading.Event(), threading.Event()
        self.changed = threading.Condition(threading.RLock())
        super().__init__(UserFunction("reward", "score", 60.0, "rollouts.reward_timeout_s"))
        self._changed = self  # type: ignore[assignment]
        self._has_none = False

    def _next_call(self, job: Any, worker: Any) -> Any:
        work = super()._next_call(job, worker)
        self._has_none = work is None and not self.gap.is_set()
        return work

    def __enter__(self) -> bool:
        if self._has_none and threading.current_thread().name == "score":
            self._has_none = False
            self.gap.set()
            self.go_on.wait(60)
        return self.changed.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.changed.__exit__(*error)

    def wait(self) -> None:
        self.changed.wait()

    def notify_all(self) -> None:
        self.changed.notify_all()


@pytest.mark.parametrize("more", [1, 2])
def test_calls_that_come_while_a_thread_notices_that_none_are_left_are_made(more: int) -> None:
    calls = HeldBack()
    with calls.gathering() as gathering:
        gathering.add([lambda: 0])
        assert calls.gap.wait(60)
        for number in range(1, 1 + more):
            gathering.add([lambda n=number: n])  # type: ignore[misc]
        threading.Timer(0.2, calls.go_on.set).start()  # when the caller waits
        assert gathering.results() == list(range(1 + more))
    calls.close()
    calls.join(1.0)


def test_what_others_were_late_with_says_nothing_of_ones_own_calls(hanging: Hanging) -> None:
    shared = Permits()
    function = UserFunction("reward", "score", 0.2, "rollouts.reward_timeout_s", permits=shared)
    ours, theirs = UserCalls(function), UserCalls(function, ThreadKind("rewards"))
    with ours.gathering() as gathering:
        theirs.results([hanging] * MAX_LATE_IN_A_ROW)
        gathering.add([lambda: 1])
        assert gathering.results() == [1]
    for calls in (ours, theirs):
        calls.close()
        calls.join(1.0)


def test_a_call_is_the_callers_once_he_waits_for_it(limited: UserCalls) -> None:
    begun, end = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        end.wait(60)

    with limited.gathering() as gathering:
        gathering.add([work])
        assert begun.wait(60)
        [call] = calls_now()
        assert call.for_thread == call.thread_id
        waits = threading.Thread(target=gathering.results)
        waits.start()
        eventually(lambda: call.for_thread == waits.ident, "nobody waits for it")
        end.set()
        waits.join(60)


def test_a_call_that_hangs_while_others_come_costs_its_own_outcome(limited: UserCalls, hanging: Hanging) -> None:
    with limited.gathering() as gathering:
        gathering.add([hanging])
        eventually(lambda: not calls_now() and hanging.begun == 1, "it is not given up")
        gathering.add([lambda: 1, hanging, lambda: 3])
        late, first, later, last = gathering.results()
    assert (first, last) == (1, 3)
    assert isinstance(late, Failure)
    assert isinstance(later, Failure)


def test_if_nothing_is_asked_for_nothing_comes(limited: UserCalls) -> None:
    with limited.gathering() as gathering:
        assert gathering.results() == []
    assert num_threads() == 0


def test_what_is_missing_after_an_interrupt_is_not_called(limited: UserCalls) -> None:
    begun, end = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        end.wait(60)

    seen: list[int] = []

    def interrupted() -> None:
        with limited.gathering() as gathering:
            gathering.add([first, lambda: seen.append(1)])
            assert begun.wait(60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    end.set()
    assert limited.results([lambda: 5]) == [5]
    assert not seen


def test_where_too_many_are_stuck_the_caller_learns_it_in_the_end(hanging: Hanging, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "MAX_STUCK", 1)
    calls = UserCalls(UserFunction("reward", "score", 0.1, "rollouts.reward_timeout_s"))
    with calls.gathering() as gathering:
        gathering.add([hanging, hanging, lambda: 3])
        eventually(lambda: calls._error is not None, "two are stuck, and nobody says so")
        gathering.add([lambda: 4])
        with pytest.raises(TaskError, match=r"2 calls of `score` were given up after 0\.1 s"):
            gathering.results()
    calls.close()


def test_without_a_limit_the_caller_makes_them_once_all_are_there() -> None:
    calls = UserCalls(UserFunction("reward", "score", None, "rollouts.reward_timeout_s"))
    with calls.gathering() as gathering:
        gathering.add([threading.current_thread])
        gathering.add([threading.current_thread])
        assert gathering.results() == [threading.current_thread()] * 2


# ── coroutines ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    loop = EventLoop()
    yield loop
    loop.close()


async def doubled(number: int, seconds: float = 0.0) -> int:
    await asyncio.sleep(seconds)
    return 2 * number


def test_what_can_be_awaited_is_and_all_of_it_in_one_loop(loop: EventLoop) -> None:
    async def here() -> Any:
        return asyncio.get_running_loop()

    assert loop.result(doubled(4)) == 8
    assert loop.result(5) == 5
    assert loop.result(here()) is loop.result(here())


def test_a_loop_that_has_nothing_left_to_do_is_closed_in_the_end(loop: EventLoop) -> None:
    async def here() -> Any:
        return asyncio.get_running_loop()

    first = loop.result(here())
    loop.close()
    eventually(first.is_closed, "it is open still")
    second = loop.result(here())
    assert second is not first, "one that is used again begins anew"


def test_coroutines_of_several_threads_wait_side_by_side(loop: EventLoop) -> None:
    calls = UserCalls(UserFunction("reward", "score", 300.0, "key", loop=loop), ThreadKind("score", most=8))
    waiting: list[int] = []

    async def together(number: int) -> int:
        """Waits until eight do. The first waits for itself: others help once one has waited."""
        waiting.append(number)
        while number and len(waiting) < 9:
            await asyncio.sleep(0.001)
        return await doubled(number, 0.1 if number == 0 else 0.0)

    works = [lambda n=n: loop.result(together(n)) for n in range(17)]  # type: ignore[misc]
    assert calls.results(works) == [2 * n for n in range(17)]
    calls.close()
    calls.join(1.0)


@pytest.mark.parametrize("blocks", [False, True])
def test_a_coroutine_that_hangs_is_left_behind_with_its_place(loop: EventLoop, blocks: bool) -> None:
    end = threading.Event()

    async def hang() -> int:
        if blocks:
            end.wait(300)  # which keeps every other coroutine of the loop from running
        else:
            await asyncio.sleep(300)
        return 1

    calls = UserCalls(UserFunction("reward", "score", 0.5, "key", loop=loop))
    late, fine = calls.results([lambda: loop.result(hang()), lambda: loop.result(doubled(1))])
    assert fine == 2
    assert isinstance(late, Failure)
    assert "in hang:" in late.where
    end.set()
    calls.close()
    calls.join(1.0)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_coroutine_that_exits_fails_its_call_and_the_loop_goes_on(loop: EventLoop, error: BaseException) -> None:
    async def leave() -> int:
        raise error

    calls = UserCalls(UserFunction("reward", "score", 300.0, "key", loop=loop))
    failed, fine = calls.results([lambda: loop.result(leave()), lambda: loop.result(doubled(1))])
    assert fine == 2
    assert isinstance(failed, Failure)
    assert failed.reason.startswith(type(error).__name__)
    assert failed.where.endswith("in leave: raise error")
    calls.close()
    calls.join(1.0)


def test_a_coroutine_that_is_given_up_is_cancelled_and_its_thread_ends(loop: EventLoop) -> None:
    cancelled = threading.Event()

    async def hang() -> None:
        try:
            await asyncio.sleep(600)
        finally:
            cancelled.set()

    before = set(threading.enumerate())
    calls = UserCalls(UserFunction("reward", "score", 0.1, "key", loop=loop))
    for _ in range(3):
        assert isinstance(calls.results([lambda: loop.result(hang())])[0], Failure)
    assert cancelled.wait(60), "what it holds, such as a connection, is let go"
    left = [thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("score")]
    for thread in left:
        thread.join(60)
    assert not any(thread.is_alive() for thread in left)
    calls.close()
    calls.join(1.0)


def test_a_long_reason_is_kept_with_its_beginning_and_its_end() -> None:
    failure = failure_of("environment", ValueError("first" + "x" * 5_000_000 + "last"))
    assert failure.reason.startswith("ValueError: first")
    assert failure.reason.endswith("last")
    assert "characters left out" in failure.reason
    assert len(str(failure)) < 3000


def test_a_group_of_errors_says_the_first_of_them_and_its_place() -> None:
    def raises() -> None:
        raise ValueError("no such move")

    try:
        raises()
    except ValueError as error:
        inner = error
    failure = failure_of("environment", ExceptionGroup("several", [ExceptionGroup("more", [inner])]))
    assert failure.reason == "ExceptionGroup: several (1 sub-exception): ValueError: no such move"
    assert 'in raises: raise ValueError("no such move")' in failure.where
