from __future__ import annotations

import math
from pathlib import Path

import pytest

from redline.config import Config, resolve, validate
from redline.config.sections.trainer import TrainerConfig
from redline.errors import ConfigError
from redline.launch.resume.which_run import run_to_continue
from redline.telemetry import RunFolder, write_json
from redline.trainer.optimizer.schedule import learning_rate


def rates(count: int, **schedule: object) -> list[float]:
    settings = TrainerConfig(learning_rate=1.0, schedule=schedule)
    return [learning_rate(settings, step) for step in range(count)]


def of_50_steps(**schedule: object) -> Config:
    task = {"kind": "import", "path": "tests:Fake"}
    values = {"model": {"path": "builtin:tiny"}, "rollouts": {"task": task}, "run": {"steps": 50}}
    return validate(values | {"trainer": {"schedule": schedule}})


def test_a_constant_rate_only_warms_up() -> None:
    assert rates(4, kind="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(3) == [1.0, 1.0, 1.0]


def test_a_linear_rate_rises_to_its_height_and_falls_to_zero() -> None:
    assert rates(8, kind="linear", warmup_steps=2, decay_steps=4) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_a_cosine_rate_follows_half_a_wave() -> None:
    found = rates(6, kind="cosine", warmup_steps=1, decay_steps=4)
    assert found == pytest.approx([1.0, 1.0, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 - math.cos(math.pi / 4)) / 2, 0.0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_rate_with_a_floor_ends_there_and_stays(kind: str) -> None:
    found = rates(10, kind=kind, decay_steps=4, min_ratio=0.1)
    assert found[0] == 1.0
    assert found[2] == pytest.approx(0.55)
    assert found[4:] == pytest.approx([0.1] * 6)


def test_a_fall_without_its_steps_lasts_until_the_run_ends() -> None:
    resolved = resolve(of_50_steps(kind="cosine", warmup_steps=10))
    assert resolved.config.trainer.schedule.decay_steps == 40
    assert resolved.reasons["trainer.schedule.decay_steps"] == "until run.steps"


def test_a_run_that_goes_on_for_longer_falls_until_its_new_end(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    write_json(folder.config, resolve(of_50_steps(kind="cosine", warmup_steps=10)).recorded.model_dump(mode="json"))
    _, config = run_to_continue(folder.path, ["run.steps=80"], pytest.fail)
    assert resolve(config).config.trainer.schedule.decay_steps == 70
    _, config = run_to_continue(folder.path, [], pytest.fail)
    assert resolve(config).config.trainer.schedule.decay_steps == 40


def test_a_run_that_goes_on_keeps_the_steps_that_its_recipe_gave_and_says_how_far_they_reach(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "demo")
    recorded = resolve(of_50_steps(kind="cosine", warmup_steps=10, decay_steps=45)).recorded
    write_json(folder.config, recorded.model_dump(mode="json"))
    with pytest.raises(ConfigError) as caught:
        run_to_continue(folder.path, ["run.steps=80"], pytest.fail)
    assert "a run that has begun keeps it, and goes on until run.steps=55" in caught.value.hint
    assert run_to_continue(folder.path, ["run.steps=55"], pytest.fail)[1].trainer.schedule.decay_steps == 45


def test_a_fall_without_its_steps_is_refused_where_there_is_no_run() -> None:
    with pytest.raises(ConfigError, match="'cosine'") as caught:
        rates(1, kind="cosine")
    assert caught.value.hint == "set trainer.schedule.decay_steps"


def test_a_kind_alone_is_a_schedule() -> None:
    assert TrainerConfig(schedule="cosine").schedule == TrainerConfig(schedule={"kind": "cosine"}).schedule
