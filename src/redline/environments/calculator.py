"""Sums that a small model cannot do in its head, and a calculator that can.

    question ──► calculate("37*24") ──► 888 ──► "888"

`protocol: tools` offers the function `calculate(expression)` in the format of the model's chat template. `protocol: text` is
for models that are too small to write that: a reply that is arithmetic is calculated, and a reply that is a number is the
answer.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from redline.environments.arithmetic import ArithmeticMistakeError, evaluate, shown
from redline.environments.drawn import drawn
from redline.environments.tools import Called, ToolEnvironment, tool
from redline.errors import ConfigError
from redline.ports import Policy, Score
from redline.types import Message, Task, ToolCall

Protocol = Literal["tools", "text"]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
EXPRESSION = re.compile(r"[-\d\s.+*/×÷−^%()]*\d[-\d\s.+*/×÷−^%()]*=?")
WORDS = {"+": "plus", "-": "minus", "*": "times"}
HELD_OUT = 8
"""One of so many questions is held out."""


class Calculator(ToolEnvironment):
    """Asks for the value of an expression. The reward has the parts `correct` (the answer is right) and `called` (something was
    calculated); weigh `called` with `rollouts.reward_weights`, or leave it out with the weight 0. Brings its own tasks."""

    def __init__(
        self,
        seed: int = 0,
        digits: int = 2,
        terms: int = 2,
        operators: Sequence[str] = ("+", "-", "*"),
        protocol: Protocol = "tools",
        in_words: bool = False,
        system: str = "",
        example: bool = False,
        max_calls: int = 2,
    ) -> None:
        """`terms` numbers of up to `digits` digits each; the question has their operators `in_words` (37 times 24) or as signs.
        `system` is the first message of each conversation. With `example`, a conversation of `protocol: text` begins with
        another question and its solution, for a model that does not find the format by itself."""
        super().__init__(seed)
        if protocol not in ("tools", "text"):
            raise ConfigError(
                f"calculator: protocol = {protocol!r}", "set rollouts.environment.params.protocol to tools or text"
            )
        if digits < 1 or terms < 2 or not operators or not set(operators) <= {"+", "-", "*"}:
            raise ConfigError(
                f"calculator: digits = {digits}, terms = {terms}, operators = {list(operators)}: no questions",
                "set digits >= 1, terms >= 2 and operators to some of + - * in rollouts.environment.params",
            )
        self._digits, self._terms, self._operators = digits, terms, tuple(operators)
        self._protocol, self._in_words, self._example = protocol, in_words, example and protocol == "text"
        self.system, self.max_calls = system, max_calls

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, index: int) -> Task:
        return self._first_of("train", index, is_held_out=False)

    def held_out(self, count: int) -> list[Task]:
        found: dict[str, Task] = {}
        for index in range(20 * count):  # there may be fewer than that
            task = self._first_of("held_out", index, is_held_out=True)
            found.setdefault(task.id, task)
            if len(found) == count:
                break
        return list(found.values())[:count]

    def _first_of(self, part: str, index: int, *, is_held_out: bool) -> Task:
        for draw in range(1000):
            expression = self._drawn(part, index, draw)
            if (drawn("held out", expression).randrange(HELD_OUT) == 0) == is_held_out:
                messages = [*(self._solved("12 + 5", "17") if self._example else ()), self._question(expression)]
                return Task(f"calculator/{expression}", messages, shown(evaluate(expression)), {"expression": expression})
        raise ConfigError("calculator: too few questions to hold some out", "raise rollouts.environment.params.digits or terms")

    def _question(self, expression: str) -> Message:
        text = expression
        for sign, word in WORDS.items() if self._in_words else ():
            text = text.replace(f" {sign} ", f" {word} ")
        return {"role": "user", "content": f"What is {text}?"}

    def _solved(self, expression: str, value: str) -> list[Message]:
        said = [("assistant", expression), ("user", value), ("assistant", value)]
        return [self._question(expression), *({"role": role, "content": text} for role, text in said)]

    def _drawn(self, *names: object) -> str:
        draw = drawn(self.seed, *names)
        numbers = [str(draw.randint(1, 10**self._digits - 1)) for _ in range(self._terms)]
        return numbers[0] + "".join(f" {draw.choice(self._operators)} {number}" for number in numbers[1:])

    # ── one attempt ────────────────────────────────────────────────────────────────────────────────────────────────────

    @tool(quick=True)
    def calculate(self, expression: str) -> str:
        """The value of an arithmetic expression, such as 3 * (4 + 5)."""
        return shown(evaluate(expression))

    def score(self, task: Task, answer: str, calls: Sequence[Called]) -> Score:
        called = any(not call.failed for call in calls)
        return {"correct": float(_number(answer) == float(task.answer)), "called": float(called)}

    async def play(self, task: Task, policy: Policy) -> Score:
        return await (super().play(task, policy) if self._protocol == "tools" else self._play_in_text(task, policy))

    async def _play_in_text(self, task: Task, policy: Policy) -> Score:
        messages, calls = self.first_messages(task), list[Called]()
        while True:
            turn = await policy.say(messages)
            if len(calls) >= self.max_calls or not _is_expression(turn.text):
                return self.score(task, turn.text, calls)
            calls.append(_calculated(turn.text))
            messages += [turn.message, {"role": "user", "content": calls[-1].result}]


def _number(text: str) -> float | None:
    """The last number in a text."""
    found = NUMBER.findall(text.replace(",", ""))
    return float(found[-1]) if found else None


def _is_expression(text: str) -> bool:
    """Whether a reply asks to calculate: it is arithmetic and no number, with or without a `=` behind it."""
    return EXPRESSION.fullmatch(text.strip()) is not None and NUMBER.fullmatch(text.strip()) is None


def _calculated(text: str) -> Called:
    expression = text.strip().rstrip("= ")
    call = ToolCall("calculate", {"expression": expression})
    try:
        return Called(call, shown(evaluate(expression)), failed=False)
    except ArithmeticMistakeError as mistake:
        return Called(call, f"error: {mistake}", failed=True)
