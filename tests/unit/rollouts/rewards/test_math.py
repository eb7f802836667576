"""Answers that are compared by value, with math-verify."""

from __future__ import annotations

import threading

import pytest

from redline.errors import TaskError
from redline.rollouts.rewards.math import MathVerifier

pytest.importorskip("math_verify")

EQUAL = [
    ("1/2", r"so it is \boxed{0.5}"),
    (r"\frac{1}{2}", "1/2"),
    ("42", "The answer is 42."),
    (r"2\sqrt{2}", r"$\sqrt{8}$"),
    ("x^2+2x+1", "$(x+1)^2$"),
    ("5 + 5 is 10, and so on\n#### 1,000", "it is 1000"),
    ("(1,2)", r"\boxed{(1,2)}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("50%", "1/2"),
    ("5", "x=5"),
    ("2^{10}", "1024"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}"),
    ("3", "first 2, then 3"),
    ("$18", "18 dollars"),
    ("7", r"At first \boxed{8}. But no, the answer is \boxed{7}."),
    ("7", "\\boxed{7}\n#### Remarks\nnone"),
    ("7", r"<think>\boxed{8}</think> It is 7"),
    ("7", r"\boxed{7}, or rather \boxed{7"),
    (r"\{1,2\}", r"\boxed{3}, no: \boxed{\{1,2\}}"),
    ("7", r"\boxed{3+4=7}"),
    ("0.5", r"\boxed{\frac{1}{2}=0.5}"),
    ("7", r"\boxed{x=7}"),
]
DIFFERENT = [
    ("42", r"\boxed{43}"),
    ("x^2", "$x^3$"),
    ("0.333", "1/3"),
    (r"\pi", "3.14159"),
    ("7", "no idea"),
    ("7", ""),
    ("(1,2)", "(2,1)"),
    ("-3", "3"),
    ("8", r"At first \boxed{8}. But no, the answer is \boxed{7}."),
    ("7", r"\boxed{6=7}"),
    ("8", r"<think>\boxed{8}</think> It is 7"),
]


@pytest.fixture(scope="module")
def verifier() -> MathVerifier:
    return MathVerifier(limit_s=3)


def test_answers_with_the_same_value_are_equal_and_others_are_not(verifier: MathVerifier) -> None:
    wrong = [pair for pair in EQUAL if not verifier.equal(*pair)] + [pair for pair in DIFFERENT if verifier.equal(*pair)]
    assert not wrong
    assert not any(reference == answer for reference, answer in EQUAL), "none of them is equal as a text"


@pytest.mark.slow  # it starts more processes
def test_threads_may_ask_at_once(verifier: MathVerifier) -> None:
    found: list[bool] = []
    threads = [threading.Thread(target=lambda n=n: found.append(verifier.equal(str(n), f"\\boxed{{{n}}}"))) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 8


def test_an_expression_that_cannot_be_computed_costs_one_question_and_bounded_time(verifier: MathVerifier) -> None:
    with pytest.raises(TaskError, match="gave no verdict"):  # which comes: the number itself never would
        verifier.equal("387420489", r"\boxed{9^{9^9}}")
    assert verifier.equal("387420489", r"\boxed{9^9}")


def test_a_reference_without_an_expression_is_said_to_be_so(verifier: MathVerifier) -> None:
    assert verifier.can_read("3/4")
    assert not verifier.can_read("no idea")
    with pytest.raises(TaskError, match="finds no expression in the reference 'no idea'"):
        verifier.equal("no idea", "7")
