"""Jobs that are put to threads which score beside the trainer: real threads, which tests hold and let go."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from support.eventually import eventually

from redline.errors import TaskError
from redline.rollouts.user_code import limited_calls as calls_module
from redline.rollouts.user_code.jobs import Job, ThreadKind, UserFunction
from redline.rollouts.user_code.limited_calls import UserCalls
from redline.telemetry import Recorder, recording, span
from redline.telemetry.stalls.activity import ActivityProbe
from redline.telemetry.stalls.stacks import own_stacks
from redline.telemetry.stalls.watch import describe
from redline.telemetry.workers import workers_now

pytestmark = pytest.mark.usefixtures("no_calls_of_others")


class Deliveries:
    """A pool, and what came of it."""

    def __init__(self, most: int, prepare_thread: Callable[[], None] = lambda: None) -> None:
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        self.found: dict[int, object] = {}
        self.order: list[int] = []
        self.errors: list[Exception] = []
        kind = ThreadKind("rewards", most, "rollouts.reward", "wait.for_completions", prepare_thread)
        self.pool = UserCalls(UserFunction("reward", "score", None, "key"), kind, fail=self._fail, lock=lock)

    def put(self, number: int, work: Callable[[], object]) -> None:
        """A job of one call, which delivers what the call returns."""
        self.pool.put(Job(number, lambda: [work], lambda outcomes: outcomes[0], partial(self._take, number)))

    def _take(self, number: int, result: object) -> None:
        self.found[number] = result
        self.order.append(number)
        self.changed.notify_all()

    def _fail(self, error: Exception) -> None:
        self.errors.append(error)
        self.changed.notify_all()

    def wait_for(self, condition: Callable[[], object]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, 300)


class Held:
    """Work that waits until it is let go, and says who did it."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.goes_on.wait(300)
        return threading.current_thread().name


@pytest.fixture
def many() -> Iterator[Deliveries]:
    deliveries = Deliveries(most=4)
    yield deliveries
    deliveries.pool.close()
    deliveries.pool.join(60)


def held(deliveries: Deliveries, count: int) -> list[Held]:
    works = [Held() for _ in range(count)]
    for number, work in enumerate(works):
        deliveries.put(number, work)
    return works


def let_go(works: list[Held]) -> None:
    for work in works:
        work.goes_on.set()


def test_one_worker_takes_one_after_the_other_in_order(many: Deliveries) -> None:
    for number in range(20):
        many.put(number, lambda: threading.current_thread().name)
    many.wait_for(lambda: len(many.found) == 20)
    assert many.order == list(range(20))
    assert set(many.found.values()) == {"rewards"}


def test_as_many_are_at_work_as_it_is_told_but_no_more_than_there_may_be(many: Deliveries) -> None:
    works = held(many, 6)
    assert works[0].begun.wait(300)
    assert not works[1].begun.wait(0.02)
    many.pool.hold(3)
    assert all(work.begun.wait(300) for work in works[:3])
    assert (many.pool.num_scoring, many.pool.num_to_score) == (3, 6)
    many.pool.hold(100)
    assert works[3].begun.wait(300)
    assert not works[4].begun.wait(0.02)
    let_go(works)
    many.wait_for(lambda: len(many.found) == 6)
    assert set(many.found.values()) == {"rewards", "rewards-2", "rewards-3", "rewards-4"}


def test_one_too_many_completes_what_it_is_at_and_comes_back_under_its_name(many: Deliveries) -> None:
    many.pool.hold(2)
    first = held(many, 2)
    assert all(work.begun.wait(300) for work in first)
    many.pool.hold(1)
    let_go(first)
    many.wait_for(lambda: len(many.found) == 2)
    second = held(many, 2)
    assert second[0].begun.wait(300)
    assert not second[1].begun.wait(0.02)
    many.pool.hold(2)
    assert second[1].begun.wait(300)
    let_go(second)
    many.wait_for(lambda: many.pool.num_to_score == 0)
    assert set(many.found.values()) == {"rewards", "rewards-2"}


def test_what_is_cancelled_leaves_its_worker_behind_and_another_takes_its_place(many: Deliveries) -> None:
    many.pool.hold(2)
    works = held(many, 4)
    assert all(work.begun.wait(300) for work in works[:2])
    many.pool.cancel({0, 3})
    assert works[2].begun.wait(300), "the other one is still at work"
    assert not works[3].begun.is_set()
    let_go(works)
    many.wait_for(lambda: len(many.found) == 2)
    assert many.order in ([1, 2], [2, 1])
    assert many.found[2] == "rewards-3"
    assert {state.name for state in workers_now() if state.name.startswith("rewards")} == set(many.found.values())
    assert not many.errors


def test_what_was_left_behind_may_end_as_it_likes(many: Deliveries) -> None:
    works = held(many, 1)
    assert works[0].begun.wait(300)
    many.pool.cancel({0})
    works[0].goes_on.wait = lambda timeout: False  # type: ignore[method-assign]  # its assert fails when it wakes up
    works[0].goes_on.set()
    many.put(1, lambda: "done")
    many.wait_for(lambda: 1 in many.found)
    assert not many.errors


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(("raised", "found"), [(ValueError("no"), ValueError), (SystemExit(3), TaskError)])
def test_work_that_ends_its_worker_is_told_and_the_worker_is_dead(
    many: Deliveries, raised: BaseException, found: type[Exception]
) -> None:
    def end(outcomes: object) -> None:
        raise raised

    many.pool.put(Job(0, list, end, lambda _: None))
    many.wait_for(lambda: many.errors)
    assert isinstance(many.errors[0], found)
    eventually(lambda: not any(state.name == "rewards" and state.is_alive for state in workers_now()))
    many.pool.close()
    assert [state.end for state in workers_now() if state.name == "rewards"] == ["its thread ended"], "for the alert"


def test_nothing_is_begun_while_it_is_to_be_quiet(many: Deliveries) -> None:
    many.pool.be_quiet(quiet=True)
    many.pool.be_quiet(quiet=True)
    [work] = held(many, 1)
    many.pool.be_quiet(quiet=False)
    assert not work.begun.wait(0.02)
    many.pool.be_quiet(quiet=False)
    assert work.begun.wait(300)
    let_go([work])


def test_the_load_is_how_long_how_many_were_to_be_scored(many: Deliveries) -> None:
    before = time.perf_counter()
    many.pool.take_load()
    works = held(many, 3)
    assert works[0].begun.wait(300)
    time.sleep(0.05)
    load = many.pool.take_load()
    passed = time.perf_counter() - before
    assert len(load) == 4
    assert 0.05 <= load[3] <= passed
    assert sum(load) <= passed
    let_go(works)
    many.wait_for(lambda: len(many.found) == 3)
    many.pool.take_load()
    many.pool.be_quiet(quiet=True)
    many.put(3, lambda: None)
    time.sleep(0.02)
    assert sum(many.pool.take_load()[1:]) == 0, "nobody could have scored it"
    many.pool.be_quiet(quiet=False)


def test_each_thread_is_prepared_and_has_a_lane_of_its_own_that_adds_up() -> None:
    prepared: list[str] = []
    recorder, together = Recorder(), threading.Barrier(3, timeout=300)
    with recording(recorder):
        deliveries = Deliveries(3, lambda: prepared.append(threading.current_thread().name))
        deliveries.pool.hold(3)

        def work() -> None:
            with span("rollouts.reward"):
                together.wait()

        for number in range(9):
            deliveries.put(number, work)
        deliveries.wait_for(lambda: len(deliveries.found) == 9)
        deliveries.pool.close()
        deliveries.pool.join(60)
        lanes = recorder.ledger().lanes
    names = {"rewards", "rewards-2", "rewards-3"}
    assert set(prepared) == names
    assert names <= lanes.keys()
    for name in names:
        assert lanes[name].rows["rollouts.reward"] > 0
        assert lanes[name].rows.keys() == {"rollouts.reward", "wait.for_completions"}
        assert sum(lanes[name].rows.values()) + lanes[name].unaccounted_ns == lanes[name].wall_ns


def test_a_stall_names_the_worker_that_hangs_and_where() -> None:
    recorder = Recorder()
    with recording(recorder):
        deliveries = Deliveries(2)
        deliveries.pool.hold(2)
        work = Held()

        def hang() -> str:
            with span("rollouts.reward"):
                return work()

        deliveries.put(0, hang)
        assert work.begun.wait(300)
        with span("wait.for_rollouts"):
            document = describe(ActivityProbe(recorder).look(), {}, own_stacks(), [], step=3)
        work.goes_on.set()
        deliveries.wait_for(lambda: 0 in deliveries.found)
        deliveries.pool.close()
    name = deliveries.found[0]
    assert re.match(rf"{name} has been in rollouts\.reward for \d+ s, at ", document["summary"])
    waits = [re.sub(r"for \d+ s", "for 0 s", line) for line in document["who_waits_for_whom"]]
    assert f"main has waited for rollouts for 0 s, that is for lane {name}" in waits
    assert {"rewards", "rewards-2"} <= {worker["name"] for worker in document["workers"] if worker["is_alive"]}
    assert {"rewards", "rewards-2"} <= {thread["name"] for thread in document["threads"]}


class Clock:
    """A time that passes only while a thread is waited for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waited_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def join(self, thread: threading.Thread, timeout_s: float) -> None:
        """Wait in vain."""
        self.waited_s.append(timeout_s)
        self.now_s += timeout_s


def test_closing_waits_for_all_of_them_together_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    deliveries = Deliveries(4)
    deliveries.pool.hold(4)
    works = held(deliveries, 4)
    assert all(work.begun.wait(300) for work in works)
    clock = Clock()
    deliveries.pool.close()
    with monkeypatch.context() as patched:
        patched.setattr(calls_module, "time", clock)
        patched.setattr(threading.Thread, "join", lambda thread, timeout_s: clock.join(thread, timeout_s))
        deliveries.pool.join(0.1)
    assert clock.waited_s == [0.1, 0, 0, 0], "four of them, one patience"
    assert not any(state.name.startswith("rewards") for state in workers_now())
    let_go(works)
