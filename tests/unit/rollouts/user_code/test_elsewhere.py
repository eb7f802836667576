"""Rewards that are computed in worker processes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline.environments.workers.processes import ProcessWorkers
from redline.errors import CallError
from redline.rollouts.user_code.elsewhere import ScoredElsewhere
from redline.types import Task

SOURCE = """
import asyncio, os

class Lengths:
    def __init__(self, seed, most=10):
        self.most = most

    def score(self, task, text):
        if text == "crash":
            os._exit(3)
        if text == "raise":
            raise ValueError("no such answer")
        return {"length": min(len(text), self.most), "right": text == task.answer}

class Waits(Lengths):
    async def score(self, task, text):
        await asyncio.sleep(0)
        return len(text) / 2
"""


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

    yield make
    processes.close()


def test_a_reward_comes_from_a_source_made_in_the_process(scored: Any) -> None:
    source, task = scored("Lengths", most=3), Task("t", [], answer="seven", data={"a": [1, 2]})
    assert asyncio.run(source.score(task, "seven")) == {"length": 3, "right": True}
    assert asyncio.run(scored("Waits").score(task, "abc")) == 1.5
    assert source.train(4).id == "4"
    assert source.num_worker_processes == 1


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
