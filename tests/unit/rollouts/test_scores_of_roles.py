"""Scores of several roles: what is by role, what is in parts, and what is neither."""

from __future__ import annotations

from typing import Any

import pytest

from redline.errors import TaskError
from redline.rollouts.episodes.scores import scores_of_roles
from redline.rollouts.rewards.parts import MAX_PARTS


@pytest.mark.parametrize(
    ("score", "roles", "reason"),
    [
        ({"A": 1.0, "B": -1.0}, ["a", "b"], "scores for 'A', 'B', and the roles that have spoken are 'a', 'b'"),
        ({"white": {"won": 1.0}}, ["w", "b"], "scores for 'white', and the roles that have spoken are 'w', 'b'"),
        ({"white": {"won": 1.0}}, [""], "scores for 'white', and no role has spoken"),
        ({"a": 1.0, "b": 0.0, "B": -1.0}, ["a", "b"], "a score for 'B', and the roles that have spoken are 'a', 'b'"),
        ({"a": 1.0, "b": 0.0, 7: 1.0}, ["a", "b"], "a score for 7, and the roles that have spoken are 'a', 'b'"),
    ],
)
def test_names_of_roles_that_have_not_spoken_are_no_parts(score: Any, roles: list[str], reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        scores_of_roles(score, roles, {})


def test_a_score_in_parts_is_that_of_all_roles_and_one_by_role_may_name_a_role_that_had_no_turn() -> None:
    assert scores_of_roles({"won": 1.0}, ["a", "b"], {})["b"] == (1.0, {"won": 1.0})
    assert scores_of_roles(0.5, ["a", "b"], {}) == dict.fromkeys(("a", "b"), (0.5, {"reward": 0.5})), "so is one number"
    assert scores_of_roles({"a": 1.0, "b": 0.0}, ["a"], {}) == {"a": (1.0, {"reward": 1.0})}


@pytest.mark.parametrize(
    ("score", "reason"),
    [
        ({f"part {i}": 1.0 for i in range(MAX_PARTS + 1)}, "65 named parts; 64 are the most"),
        ({"x" * 201: 1.0}, "201 characters"),
    ],
)
def test_names_of_parts_are_few_and_short(score: Any, reason: str) -> None:
    with pytest.raises(TaskError, match=reason):
        scores_of_roles(score, [""], {})
