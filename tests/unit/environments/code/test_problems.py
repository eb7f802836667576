from __future__ import annotations

import ast

from redline.environments.code.checks import read_tests, same_value
from redline.environments.code.inside.values import pack, unpack
from redline.environments.code.problems.draw import FAMILIES, BuiltInProblems, is_held_out


def test_there_are_forty_families_and_each_comes_up_in_training_and_outside() -> None:
    assert len(FAMILIES) >= 40
    questions = {task.messages[0]["content"] for task in map(BuiltInProblems(0).train, range(len(FAMILIES) * 3))}
    assert len(questions) > 2 * len(FAMILIES)


def test_an_index_gives_the_same_problem_and_another_seed_another() -> None:
    assert BuiltInProblems(3).train(17) == BuiltInProblems(3).train(17)
    assert BuiltInProblems(3).train(17) != BuiltInProblems(4).train(17)


def test_no_question_is_both_trained_on_and_held_out() -> None:
    held_out = BuiltInProblems(0).held_out(100)
    questions = {str(task.messages[0]["content"]) for task in held_out}
    assert len(questions) == 100
    assert all(map(is_held_out, questions))
    assert not any(is_held_out(str(BuiltInProblems(1).train(index).messages[0]["content"])) for index in range(300))
    assert BuiltInProblems(5).held_out(100) == held_out


def test_no_program_that_always_says_the_same_passes() -> None:
    for task in map(BuiltInProblems(2).train, range(200)):
        expected = [repr(test.get("returns", test.get("stdout"))) for test in task.data["tests"]]
        assert len(set(expected)) > 1, task.messages


def test_every_test_can_be_read_and_what_it_expects_crosses_processes_unchanged() -> None:
    for task in map(BuiltInProblems(0).train, range(len(FAMILIES) * 2)):
        read_tests(task.data["tests"], task.id)
        for test in task.data["tests"]:
            if "call" in test:
                ast.parse(test["call"], mode="eval")
                assert same_value(unpack(pack(test["returns"])), test["returns"])
