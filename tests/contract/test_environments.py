"""What every environment that ships promises, played without a model: tasks and attempts that follow from the seed, also beside
others; no exceptions, whatever a policy says; a reward of numbers for each role; conversations that go on."""

from __future__ import annotations

from typing import Any

import pytest

from redline.config.installation import missing_packages
from redline.environments.registry import ENVIRONMENTS
from redline.lab.environments.check import check
from redline.lab.environments.made import Made
from redline.lab.environments.trials import Plan

PROMISED = (
    "the same tasks under the same seed, others held out",
    "no exceptions and no waiting for ever",
    "the same attempt under the same seed",
    "the same attempt beside others",
    "a reward of numbers for each role",
)
CASES: list[tuple[str, dict[str, Any]]] = [
    ("calculator", {}),
    ("calculator", {"protocol": "text", "in_words": True, "example": True}),
    ("guess_number", {"largest": 9}),
    ("gymnasium", {"env_id": "Blackjack-v1"}),
    ("gymnasium", {"env_id": "CliffWalking-v1", "max_steps": 5}),
    ("gymnasium", {"env_id": "FrozenLake-v1", "kwargs": {"is_slippery": True}}),
    ("gymnasium", {"env_id": "Taxi-v4", "max_steps": 5}),
    ("textarena", {"env_id": "GuessTheNumber-v0"}),
    ("textarena", {"env_id": "TicTacToe-v0", "players": 2}),
]
ELSEWHERE = {"code", "code_rows", "diplomacy", "openenv", "openenv_server", "verifiers"}
"""These bring no tasks, take long, or need packages that exclude each other: their own tests play them."""


@pytest.mark.parametrize(("name", "params"), CASES, ids=lambda case: case if isinstance(case, str) else "")
def test_an_environment_keeps_its_promises(name: str, params: dict[str, Any]) -> None:
    extra = ENVIRONMENTS[name].extra
    if extra and missing_packages(extra):
        pytest.skip(f"the extra {extra} is not installed")
    report = check(Made(name, params), Plan(tasks=2), lambda line: None)
    assert report.problems == []
    assert set(PROMISED) <= set(report.passed)


def test_every_environment_that_ships_is_played_here_or_by_tests_of_its_own() -> None:
    assert {name for name, _ in CASES} | ELSEWHERE >= ENVIRONMENTS.keys()
