from __future__ import annotations

import math

import pytest

from redline.config import validate
from redline.config.sections.trainer import TrainerConfig
from redline.errors import ConfigError
from redline.trainer.optimizer.schedule import learning_rate


def rates(count: int, **config: object) -> list[float]:
    settings = TrainerConfig(learning_rate=1.0, **config)
    return [learning_rate(settings, step) for step in range(count)]


def test_a_constant_rate_only_warms_up() -> None:
    assert rates(4, lr_scheduler_type="constant", warmup_steps=2) == [0.5, 1.0, 1.0, 1.0]
    assert rates(3) == [1.0, 1.0, 1.0]


def test_a_linear_rate_rises_to_its_height_and_falls_to_zero() -> None:
    assert rates(8, warmup_steps=2, decay_steps=4) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_a_cosine_rate_follows_half_a_wave() -> None:
    found = rates(6, lr_scheduler_type="cosine", warmup_steps=1, decay_steps=4)
    assert found == pytest.approx([1.0, 1.0, (1 + math.cos(math.pi / 4)) / 2, 0.5, (1 - math.cos(math.pi / 4)) / 2, 0.0])


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_a_rate_with_a_floor_ends_there_and_stays(kind: str) -> None:
    found = rates(10, lr_scheduler_type=kind, decay_steps=4, min_lr_ratio=0.1)
    assert found[0] == 1.0
    assert found[2] == pytest.approx(0.55)
    assert found[4:] == pytest.approx([0.1] * 6)


@pytest.mark.parametrize(
    ("trainer", "reason"),
    [
        ({"lr_scheduler_type": "cosine"}, "cosine needs decay_steps"),
        ({"lr_scheduler_type": "constant", "decay_steps": 5}, "constant takes no decay_steps"),
    ],
)
def test_a_schedule_without_its_steps_is_refused(trainer: dict[str, object], reason: str) -> None:
    task = {"kind": "import", "path": "tests:Fake"}
    with pytest.raises(ConfigError, match=reason):
        validate({"model": {"path": "builtin:tiny"}, "rollouts": {"task": task}, "trainer": trainer})
