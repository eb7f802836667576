"""How many worker processes there are: as many as there is to do, no more than may be, and fewer after a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.eventually import eventually
from support.odd_games import OddGame

from redline.environments.workers import process as processes_here
from redline.environments.workers import worker
from redline.environments.workers.held import GameClass
from redline.environments.workers.process import EndedError, WorkerProcess, start_processes_with
from redline.environments.workers.processes import ProcessWorkers, Scale
from redline.environments.workers.program import answer
from redline.errors import CallError
from redline.types import Task

SUPPORT = str(Path(__file__).parents[3])
ODD = GameClass("support.odd_games:OddGame", {"moves": 9}, SUPPORT, OddGame)
TASK = Task("t1", [])


class FakeProcess:
    """A process that is this one; it begins when `may_begin` says so, and ends when it is told to."""

    start_s = 0.5
    pid = 0

    def __init__(self, name: str, *, may_begin: bool = True) -> None:
        self.name, self.may_begin, self.num_asked = name, may_begin, 0
        self.ends_when_asked = False
        self._objects: dict[int, Any] = {}
        self._end = ""

    def wait_until_ready(self, limit_s: float) -> bool:
        if not self.may_begin:
            time.sleep(limit_s)
        return self.may_begin

    def ask(self, message: Mapping[str, Any], limit_s: float | None) -> Mapping[str, Any]:
        self.num_asked += 1
        if self.ends_when_asked:
            raise EndedError("its worker process fell over")
        return answer(message, self._objects)

    def why_ended(self) -> str:
        return self._end

    def kill(self) -> None:
        self._end = "killed"

    close = kill


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeProcess]]:
    """The processes that were started; they are fakes."""
    monkeypatch.setattr(worker, "LOOK_S", 0.01)
    monkeypatch.setattr(worker, "LATE_S", 0.05)
    found: list[FakeProcess] = []

    def start(name: str) -> WorkerProcess:
        found.append(FakeProcess(name))
        return found[-1]

    start_processes_with(start)
    yield found
    start_processes_with(processes_here.LocalProcess)


def test_processes_follow_the_number_of_games_up_to_the_limit_and_end_when_idle(begun: list[FakeProcess]) -> None:
    workers = ProcessWorkers(3, 300.0, Scale(least=1, idle_s=0.1))

    async def play(count: int) -> int:
        games = [await workers.make(ODD) for _ in range(count)]
        running = workers.num_running
        for game in games:
            game.drop()
        return running

    assert workers.num_running == 0, "none before there is something to do"
    assert asyncio.run(play(2)) == 2
    assert asyncio.run(play(7)) == 3
    eventually(lambda: workers.num_running == 1)
    time.sleep(0.3)
    assert workers.num_running == 1, "the least that stays"
    assert asyncio.run(play(2)) == 2, "up again at once"
    workers.close()


def test_a_process_with_a_game_does_not_end_however_long_the_game_rests(begun: list[FakeProcess]) -> None:
    workers = ProcessWorkers(2, 300.0, Scale(least=0, idle_s=0.05))

    async def play() -> None:
        games = [await workers.make(ODD), await workers.make(ODD)]
        games[0].drop()
        await asyncio.to_thread(eventually, lambda: workers.num_running == 1)
        await asyncio.sleep(0.3)
        assert workers.num_running == 1
        assert "move 1" in (await games[1].call("step", "up")).observation

    asyncio.run(play())
    workers.close()


@pytest.mark.parametrize("start_s", [0.5, 0.0], ids=["in time", "after a pause of the machine that lasted longer"])
def test_what_waits_for_a_process_without_room_is_given_to_those_that_have_it(
    start_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProcess, "start_s", start_s)
    monkeypatch.setattr(worker, "LOOK_S", 0.01)
    monkeypatch.setattr(worker, "LATE_S", min(0.05, start_s))
    began: list[FakeProcess] = []

    def start(name: str) -> WorkerProcess:
        began.append(FakeProcess(name, may_begin=not began))
        return began[-1]

    start_processes_with(start)
    workers = ProcessWorkers(2, 300.0)

    async def play() -> None:
        games = [await asyncio.wait_for(workers.make(ODD), 300) for _ in range(3)]
        assert [game.process for game in games] == [began[0]] * 3
        assert "move 1" in (await games[2].call("step", "up")).observation
        assert workers.num_running == 1

    try:
        asyncio.run(play())
    finally:
        workers.close()
        start_processes_with(processes_here.LocalProcess)


def test_where_no_process_begins_every_call_is_told_so(begun: list[FakeProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeProcess, "wait_until_ready", lambda self, limit_s: bool(time.sleep(limit_s)))
    workers = ProcessWorkers(1, 300.0)

    async def play() -> None:
        made = await asyncio.gather(workers.make(ODD), workers.call("operator:add", 1, 2), return_exceptions=True)
        assert [str(error).splitlines()[0] for error in made] == ["no worker process begins: it had 0.5 s"] * 2
        assert all(isinstance(error, CallError) for error in made)

    asyncio.run(play())
    workers.close()


def test_a_function_whose_process_is_lost_is_called_in_another_once(begun: list[FakeProcess]) -> None:
    workers = ProcessWorkers(1, 300.0)

    async def play() -> None:
        assert await workers.call("operator:add", 1, 2) == 3
        begun[0].ends_when_asked = True
        assert await workers.call("operator:add", 2, 2) == 4
        assert len(begun) == 2
        begun[1].ends_when_asked = True
        start_processes_with(dying)
        with pytest.raises(CallError, match="fell over"):
            await workers.call("operator:add", 3, 2)

    def dying(name: str) -> WorkerProcess:
        begun.append(FakeProcess(name))
        begun[-1].ends_when_asked = True
        return begun[-1]

    asyncio.run(play())
    assert [process.num_asked for process in begun] == [3, 3, 1], "an import, and calls"
    workers.close()
