"""Parts of a reward that come and go are told once, with the names."""

from __future__ import annotations

from typing import Any

import numpy as np
from support.fakes import trajectory

from redline.types import Failure, Trajectory, TrajectoryGroup
from redline.watch.part_names import PartNames


def scored(*names: str, **fields: Any) -> Trajectory:
    return trajectory([1], [2], reward_parts=dict.fromkeys(names, 1.0), **fields)


def group(*attempts: Trajectory, task_id: str = "sum-1") -> TrajectoryGroup:
    return TrajectoryGroup(task_id, attempts, np.zeros(len(attempts), dtype=np.float32))


def test_names_that_differ_within_a_group_are_told_once_with_both_sets() -> None:
    names = PartNames()
    said = names.news([group(scored("a"), scored("a")), group(scored("a", "c"), scored("b"), task_id="sum-2")])
    assert said is not None
    assert "of two attempts at task sum-2 one has a, c, the other b." in said
    assert "give each part every time, as 0 where it was not earned" in said
    assert names.news([group(scored("a"), scored("b"))]) is None


def test_groups_may_have_parts_of_their_own() -> None:
    assert PartNames().news([group(scored("a"), scored("a")), group(scored("b"), scored("b"))]) is None


def test_roles_may_have_parts_of_their_own() -> None:
    assert PartNames().news([group(scored("a", role="white"), scored("b", role="black"))]) is None


def test_an_attempt_that_failed_or_that_a_budget_ended_has_no_parts_to_compare() -> None:
    failed = scored(failure=Failure("reward", "no"))
    assert PartNames().news([group(failed, scored("a"), scored("truncated"))]) is None
