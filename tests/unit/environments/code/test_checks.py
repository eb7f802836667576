from __future__ import annotations

import math

import pytest

from redline.environments.code.checks import Assert, Call, Example, read_tests, same_output, same_value
from redline.environments.code.inside.values import Members, Pairs
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
     [{"stdin": "1", "stdout": "2"}, {"call": "f(1)", "returns": 2}], {"inputs": ["a", "b"], "outputs": ["1"]},
     {"inputs": 3, "outputs": ["1"]}, ["assert f() == {[1]: 2}"], ["assert f({[1]: 2}) == 3"],
     [{"call": "f(1)", "returns": 2, "any_order": True}], [{"call": "f(1)", "returns": [2], "any_order": "yes"}]],
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
        ({3, 1}, [1, 3], False), ([3, 1], {1, 3}, True), ({3, 1}, {1, 2}, False), ([1, 1], {1}, False),
        ({1: "a"}, {"1": "a"}, True), ({1: "a"}, {"1": "b"}, False),
        ("1", 1, False), (math.nan, math.nan, True), (10**400, 1.0, False), (b"x", "x", False), ([True], [1], False),
        ([], {}, False), ({}, [], False), (1000000007.4, 1000000007, False), (1000000007.0, 1000000007, True),
        (float(math.factorial(25)), math.factorial(25), False), (0, 6.6e-34, False), (0.0, 6.6e-34, False),
        (math.sin(math.pi), 0.0, True), (1e-9, 0.0, False), (6.6e-34 * (1 + 1e-12), 6.6e-34, True), (3, 3.0, True),
        ({1: "wrong", "1": "ok"}, {"1": "ok"}, False), ({"1": "a"}, {1: "a"}, False),
        ({1: "a", "1": "b"}, {1: "a", "1": "b"}, True),
        ({0.1 + 0.2: [(1,)]}, {0.3: [[1]]}, True), ({1.0: 2}, {1: 2}, True),
        (Pairs([["a", 1], ["a", 1]]), {"a": 1, "b": 1}, False),
    ],
)  # fmt: skip
def test_values_are_compared_as_plain_data(value: object, expected: object, same: bool) -> None:
    assert same_value(value, expected) is same


@pytest.mark.parametrize(
    ("value", "members", "same"),
    [
        ({(1, 2), (3, 4)}, [[3, 4], [1, 2]], True), ([(3, 4), (1, 2)], [[1, 2], [3, 4]], True), ({0.1 + 0.2}, [0.3], True),
        ({(1, 2), (3, 5)}, [[1, 2], [3, 4]], False), ([1, 1, 2], [2, 1, 1], True), ([1, 2, 2], [2, 1, 1], False),
        ([1], [True], False), ([None, "a", 2.5, (), 1], [1, 2.5, "a", None, []], True), ("ab", ["a", "b"], False),
        (Pairs([["a", 1]]), [["a", 1]], False), ([10**400, 10**401], [10**401, 10**400], True),
        ([(0.1 + 0.2, 1), (0.3, 0)], [[0.3, 1], [0.1 + 0.2, 0]], True), ([math.nan, 1], [1, math.nan], True),
        ([{2: "b"}, {1: "a"}], [{"1": "a"}, {"2": "b"}], True), (3, [3], False),
    ],
)  # fmt: skip
def test_where_the_order_is_free_members_are_compared_by_the_same_rules(
    value: object, members: list[object], same: bool
) -> None:
    (test,) = read_tests([{"call": "f()", "returns": members, "any_order": True}], "t")
    assert isinstance(test, Call)
    assert isinstance(test.returns, Members)
    assert same_value(value, test.returns) is same


@pytest.mark.parametrize("set_of", [set, Members])
def test_a_program_that_returns_a_set_is_wrong_where_a_list_is_expected(set_of: type) -> None:
    assert not same_value(set_of([1, 2, 3]), [1, 2, 3])
    assert not same_value([set_of([1])], [[1]])
    assert same_value(set_of([1, 2, 3]), {3, 2, 1})


@pytest.mark.parametrize(
    "text",
    ["assert all(x > 0 for x in f(5)) == True", "assert len(f(5)) == 3", "assert sorted(f([2, 1])) == [1, 2]",
     "assert f(g(1)) == 2", "assert f(5).isdigit() == True", "assert f(*[1]) == 2", "assert f(x=g(1)) == 2",
     "assert f(1)(2) == 3"],
)  # fmt: skip
def test_an_assert_that_is_more_than_a_plain_call_is_judged_away_from_the_program(text: str) -> None:
    assert read_tests([text], "t") == [Assert(text)]


def test_a_method_of_the_programs_class_is_a_plain_call() -> None:
    assert read_tests(["assert Solution().f(-1, x=[2]) == 3"], "t") == [Call("Solution().f(-1, x=[2])", 3)]
