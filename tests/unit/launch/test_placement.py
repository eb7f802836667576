"""What runs where is decided, or refused, from the recipe alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from redline.config import Config, resolve, validate
from redline.errors import ConfigError
from redline.launch.placement import place


def recipe(num_threads: int = 1, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "run": {"device": "cpu"},
        "model": {"path": "builtin:tiny"},
        "rollouts": {"task": {"kind": "import", "path": "tests:Fake"}},
        **sections,
    }
    config = resolve(validate(values)).config
    return config.model_copy(update={"run": config.run.model_copy(update={"num_threads": num_threads})})


def test_in_lockstep_every_stage_is_in_the_thread_of_the_loop() -> None:
    placement = place(recipe(4))
    assert placement.is_lockstep
    assert placement.num_processes == 1
    assert str(placement) == "rollouts, engine, buffer, trainer, weight_sync: process 0, thread main (cpu, 4 CPU threads)"


@pytest.mark.parametrize(("cores", "trainer", "engine"), [(1, 1, 1), (2, 1, 1), (5, 3, 2), (8, 4, 4)])
def test_with_a_lag_engine_and_trainer_have_threads_of_their_own_and_divide_the_cores(
    cores: int, trainer: int, engine: int
) -> None:
    placement = place(recipe(cores, buffer={"max_lag": 1}))
    assert not placement.is_lockstep
    assert placement.stages["trainer"].cpu_threads == trainer
    assert placement.stages["engine"].cpu_threads == engine
    assert placement.stages["engine"].thread == placement.stages["rollouts"].thread == "rollouts"
    assert placement.stages["buffer"] == placement.stages["weight_sync"] == placement.stages["trainer"]


def test_what_was_started_as_several_processes_is_refused_with_a_hint_that_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="several processes were started") as refused:
        place(recipe())
    assert refused.value.hint == "start it without torchrun"


def test_placing_a_recipe_loads_no_torch() -> None:
    code = "import sys, redline.launch.placement; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
