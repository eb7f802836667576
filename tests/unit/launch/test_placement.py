"""What runs where is decided, or refused, from the recipe alone."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from redline.config import Config, EngineRecipe, resolve, validate
from redline.errors import ConfigError
from redline.launch.placement import check_engine_place, place


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


@pytest.mark.parametrize(
    ("ranks", "sections", "message"),
    [
        ("1", {"trainer": {"sharding": "full"}}, "there is one process"),
        ("3", {"trainer": {"sequence_parallel_size": 2}}, "does not divide the trainer's 3 processes"),
        ("2", {"trainer": {"algorithm": "ppo"}}, "the critic is trained by one process, and 2 were started"),
        ("2", {"trainer": {"sharding": "full", "offload_optimizer": True}}, "the state is divided among the devices"),
    ],
)
def test_what_the_started_processes_cannot_divide_is_refused(
    ranks: str, sections: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", ranks)
    with pytest.raises(ConfigError, match=message):
        place(recipe(**sections))


def test_two_processes_may_train_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    place(recipe(trainer={"sharding": "full"}))


@pytest.mark.parametrize(("devices", "hint"), [(1, "set it to 1"), (2, "set it to 2 or less")])
def test_an_engine_of_more_processes_than_there_are_gpus_is_refused(
    devices: int, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    values = {"model": {"path": "builtin:tiny"}, "run": {"device": "cuda"}}
    check_engine_place(EngineRecipe.model_validate({**values, "engine": {"tensor_parallel_size": devices}}))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size = 4: each process needs a GPU of its own") as refused:
        check_engine_place(EngineRecipe.model_validate({**values, "engine": {"tensor_parallel_size": 4}}))
    assert refused.value.hint == hint


def test_a_device_that_torch_cannot_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch cannot use it"):
        check_engine_place(EngineRecipe.model_validate({"model": {"path": "builtin:tiny"}, "run": {"device": "cuda"}}))


def test_placing_a_recipe_loads_no_torch() -> None:
    code = "import sys, redline.launch.placement; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
