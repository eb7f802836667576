from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redline.telemetry import Recorder, idle_as, process_start_ns, recording, span
from redline.telemetry.ledger import ledger_from_spans


class FakeClock:
    def __init__(self, now: int = 1000) -> None:
        self.now = now

    def __call__(self) -> int:
        return self.now


def in_thread(work: Callable[[], None], name: str) -> None:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    thread.join()


def test_the_innermost_span_owns_the_time() -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    clock.now += 1
    with recorder.span("run.evaluate"):
        clock.now += 10
        with recorder.span("engine.decode"):
            clock.now += 100
        clock.now += 20
    clock.now += 2
    lane = recorder.ledger().lanes["main"]
    assert lane.rows == {"run.evaluate": 30, "engine.decode": 100}
    assert (lane.wall_ns, lane.unaccounted_ns) == (133, 3)


def test_a_span_that_is_still_open_has_its_time_in_the_ledger() -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    with recorder.span("run.startup"):
        clock.now += 5
        assert recorder.ledger().lanes["main"].rows == {"run.startup": 5}
        clock.now += 5
    assert recorder.ledger().lanes["main"].rows == {"run.startup": 10}


def test_rows_and_unaccounted_sum_to_the_wall_clock_to_the_nanosecond() -> None:
    before = time.perf_counter_ns()
    recorder = Recorder()
    after = time.perf_counter_ns()
    for _ in range(100):
        with recorder.span("trainer.forward"), recorder.span("trainer.backward"):
            sum(range(100))
    earliest = time.perf_counter_ns() - after
    lane = recorder.ledger().lanes["main"]
    assert sum(lane.rows.values()) + lane.unaccounted_ns == lane.wall_ns
    assert earliest <= lane.wall_ns <= time.perf_counter_ns() - before


NAMES = st.sampled_from(["engine.prefill", "engine.decode", "trainer.forward", "run.checkpoint"])
TICKS = st.integers(0, 5)
PROGRAMS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), NAMES, TICKS),
        st.tuples(st.just("close"), st.integers(1, 3), TICKS),
        st.tuples(st.just("add"), NAMES, st.tuples(TICKS, TICKS, TICKS)),
    )
)


@settings(deadline=None)
@given(PROGRAMS)
def test_the_streaming_ledger_equals_the_union_of_intervals_on_any_nesting(program: list) -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    open_spans = []
    for action, what, ticks in program:
        if action == "open":
            clock.now += ticks
            open_spans.append(recorder.span(what))
            open_spans[-1].__enter__()
        elif action == "close" and open_spans:
            clock.now += ticks
            closed = open_spans[-what:][0]  # leaving out up to two exits, as an interrupt would
            closed.__exit__(None, None, None)
            del open_spans[open_spans.index(closed) :]
        elif action == "add":
            before, length, after = ticks
            clock.now += before + length + after
            recorder.add(what, clock.now - after - length, clock.now - after)
    if open_spans:
        open_spans[0].__exit__(None, None, None)
    clock.now += 3
    streamed = recorder.ledger()
    assert ledger_from_spans(recorder.drain(), {"main": (1000, clock.now)}) == streamed


def test_each_thread_has_a_lane_of_its_own() -> None:
    recorder = Recorder()

    def work() -> None:
        with recorder.span("rollouts.reward"):
            time.sleep(0.002)

    with recorder.span("engine.decode"):
        in_thread(work, "rewards")
        in_thread(work, "rewards")
    lanes = recorder.ledger().lanes
    assert list(lanes) == ["main", "rewards", "rewards-2"]
    assert lanes["main"].rows.keys() == {"engine.decode"}
    assert lanes["rewards"].rows.keys() == lanes["rewards-2"].rows.keys() == {"rollouts.reward"}


def test_the_lane_of_a_finished_thread_stops_growing() -> None:
    recorder = Recorder()

    def work() -> None:
        with recorder.span("rollouts.reward"):
            pass

    in_thread(work, "rewards")
    wall_ns = recorder.ledger().lanes["rewards"].wall_ns
    time.sleep(0.002)
    assert recorder.ledger().lanes["rewards"].wall_ns == wall_ns


def test_a_ledger_asked_for_by_another_thread_adds_up_while_spans_fly_by() -> None:
    recorder = Recorder(keep_spans=False)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with recorder.span("engine.decode"), recorder.span("engine.sample"):
                pass

    thread = threading.Thread(target=work, name="engine")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(300):
            recorder.ledger()  # a lane that does not add up is refused where it is made
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()


def test_without_a_recorder_a_span_does_nothing() -> None:
    with span("engine.decode", version=1):
        pass


def test_spans_go_to_the_recorder_that_is_recording() -> None:
    with recording(Recorder()) as outer:
        with recording(Recorder()) as inner, span("engine.decode"):
            pass
        with span("engine.prefill"):
            pass
    with span("trainer.forward"):
        pass
    assert [s.name for s in inner.drain()] == ["engine.decode"]
    assert [s.name for s in outer.drain()] == ["engine.prefill"]


def test_draining_forgets_the_spans_but_not_their_sums() -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    with recorder.span("weight_sync.publish", version=3):
        clock.now += 7
    [only] = recorder.drain()
    assert (only.lane, only.name, only.start_ns, only.end_ns, only.args) == (
        "main",
        "weight_sync.publish",
        1000,
        1007,
        {"version": 3},
    )
    assert recorder.drain() == []
    assert recorder.ledger().lanes["main"].rows == {"weight_sync.publish": 7}


def test_a_recorder_may_keep_only_the_sums() -> None:
    recorder = Recorder(keep_spans=False)
    with recorder.span("engine.decode"):
        pass
    assert recorder.drain() == []
    assert "engine.decode" in recorder.ledger().lanes["main"].rows


def test_a_step_mark_holds_what_happened_since_the_last_one() -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    clock.now += 50
    recorder.step_mark()
    with recorder.span("engine.decode"):
        clock.now += 5
        assert recorder.step_mark() == {"engine.decode": 5}
        clock.now += 2
    clock.now += 1
    assert recorder.step_mark() == {"engine.decode": 2, "unaccounted": 1}
    assert recorder.step_mark() == {}


def test_a_lane_can_begin_with_the_start_of_the_process() -> None:
    recorder = Recorder()
    imported_ns = time.perf_counter_ns()
    recorder.add("run.startup", process_start_ns(), imported_ns)
    lane = recorder.ledger().lanes["main"]
    assert lane.rows == {"run.startup": imported_ns - process_start_ns()}
    assert lane.wall_ns >= lane.rows["run.startup"]


def test_a_thread_on_call_waits_under_a_name_of_its_own() -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    with recording(recorder):
        clock.now += 3
        idle_as("wait.for_work")
        clock.now += 10
        with span("run.work"):
            clock.now += 100
        clock.now += 20
    lane = recorder.ledger().lanes["main"]
    assert lane.rows == {"wait.for_work": 30, "run.work": 100}
    assert (lane.wall_ns, lane.unaccounted_ns) == (133, 3)


def test_an_interval_may_not_be_added_over_recorded_time() -> None:
    clock = FakeClock()
    recorder = Recorder(clock=clock)
    with recorder.span("engine.decode"):
        clock.now += 10
    with pytest.raises(AssertionError, match="overlaps"):
        recorder.add("run.startup", 1005, 1010)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says when a process began")
def test_the_process_start_is_before_its_imports_and_after_its_launch() -> None:
    program = "import time; from redline.telemetry.spans import process_start_ns as p; print(time.perf_counter_ns() - p())"
    launched_ns = time.perf_counter_ns()
    age_ns = int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)
    tick_ns = 10_000_000  # the kernel rounds the start down to a tick
    assert 10_000_000 < age_ns < time.perf_counter_ns() - launched_ns + tick_ns


def test_an_error_in_a_span_passes_through_and_closes_it() -> None:
    recorder = Recorder()
    with pytest.raises(ValueError, match="oops"), recorder.span("engine.decode"):
        raise ValueError("oops")
    assert [s.name for s in recorder.drain()] == ["engine.decode"]


def test_a_span_closed_by_the_one_around_it_is_not_closed_twice() -> None:
    recorder = Recorder()
    outer, inner = recorder.span("run.evaluate"), recorder.span("engine.decode")
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    inner.__exit__(None, None, None)
    assert [s.name for s in recorder.drain()] == ["engine.decode", "run.evaluate"]


def test_a_span_costs_microseconds_at_most() -> None:
    def cost_ns(rounds: int = 1000) -> float:
        start = time.perf_counter_ns()
        for _ in range(rounds):
            with span("engine.decode"):
                pass
        return (time.perf_counter_ns() - start) / rounds

    with recording(Recorder()) as recorder:
        samples = []
        for _ in range(10):
            samples.append(cost_ns())
            recorder.drain()
    # About 1.2 µs on a quiet core; the bound leaves room for a busy CI machine.
    assert min(samples) < 20_000


# ── coroutines ─────────────────────────────────────────────────────────────────────────────────────────────────────────


async def waits(clock: FakeClock, name: str, turns: list[int], gate: asyncio.Event) -> None:
    """Holds a span while others run, and works `turns` ns each time it gets its turn."""
    with span(name):
        for turn in turns:
            clock.now += turn
            await asyncio.sleep(0)
        await gate.wait()


def test_spans_held_across_an_await_do_not_touch_those_of_other_tasks() -> None:
    clock = FakeClock()

    async def main() -> None:
        gate = asyncio.Event()
        tasks = [asyncio.create_task(waits(clock, name, [1, 10], gate)) for name in ("rollouts.first", "rollouts.second")]
        while not all(task.done() for task in tasks):
            clock.now += 100
            await asyncio.sleep(0)
            gate.set()
        await asyncio.gather(*tasks)

    with recording(Recorder(clock=clock)) as recorder, span("run.evaluate"):
        clock.now += 5
        asyncio.run(main())
        clock.now += 7
    ledger = recorder.ledger()
    spans = {span.name: span for span in recorder.drain()}
    wall_ns = clock.now - 1000
    assert ledger.lanes["main"].rows == {"run.evaluate": wall_ns}
    assert {lane for lane in ledger.lanes if lane != "main"} == {"main/task", "main/task-2"}
    for name in ("rollouts.first", "rollouts.second"):
        lane = ledger.lanes[spans[name].lane]
        assert lane.rows == {name: spans[name].end_ns - spans[name].start_ns}
        assert lane.rows[name] > 200, "the time it waited is its own"


def test_a_task_takes_over_the_lane_of_one_that_is_done() -> None:
    clock = FakeClock()

    async def work(length: int) -> None:
        with span("rollouts.attempt"):
            clock.now += length

    async def main() -> None:
        for length in (1, 10, 100):
            await asyncio.create_task(work(length))
            await asyncio.sleep(0)  # the loop tells those who wait for a task one after the other
            clock.now += 1000

    with recording(Recorder(clock=clock)) as recorder:
        asyncio.run(main())
    clock.now += 5
    lanes = recorder.ledger().lanes
    assert lanes.keys() == {"main", "main/task"}
    assert lanes["main/task"].rows == {"rollouts.attempt": 111, "wait.for_task": 2000}
    assert lanes["main/task"].wall_ns == 2111, "it ended with its last task"


def test_span_of_a_task_that_does_not_await_is_booked_in_the_lane_of_its_thread() -> None:
    recorder = Recorder()

    async def work() -> None:
        for _ in range(3):
            with span("rollouts.parse", awaits=False):
                time.sleep(0.001)
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(work(), work())

    with recording(recorder), span("rollouts.environment"):
        asyncio.run(both())
    [lane] = recorder.ledger().lanes.values()
    assert lane.rows["rollouts.parse"] >= 6_000_000
    assert set(lane.rows) == {"rollouts.environment", "rollouts.parse"}


def test_what_a_task_left_open_is_closed_with_it() -> None:
    clock = FakeClock()

    async def abandons() -> None:
        span("rollouts.attempt").__enter__()
        clock.now += 3

    with recording(Recorder(clock=clock)) as recorder:
        asyncio.run(abandons())
    assert [(each.name, each.end_ns - each.start_ns) for each in recorder.drain()] == [("rollouts.attempt", 3)]
    assert recorder.ledger().lanes["main/task"].rows == {"rollouts.attempt": 3}


def test_a_cancelled_task_closes_its_span_and_others_keep_theirs() -> None:
    async def main() -> None:
        async def forever(name: str) -> None:
            with span(name):
                await asyncio.Event().wait()

        tasks = [asyncio.create_task(forever(name)) for name in ("rollouts.a", "rollouts.b")]
        await asyncio.sleep(0)
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert [each.name for each in recorder.drain()] == ["rollouts.a"]
        tasks[1].cancel()
        await asyncio.wait(tasks[1:])

    with recording(Recorder()) as recorder:
        asyncio.run(main())
    assert [each.name for each in recorder.drain()] == ["rollouts.b"]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.lists(st.tuples(NAMES, st.integers(0, 3), st.integers(0, 9)), max_size=6), min_size=1, max_size=5))
def test_the_lanes_of_any_interleaving_of_tasks_equal_the_union_of_their_intervals(programs: list) -> None:
    clock = FakeClock()

    async def follow(program: list) -> None:
        with ExitStack() as around:
            for name, yields, ticks in program:
                around.enter_context(span(name))
                for _ in range(yields):
                    clock.now += ticks
                    await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(*(follow(program) for program in programs))

    with recording(Recorder(clock=clock)) as recorder:
        asyncio.run(main())
    streamed = recorder.ledger().lanes
    again = ledger_from_spans(recorder.drain()).lanes
    for name, lane in again.items():
        rows = {key: ns for key, ns in streamed[name].rows.items() if key != "wait.for_task" and ns}
        assert rows == {key: ns for key, ns in lane.rows.items() if ns}


# ── user code ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_user_code_has_spans_of_its_own_section() -> None:
    import redline

    with redline.span("my part"):  # outside a run: nothing
        pass
    with recording(Recorder()) as recorder, redline.span("my part", size=3), redline.span("environment.reset"):
        pass
    assert [(each.name, each.args) for each in recorder.drain()] == [("environment.reset", {}), ("user.my part", {"size": 3})]


def test_importing_redline_loads_nothing_and_spans_no_torch() -> None:
    program = (
        "import sys, redline; light = 'redline.telemetry' not in sys.modules\n"
        "with redline.span('x'): pass\n"
        "print(light, 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "True False\n"


@pytest.mark.skipif(sys.platform != "linux", reason="macOS allows no fork without exec")
def test_a_forked_child_does_not_fill_its_copy_of_the_recorder() -> None:
    with recording(Recorder()) as recorder:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            with span("engine.decode"):
                pass
            os.write(write, str(len(recorder.drain())).encode())
            os._exit(0)
        os.waitpid(pid, 0)
        assert os.read(read, 9) == b"0"
        os.close(read)
        os.close(write)
