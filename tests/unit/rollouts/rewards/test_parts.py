from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import FakeTasks

from redline.errors import TaskError
from redline.rollouts.rewards.parts import (
    OVERLONG_PART,
    extract_answer,
    max_reward_workers,
    overlong_penalty,
    reward_parts,
    total_reward,
    with_part,
)
from redline.types.numbers import in_float32


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("5", "5"),
        ("The answer is 5.", "5"),
        ("3 + 4 = 7", "7"),
        ("first 3, then 4", "4"),
        ("-5", "-5"),
        ("x = -5", "-5"),
        ("x=-5", "-5"),
        ("**-5**", "-5"),
        ("\N{MINUS SIGN}5", "-5"),
        ("3-5", "5"),
        ("3 - 5", "5"),
        ("(3)-5", "5"),
        ("step-2", "2"),
        ("3 - -5", "-5"),
        ("1,234", "1234"),
        ("-1,234,567.25 dollars", "-1234567.25"),
        ("1,2,3", "3"),
        ("1,2345", "2345"),
        ("1, 2", "2"),
        ("12, and no more", "12"),
        ("0.5", "0.5"),
        ("3.14.", "3.14"),
        ("007", "007"),
        (".5", ".5"),
        ("x = -.5", "-.5"),
        ("so...5", "5"),
        ("3.14.15", "15"),
        ("1e5", "1e5"),
        ("about 2.5E-3.", "2.5E-3"),
        ("5e", "5"),
        ("1e5m", "5"),
        ("1e99999", "99999"),
        ("1/2", "2"),
        ("", None),
        ("no number at all", None),
        ("-", None),
        ("\u0663", None),  # a digit to Unicode, but not one that a reference answer is written in
    ],
)
def test_the_last_number_is_what_a_reader_would_take_it_to_be(text: str, number: str | None) -> None:
    assert extract_answer(text, "last_number") == number


@given(st.integers())
def test_an_integer_is_found_however_it_is_written(value: int) -> None:
    assert extract_answer(f"so it is {value}", "last_number") == str(value)
    assert extract_answer(f"so it is {value:,}.", "last_number") == str(value)


def test_text_is_the_whole_answer_without_the_space_around_it() -> None:
    assert extract_answer("  two words \n", "text") == "two words"


def test_another_way_to_read_an_answer_is_refused() -> None:
    with pytest.raises(TaskError, match=r"(?s)'first_number'.*hint: one of last_number, text"):
        extract_answer("1", "first_number")  # type: ignore[arg-type]


def test_a_part_without_a_weight_weighs_one() -> None:
    assert total_reward({"correct": 1.0, "format": 0.5}, {}) == 1.5


def test_parts_are_weighted_and_summed() -> None:
    assert total_reward({"correct": 1.0, "format": 0.5}, {"format": -2.0}) == 0.0


def test_a_reward_without_parts_is_zero() -> None:
    assert total_reward({}, {}) == 0.0


def test_a_weight_for_a_part_the_task_does_not_have_is_refused_with_the_parts() -> None:
    with pytest.raises(TaskError) as caught:
        total_reward({"correct": 1.0, "format": 0.0}, {"correct": 1.0, "fromat": 0.1})
    assert caught.value.message == "rollouts.reward_weights.fromat: the task's reward has no such part"
    assert caught.value.hint == "its parts: correct, format; every score must name all of them"


def test_a_reward_without_parts_is_refused_with_what_to_return() -> None:
    with pytest.raises(TaskError) as caught:
        reward_parts({})
    assert caught.value.message == "`score` returned {}, a reward without parts"
    assert caught.value.hint == 'end `score` with `return 1.0`, or with `return {"correct": 1.0, "format": 0.5}`'


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_reward_that_is_no_finite_number_is_refused(value: float) -> None:
    with pytest.raises(TaskError, match=r"(?s)reward part correct = .*: not a finite number.*hint: make `score` return finite"):
        reward_parts({"format": 1.0, "correct": value})


def test_a_part_that_has_too_many_digits_for_float32_is_refused() -> None:
    with pytest.raises(TaskError, match="reward part a = inf: not a finite number"):
        reward_parts({"a": 10**400})


def test_the_largest_numbers_of_float32_are_rewards() -> None:
    largest = float(np.finfo(np.float32).max)
    for value in (largest, -largest, 3.4028234e38):
        parts = reward_parts({"a": value})
        assert total_reward(parts, {}) == parts["a"] == in_float32(parts["a"])
    assert math.isnan(in_float32(math.nan))
    with pytest.raises(TaskError, match="too large for float32"):
        reward_parts({"a": 3.5e38})


def test_rewards_are_what_the_store_gives_back() -> None:
    parts = reward_parts({"tenth": 0.1, "third": 1 / 3, "array": np.array([1 / 3])})
    assert parts == {"tenth": 0.1, "third": 0.33333334, "array": 0.33333334}
    assert parts == {name: in_float32(float(np.float32(value))) for name, value in parts.items()}
    total = total_reward(parts, {"third": 0.7})
    assert total == in_float32(float(np.float32(total)))


def test_a_part_of_ours_takes_no_name_that_the_task_has_given() -> None:
    assert with_part({"a": 1.0}, OVERLONG_PART, -0.5, "whose") == {"a": 1.0, "overlong": -0.5}
    with pytest.raises(TaskError, match="`score` returned a part called overlong, which is the name of x"):
        with_part({"overlong": 1.0}, OVERLONG_PART, -0.5, "x")


def test_the_parts_of_a_reward_become_plain_floats() -> None:
    parts = reward_parts({"correct": True, "format": np.float32(0.5)})
    assert parts == {"correct": 1.0, "format": 0.5}
    assert {type(value) for value in parts.values()} == {float}


def test_length_is_punished_as_dapo_punishes_it() -> None:
    """L_max = 20480 and L_cache = 4096: nothing up to 16384, then in a straight line to -1."""
    lengths = {1: 0.0, 16384: 0.0, 16385: -1 / 4096, 18432: -0.5, 20480: -1.0}
    for length, expected in lengths.items():
        assert overlong_penalty(length, 20480, 0.2) == pytest.approx(expected, abs=1e-12)


@given(st.integers(1, 500), st.floats(0.01, 1))
def test_the_punishment_for_length_is_between_none_and_one_and_grows(max_new_tokens: int, fraction: float) -> None:
    found = [overlong_penalty(length, max_new_tokens, fraction) for length in range(max_new_tokens + 1)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(-1)
    assert found[0] == pytest.approx(0)


@dataclass
class Source(FakeTasks):
    score_is_thread_safe: object = None


@pytest.mark.parametrize(
    ("tasks", "wanted", "found"),
    [
        (FakeTasks(), None, 1),
        (FakeTasks(), 3, 3),
        (FakeTasks(), 1, 1),
        (Source(score_is_thread_safe=True), None, 8),
        (Source(score_is_thread_safe=True), 20, 20),
        (Source(score_is_thread_safe=True), 1, 1),
        (Source(score_is_thread_safe=False), None, 1),
        (Source(score_is_thread_safe=False), 1, 1),
    ],
)
def test_several_threads_score_only_where_the_source_or_the_recipe_says_so(
    tasks: FakeTasks, wanted: int | None, found: int
) -> None:
    assert max_reward_workers(wanted, tasks) == found


def test_more_threads_than_the_source_can_bear_are_refused_with_the_key() -> None:
    with pytest.raises(TaskError, match="max_reward_workers = 4: Source says") as raised:
        max_reward_workers(4, Source(score_is_thread_safe=False))
    assert "set it to 1" in str(raised.value.hint)
