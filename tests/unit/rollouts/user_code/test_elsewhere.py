"""Rewards that are computed in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from redline.environments.workers.processes import ProcessWorkers
from redline.errors import CallError, TaskError
from redline.rollouts.user_code.coroutines import EventLoop
from redline.rollouts.user_code.elsewhere import ScoredElsewhere
from redline.rollouts.user_code.jobs import ThreadKind, UserFunction
from redline.rollouts.user_code.limited_calls import UserCalls
from redline.telemetry.stalls.calls import Call
from redline.types import Task

SOURCE = """
import asyncio, os
from pathlib import Path
import numpy

Path(__file__).with_name(f"imported-{os.getpid()}").touch()
DATA = {"pair": (1, ("a", 2.5)), "list": [1, 2], "bytes": b"ab", "array": numpy.arange(6, dtype="int16").reshape(2, 3)}

def kinds(value):
    if isinstance(value, dict):
        return {key: kinds(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(kinds(part) for part in value)
    return type(value), str(value), str(getattr(value, "dtype", ""))

class Lengths:
    def __init__(self, seed, most=10):
        self.most = most

    def score(self, task, text):
        if text == "crash":
            os._exit(3)
        if text == "raise":
            raise ValueError("no such answer")
        return {"length": min(len(text), self.most), "right": text == task.answer}

class Crashes(Lengths):
    # ends its process at the first call
    def score(self, task, text):
        crashed = Path(__file__).with_name("crashed")
        if not crashed.exists():
            crashed.touch()
            os._exit(3)
        return 1.0

class Sees(Lengths):
    def score(self, task, text):
        return {"same": kinds(task.data) == kinds(DATA), "messages": type(task.messages) is tuple}

class Waits(Lengths):
    async def score(self, task, text):
        await asyncio.sleep(0)
        return len(text) / 2
"""


class Point(NamedTuple):
    x: int
    y: int


class OwnTask(Task):
    pass


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Makes a source of a class that scores in one process, the same for all."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "lengths_of_texts.py").write_text(SOURCE)
    processes = ProcessWorkers(1, 20.0)
    here = SimpleNamespace(train=lambda index: Task(f"{index}", []), held_out=lambda count: [])

    def make(name: str, where: Path = folder, **params: Any) -> ScoredElsewhere:
        path = name if ":" in name else f"lengths_of_texts:{name}"
        return ScoredElsewhere(here, {"path": path, "folder": str(where), "keywords": {"seed": 1, **params}}, processes)

    make.folder = folder  # type: ignore[attr-defined]
    yield make
    processes.close()


def test_a_reward_comes_from_a_source_made_in_the_process(scored: Any) -> None:
    source, task = scored("Lengths", most=3), Task("t", [], answer="seven", data={"a": [1, 2]})
    assert asyncio.run(source.score(task, "seven")) == {"length": 3, "right": True}
    assert asyncio.run(scored("Waits").score(task, "abc")) == 1.5
    assert source.train(4).id == "4"
    assert source.num_worker_processes == 1


def test_a_score_sees_the_values_that_it_would_see_without_processes(scored: Any) -> None:
    source: dict[str, Any] = {"__file__": str(scored.folder / "here.py")}
    exec(compile(SOURCE, "here.py", "exec"), source)
    task = Task("t", ({"role": "user", "content": "?"},), data=source["DATA"])
    assert asyncio.run(scored("Sees").score(task, "")) == {"same": True, "messages": True}


@pytest.mark.parametrize("value", [{1, 2}, Point(1, 2), {1: 2}, object(), np.array([object()]), OwnTask("t", [])])
def test_what_would_be_another_value_there_is_refused(value: object, scored: Any) -> None:
    with pytest.raises(TaskError, match="cannot travel between a run and a worker process"):
        asyncio.run(scored("Sees").score(Task("t", [], data={"value": value}), ""))


class NotedCall(Call):
    """A call that notes when its time begins."""

    def __init__(self, folder: Path) -> None:
        super().__init__("score")
        self.folder = folder
        self.noted: list[str] = []

    def put_off(self) -> None:
        self.noted.append("put off")
        super().put_off()

    def begin(self) -> None:
        self.noted.append(f"begins, imported by {len(list(self.folder.glob('imported-*')))}")
        super().begin()


def test_the_start_of_a_process_and_its_imports_are_no_part_of_a_calls_time(scored: Any) -> None:
    source = scored("Crashes")
    with pytest.raises(CallError):
        asyncio.run(scored("Lengths").score(Task("t", []), "crash"))
    for file in scored.folder.glob("imported-*"):
        file.unlink()
    with NotedCall(scored.folder) as call:
        scoring = source.score(Task("t", []), "")
    assert asyncio.run(scoring) == 1.0
    first, *rest = call.noted
    assert first == "put off"
    assert rest == ["begins, imported by 1", "put off", "begins, imported by 2"], "the first process was lost"


def test_a_call_that_is_put_off_has_no_age() -> None:
    with Call("score") as call:
        call.put_off()
        assert call.age_s() == 0.0
        call.begin()
        assert call.age_s() > 0.0


@pytest.mark.slow
def test_an_import_that_takes_longer_than_a_call_may_costs_no_attempt(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text(f"import time\ntime.sleep(4)\n{SOURCE}")
    processes, loop = ProcessWorkers(2, 4.0), EventLoop()
    made_as = {"path": "slow_to_import:Lengths", "folder": str(tmp_path), "keywords": {"seed": 0}}
    source = ScoredElsewhere(SimpleNamespace(train=None, held_out=None), made_as, processes)
    calls = UserCalls(UserFunction("reward", "score", 2.0, "rollouts.reward_timeout_s", loop), ThreadKind("score", 2))
    outcomes = calls.results([lambda: loop.result(source.score(Task("t", []), "four"))] * 4)
    assert outcomes == [{"length": 4, "right": False}] * 4
    calls.close()
    loop.close()
    source.close()


def test_what_a_score_raises_has_its_place(scored: Any) -> None:
    with pytest.raises(CallError, match="ValueError: no such answer") as caught:
        asyncio.run(scored("Lengths").score(Task("t", []), "raise"))
    assert "lengths_of_texts.py" in caught.value.where


def test_a_score_that_ends_its_process_costs_its_own_attempt(scored: Any) -> None:
    source = scored("Lengths")
    with pytest.raises(CallError, match="ended with exit code 3"):
        asyncio.run(source.score(Task("t", []), "crash"))
    assert asyncio.run(source.score(Task("t", []), "four")) == {"length": 4, "right": False}


def test_a_module_that_the_process_does_not_find_is_named_with_the_machine(scored: Any, tmp_path: Path) -> None:
    with pytest.raises(CallError, match=r"finds no module 'nowhere_to_be_found' in .*elsewhere, which is not there") as caught:
        asyncio.run(scored("nowhere_to_be_found:Thing", tmp_path / "elsewhere").score(Task("t", []), "a"))
    assert "folder that all nodes share" in caught.value.hint
