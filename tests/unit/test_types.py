"""Attempts of several sequences and roles."""

from __future__ import annotations

import pytest
from support.fakes import group, trajectory
from support.played_groups import played

from redline.types import by_attempt


def test_sequences_belong_to_the_attempt_that_they_name() -> None:
    assert [len(own) for own in played().attempts] == [3, 3, 3, 3]
    assert [[t.role for t in own] for own in by_attempt(played().trajectories[:3], by_role=True)] == [["white"] * 2, ["black"]]


def test_sequences_that_name_no_attempt_are_one_each() -> None:
    attempt = trajectory([1], [2])
    assert by_attempt([attempt, attempt]) == [[attempt], [attempt]]
    assert len(group([1.0, -1.0, 0.0]).attempts) == 3


def test_reward_of_a_group_counts_each_role_of_each_attempt_once_however_many_sequences_it_has() -> None:
    assert played().reward == pytest.approx((1.0 - 1.0 + 0.0 + 0.5 + 0.5 + 0.5) / 6)
