"""Where blocking code of an environment runs: what a call returns, and what becomes of one that hangs, raises or kills."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support.eventually import eventually
from support.odd_games import OVER, OddGame

from redline.environments.workers import threads
from redline.environments.workers.held import GameClass, Workers
from redline.environments.workers.kinds import make_workers
from redline.environments.workers.processes import ProcessWorkers
from redline.environments.workers.threads import ThreadWorkers
from redline.errors import CallError, TaskError
from redline.telemetry.stalls.calls import calls_now
from redline.types import Task

TASK = Task("t1", [{"role": "user", "content": "hello"}], data={"size": 3})
SUPPORT = str(Path(__file__).parents[3])
KINDS = ("loop", "threads", "processes")


def odd(moves: int = 3, log: str = "") -> GameClass:
    return GameClass("support.odd_games:OddGame", {"moves": moves, "log": log}, SUPPORT, OddGame)


@pytest.fixture(autouse=True)
def nobody_sleeps_on() -> Iterator[None]:
    """No thread that a test leaves behind is one of the tests after it."""
    OVER.clear()
    yield
    OVER.set()


@pytest.fixture(params=KINDS, scope="module")
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    made = make_workers(request.param, 2, 300.0)
    yield made
    made.close()


@pytest.fixture(params=KINDS[1:], scope="module")
def quick_workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Two workers that let a call last for a second and a half."""
    made = make_workers(request.param, 2, 1.5)
    yield made
    made.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessWorkers]:
    made = ProcessWorkers(2, 300.0)
    yield made
    made.close()


def test_a_game_keeps_its_state_from_call_to_call(workers: Workers) -> None:
    async def play() -> None:
        first, second = await workers.make(odd()), await workers.make(odd())
        assert await first.call("reset", TASK) == "t1: hello"
        await second.call("reset", TASK)
        assert "move 1" in (await first.call("step", "up")).observation
        assert "move 2" in (await first.call("step", "up")).observation
        reaction = await second.call("step", "down")
        assert "move 1" in reaction.observation
        assert reaction.reward == {"moves": 1.0}
        assert not reaction.done
        state = await first.call("snapshot")
        assert state == bytes([2, 255])
        await second.call("restore", state)
        assert (await second.call("step", "down")).done
        first.drop()
        second.drop()

    asyncio.run(play())


def test_what_a_game_raises_reaches_the_coroutine_with_its_place(workers: Workers) -> None:
    async def play() -> None:
        game = await workers.make(odd())
        await game.call("reset", TASK)
        with pytest.raises((ValueError, CallError), match="no such move") as caught:
            await game.call("step", "raise")
        if isinstance(caught.value, CallError):
            assert "odd_games.py" in caught.value.where
            assert caught.value.message == "ValueError: no such move"
        assert "move 2" in (await game.call("step", "up")).observation, "it goes on"

    asyncio.run(play())


def test_a_function_is_called_by_its_name(workers: Workers) -> None:
    assert asyncio.run(workers.call("operator:add", 2, 3)) == 5


def test_a_dropped_game_is_closed(workers: Workers, tmp_path: Path) -> None:
    log = tmp_path / "log"

    async def play() -> None:
        game = await workers.make(odd(log=str(log)))
        game.drop()
        await asyncio.to_thread(eventually, lambda: log.exists() and log.read_text() == "closed\n")

    asyncio.run(play())


def test_a_call_that_does_not_return_fails_and_others_go_on(quick_workers: Workers) -> None:
    async def play() -> None:
        games = [await quick_workers.make(odd()) for _ in range(4)]
        for game in games:
            await game.call("reset", TASK)
        with pytest.raises(CallError, match=r"`step` did not return within 1.5 s"):
            await games[0].call("step", "hang")
        assert "move 1" in (await games[1].call("step", "up")).observation, "it lives elsewhere"
        again = await quick_workers.make(odd())
        assert await again.call("reset", TASK) == "t1: hello"

    asyncio.run(play())


def test_threads_that_hang_do_not_use_up_the_workers() -> None:
    workers = ThreadWorkers(2, 0.3)

    async def play() -> None:
        for _ in range(3):
            games = [await workers.make(odd()) for _ in range(2)]
            late = await asyncio.gather(*(game.call("step", "sleep 60") for game in games), return_exceptions=True)
            assert [type(error) for error in late] == [CallError, CallError]
            assert "odd_games.py" in late[0].where
        assert (await (await workers.make(odd())).call("step", "up")).observation

    asyncio.run(play())
    workers.close()


def test_a_call_under_way_when_all_is_closed_is_watched_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may never return, and is not waited for: a watch over slow calls would tell of it for ever."""
    monkeypatch.setattr(threads, "PATIENCE_S", 0.0)
    workers, began, over = ThreadWorkers(1, None), threading.Event(), threading.Event()

    def a_call_that_blocks() -> None:
        began.set()
        over.wait()

    async def play() -> None:
        call = asyncio.ensure_future(workers.call(a_call_that_blocks))
        await asyncio.to_thread(began.wait)
        assert "a_call_that_blocks" in [call.what for call in calls_now()]
        workers.close()
        assert "a_call_that_blocks" not in [call.what for call in calls_now()]
        with pytest.raises(TaskError, match="workers were closed"):
            await call

    asyncio.run(play())
    over.set()


@pytest.mark.parametrize(
    "how", ["exit", *(pytest.param(how, marks=pytest.mark.slow) for how in ("segfault", "kill", "hang in C"))]
)
def test_a_process_that_dies_fails_the_games_that_lived_in_it_and_no_others(how: str) -> None:
    workers = ProcessWorkers(2, 1.0 if how == "hang in C" else 300.0)

    async def play() -> None:
        games = [await workers.make(odd(moves=99)) for _ in range(4)]
        where = [(await game.call("step", "up")).observation.rpartition(" ")[2] for game in games]
        assert where[0] == where[2] != where[1] == where[3]
        with pytest.raises(CallError) as caught:
            await games[0].call("step", how)
        assert {
            "segfault": "ended by SIGSEGV",
            "exit": "ended with exit code 3",
            "kill": "ended by SIGKILL",
            "hang in C": "did not return within 1 s",
        }[how] in caught.value.message
        with pytest.raises(CallError, match="process"):
            await games[2].call("step", "up")
        assert "move 2" in (await games[1].call("step", "up")).observation
        assert "move 2" in (await games[3].call("step", "up")).observation
        games[0].drop()
        games[2].drop()
        replaced = await workers.make(odd())
        assert (await replaced.call("step", "up")).observation.rpartition(" ")[2] not in where

    asyncio.run(play())
    workers.close()


def test_a_process_that_was_killed_while_it_had_nothing_to_do_is_replaced(processes: ProcessWorkers) -> None:
    async def play() -> None:
        game = await processes.make(odd())
        for pid in processes.pids:
            os.kill(pid, 9)
        with pytest.raises(CallError, match="SIGKILL"):
            await game.call("step", "up")
        game.drop()
        assert (await (await processes.make(odd())).call("step", "up")).observation

    asyncio.run(play())


def test_what_a_game_prints_is_no_answer(processes: ProcessWorkers) -> None:
    async def play() -> None:
        game = await processes.make(odd(moves=99))
        assert "move 1" in (await game.call("step", "print")).observation
        await game.call("step", "fill")
        assert "move 3" in (await game.call("step", "up")).observation

    asyncio.run(play())


def test_a_game_that_cannot_be_made_says_why(workers: Workers) -> None:
    async def play() -> None:
        with pytest.raises((TypeError, CallError), match="speed"):
            await workers.make(GameClass("support.odd_games:OddGame", {"speed": 1}, SUPPORT, OddGame))

    asyncio.run(play())


def test_what_cannot_travel_is_refused_with_what_to_do(processes: ProcessWorkers) -> None:
    async def play() -> None:
        game = await processes.make(odd())
        with pytest.raises(TaskError, match="a set cannot travel") as caught:
            await game.call("step", {"up"})
        assert "run_in=threads" in caught.value.hint

    asyncio.run(play())


@pytest.mark.parametrize("kind", KINDS[1:])
def test_closing_with_calls_under_way_ends_within_seconds_and_leaves_nothing(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.environments.workers.threads.PATIENCE_S", 0.2)
    threads, descriptors = set(threading.enumerate()), open_descriptors()
    workers = make_workers(kind, 2, None)

    async def play() -> None:
        games = [await workers.make(odd()) for _ in range(4)]
        calls = [asyncio.ensure_future(game.call("step", "sleep 900")) for game in games]
        await asyncio.sleep(0.3)
        pids = workers.pids if isinstance(workers, ProcessWorkers) else []
        await asyncio.to_thread(workers.close)  # which comes back long before they do
        failed = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(error) for error in failed] == ["the environment's workers were closed"] * 4
        assert not any(psutil.pid_exists(pid) for pid in pids)
        with pytest.raises(TaskError, match="closed"):
            await workers.make(odd())

    asyncio.run(play())
    if kind == "processes":
        eventually(lambda: set(threading.enumerate()) <= threads)
        assert open_descriptors() <= descriptors


def test_a_cancelled_call_that_waits_is_never_made() -> None:
    workers = ThreadWorkers(1, None)
    made: list[str] = []

    async def play() -> None:
        begun, goes_on = threading.Event(), threading.Event()
        first = asyncio.ensure_future(workers.call(lambda: (begun.set(), goes_on.wait(300))))
        await asyncio.to_thread(begun.wait, 300)
        second = asyncio.ensure_future(workers.call(made.append, "called"))
        await asyncio.sleep(0.05)
        second.cancel()
        await asyncio.sleep(0)
        goes_on.set()
        await first
        await workers.call(time.sleep, 0.0)

    asyncio.run(play())
    workers.close()
    assert made == []


def test_worker_processes_end_with_a_run_that_is_killed(tmp_path: Path) -> None:
    """Also those in the middle of a call."""
    program = tmp_path / "run.py"
    program.write_text(
        textwrap.dedent(f"""
        import asyncio
        from redline.environments.workers.held import GameClass
        from redline.environments.workers.processes import ProcessWorkers
        workers = ProcessWorkers(2, None)

        async def main():
            games = [await workers.make(GameClass("support.odd_games:OddGame", {{}}, {SUPPORT!r})) for _ in range(2)]
            call = asyncio.ensure_future(games[0].call("step", "hang in C"))
            await games[1].call("step", "up")
            print(*workers.pids, flush=True)
            await call

        asyncio.run(main())
        """)
    )
    run = subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert len(pids) == 2
    assert all(psutil.pid_exists(pid) for pid in pids)
    run.kill()
    run.wait()
    run.stdout.close()
    eventually(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def open_descriptors() -> int:
    return len(os.listdir("/dev/fd"))
