"""Attempts of several sequences and roles, and completions that are cut."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.fakes import completion, group, trajectory
from support.played_groups import played

from redline.types import FinishReason, TopLogprobs, VersionSpan, by_attempt


def test_sequences_belong_to_the_attempt_that_they_name() -> None:
    assert [len(own) for own in played().attempts] == [3, 3, 3, 3]
    assert [[t.role for t in own] for own in by_attempt(played().trajectories[:3], by_role=True)] == [["white"] * 2, ["black"]]


def test_sequences_that_name_no_attempt_are_one_each() -> None:
    attempt = trajectory([1], [2])
    assert by_attempt([attempt, attempt]) == [[attempt], [attempt]]
    assert len(group([1.0, -1.0, 0.0]).attempts) == 3


def test_reward_of_a_group_counts_each_role_of_each_attempt_once_however_many_sequences_it_has() -> None:
    assert played().reward == pytest.approx((1.0 - 1.0 + 0.0 + 0.5 + 0.5 + 0.5) / 6)


def test_a_completion_that_is_cut_has_stopped_there_with_the_versions_of_what_is_left() -> None:
    table = TopLogprobs(np.arange(8, dtype=np.int32).reshape(4, 2), np.zeros((4, 2), dtype=np.float32))
    whole = replace(
        completion([5, 6, 7, 8], finish_reason=FinishReason.LENGTH),
        versions=VersionSpan(3, 5),
        switches=((1, 4), (3, 5)),
        raw_logprobs=np.arange(4, dtype=np.float32),
        top_logprobs=table,
    )
    two = whole.cut(2)
    assert two.token_ids.tolist() == [5, 6]
    assert two.logprobs.tolist() == [-0.25, -0.5]
    assert (two.finish_reason, two.versions, two.switches) == (FinishReason.STOP, VersionSpan(3, 4), ((1, 4),))
    assert two.raw_logprobs is not None
    assert two.raw_logprobs.tolist() == [0.0, 1.0]
    assert two.top_logprobs is not None
    assert two.top_logprobs.token_ids.tolist() == [[0, 1], [2, 3]]
    assert whole.cut(1).versions == VersionSpan(3, 3)
    assert replace(whole, switches=()).cut(2).versions == VersionSpan(3, 5), "where they changed is not known"
    assert whole.cut(4).token_ids.tolist() == [5, 6, 7, 8]
