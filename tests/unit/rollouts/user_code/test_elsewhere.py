"""Rewards that are computed in worker processes."""

from __future__ import annotations

import asyncio
import enum
import inspect
import signal
from collections import Counter, OrderedDict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from redline.environments.workers import worker
from redline.environments.workers.plain import to_plain
from redline.environments.workers.process import EndedError
from redline.environments.workers.processes import ProcessWorkers
from redline.errors import CallError, TaskError
from redline.rollouts.user_code.coroutines import EventLoop
from redline.rollouts.user_code.elsewhere import ScoredElsewhere
from redline.rollouts.user_code.jobs import ThreadKind, UserFunction
from redline.rollouts.user_code.limited_calls import UserCalls
from redline.telemetry.stalls.calls import Call
from redline.types import Failure, Reaction, Task

SOURCE = """
import asyncio, os
from pathlib import Path
import numpy

Path(__file__).with_name(f"imported-{os.getpid()}").touch()
DATA = {"pair": (1, ("a", 2.5)), "list": [1, 2], "bytes": b"ab", "array": numpy.arange(6, dtype="int16").reshape(2, 3)}
DATA |= {"number": numpy.float32(0.1), "count": numpy.int8(3), "yes": numpy.bool_(True), "double": numpy.float64(0.1)}
DATA |= {"word": numpy.str_("a"), "bytearray": bytearray(b"ab"), "wide": -3**5000, "tagged": {"$int": 1}}
DATA |= {"empty": numpy.zeros((0, 3)), "complex": numpy.complex64(1j)}

def kinds(value):
    if isinstance(value, dict):
        return {key: kinds(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(kinds(part) for part in value)
    return type(value), hex(value) if type(value) is int else str(value), str(getattr(value, "dtype", ""))

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

class Tensor:
    shape = ()
    def __float__(self):
        return 1.0

class Odd(Lengths):
    def score(self, task, text):
        one = {"tensor": Tensor(), "long double": numpy.longdouble(1), "array": numpy.array(1)}
        return one[text] if text in one else {**one, "text": "a"}

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


class Kind(enum.StrEnum):
    SUM = "sum"


def score_here(task: Task, text: str) -> float:
    raise AssertionError("another process does")


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Makes a source of a class that scores in one process, the same for all."""
    folder = tmp_path_factory.mktemp("source")
    (folder / "lengths_of_texts.py").write_text(SOURCE)
    processes = ProcessWorkers(1, 20.0)
    here = SimpleNamespace(train=lambda index: Task(f"{index}", []), held_out=lambda count: [], score=score_here)

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


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (Kind.SUM, "a Kind"),
        (signal.SIGINT, "a Signals"),
        (Counter("aab"), "a Counter"),
        (OrderedDict(a=1), "a OrderedDict"),
        ({Kind.SUM: 1}, "a mapping with the key <Kind.SUM: 'sum'>"),
        (np.longdouble(1.5), "a longdouble"),
        (np.ones(2, np.longdouble), "a ndarray"),
        (np.datetime64("2020-01-01"), "a datetime64"),
    ],
)
def test_what_only_equals_a_plain_value_is_refused_with_its_place(value: object, name: str) -> None:
    """`is Kind.SUM` holds in threads, and would not there."""
    with pytest.raises(TaskError) as caught:
        to_plain(Task("t", [], data={"a": [0, {"b": (value,)}]}))
    assert caught.value.message == (f"{name} cannot travel between a run and a worker process: it is data['a'][1]['b'][0]")
    assert "of an enum its value" in caught.value.hint
    with pytest.raises(TaskError, match=r"cannot travel.*: it is answer"):
        to_plain(Task("t", [], answer=value))  # type: ignore[arg-type]


def test_a_value_that_holds_itself_is_refused() -> None:
    itself: list[Any] = []
    itself.append(itself)
    with pytest.raises(TaskError, match="holds itself"):
        to_plain(Task("t", [], data={"a": itself}))


def test_a_reward_of_any_kind_of_number_is_the_float_that_it_is_without_processes(scored: Any) -> None:
    source = scored("Odd")
    for text in ("tensor", "long double", "array"):
        assert asyncio.run(source.score(Task("t", []), text)) == 1.0
    parts = asyncio.run(source.score(Task("t", []), "all"))
    assert parts == {"tensor": 1.0, "long double": 1.0, "array": 1.0, "text": "a"}
    assert to_plain(Reaction("", {"a": np.longdouble(1)})) == {"$reaction": ["", {"a": 1.0}, False]}


class Silent:
    """Processes that never answer."""

    num_running = 1

    async def call(self, function: str, *arguments: Any, first: tuple[Any, ...], timed: Call | None) -> Any:
        await asyncio.Event().wait()

    def close(self) -> None:
        """Nothing is to end."""


def test_a_late_reward_names_the_users_function() -> None:
    """Not the line of ours at which this process waits."""
    source = ScoredElsewhere(SimpleNamespace(train=None, held_out=None, score=score_here), {"path": "a:B"}, Silent())
    loop = EventLoop()
    calls = UserCalls(UserFunction("reward", "score", 0.01, "rollouts.reward_timeout_s", loop))
    [late] = calls.results([lambda: loop.result(source.score(Task("t", []), "for ever"))])
    line = inspect.getsourcelines(score_here)[1]
    assert isinstance(late, Failure)
    assert (late.reason, late.where) == ("`score` did not return within 0.01 s", f"test_elsewhere.py:{line}, in score_here")
    calls.close()
    loop.close()


class LateProcess:
    """A process that answers everything but the import of the user's module. Implements `WorkerProcess`."""

    start_s, pid = 1.0, 0

    def wait_until_ready(self, limit_s: float) -> bool:
        return True

    def ask(self, message: Any, limit_s: float | None) -> Any:
        if message["do"] == "load":
            return {"value": None}
        raise EndedError("late", is_late=True)

    def why_ended(self) -> str:
        return ""

    def kill(self) -> None:
        """There is none."""

    close = kill


def test_an_import_that_never_ends_is_no_late_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "start_process", lambda name: LateProcess())
    here = SimpleNamespace(train=None, held_out=None, score=score_here)
    source = ScoredElsewhere(here, {"path": "my_tasks:Lengths", "folder": "", "keywords": {}}, ProcessWorkers(1, 300.0))
    with pytest.raises(CallError, match=r"^import of my_tasks:Lengths took more than 120 s in a worker process") as caught:
        asyncio.run(source.score(Task("t", []), ""))
    assert "call_timeout_s" not in caught.value.hint
    assert "no key gives it more time" in caught.value.hint
    source.close()


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
    source = ScoredElsewhere(SimpleNamespace(train=None, held_out=None, score=score_here), made_as, processes)
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
