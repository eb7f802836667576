from __future__ import annotations

import math

import pytest

from redline.environments.code.checks import Assert, Call, Example, read_tests, same_output, same_value
from redline.errors import TaskError


def test_the_three_kinds_of_tests_are_read() -> None:
    assert read_tests([{"stdin": "1", "stdout": "2"}], "t") == [Example("1", "2")]
    assert read_tests([{"call": "f(1)", "returns": 2}], "t") == [Call("f(1)", 2)]
    assert read_tests(["assert abs(f(1) - 2) < 0.1"], "t") == [Assert("assert abs(f(1) - 2) < 0.1")]


def test_an_assert_of_a_call_against_a_literal_becomes_a_call_whose_value_is_compared_outside() -> None:
    assert read_tests(["assert f(1, [2]) == (3, {4})"], "t") == [Call("f(1, [2])", (3, {4}))]
    assert read_tests([{"assert": "assert f(1) == g(1)"}], "t") == [Assert("assert f(1) == g(1)")]


def test_tests_may_stand_in_a_table_as_json_or_as_inputs_and_outputs() -> None:
    assert read_tests('[{"call": "f(1)", "returns": null}]', "t") == [Call("f(1)", None)]
    assert read_tests({"inputs": ["1", "2"], "outputs": ["3", "4"]}, "t") == [Example("1", "3"), Example("2", "4")]
    assert read_tests("def check(f):\n    assert f(1)\ncheck(g)", "t") == [Assert("def check(f):\n    assert f(1)\ncheck(g)")]


@pytest.mark.parametrize(
    "found",
    [None, [], "", 3, [3], [{"stdin": "1"}], [{"call": "f("}], [{"call": "f(", "returns": 1}], ["assert f("],
     [{"stdin": "1", "stdout": "2"}, {"call": "f(1)", "returns": 2}]],
)  # fmt: skip
def test_what_is_no_test_is_refused_with_the_place_and_a_hint(found: object) -> None:
    with pytest.raises(TaskError) as caught:
        read_tests(found, "task 7: tests")
    assert "task 7: tests" in caught.value.message
    assert caught.value.hint


def test_outputs_differ_by_more_than_spaces_at_the_ends_of_lines() -> None:
    assert same_output("1 \n2\n\n", "1\n2")
    assert not same_output(" 1\n2", "1\n2")
    assert not same_output("1\n2\n3", "1\n2")
    assert not same_output("", "1")


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (5, 5, True), (5, 5.0, True), (0.1 + 0.2, 0.3, True), (1.001, 1, False), (True, 1, False), (1, True, False),
        (None, None, True), (None, 0, False), (False, None, False), ((1, 2), [1, 2], True), ([1, 2], [1, 2, 3], False),
        ({3, 1}, [1, 3], True), ({3, 1}, [1, 2], False), ({1: "a"}, {"1": "a"}, True), ({1: "a"}, {"1": "b"}, False),
        ("1", 1, False), (math.nan, math.nan, True), (10**400, 1.0, False), (b"x", "x", False), ([True], [1], False),
        ([], {}, False), ({}, [], False),
    ],
)  # fmt: skip
def test_values_are_compared_as_plain_data(value: object, expected: object, same: bool) -> None:
    assert same_value(value, expected) is same
