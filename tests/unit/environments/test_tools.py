"""Environments whose policy calls functions, and the calculator among them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Literal

import pytest

from redline.environments.arithmetic import ArithmeticMistakeError, evaluate, shown
from redline.environments.calculator import Calculator
from redline.environments.driver import Asked, Driver, Episode, Reply
from redline.environments.tools import Called, EarlyCalls, Tool, ToolEnvironment, tool
from redline.errors import ConfigError
from redline.ports import Environment
from redline.types import ReplySoFar, Task, ToolCall

TASK = Task("t", [{"role": "user", "content": "What does a pear cost?"}], "3")


class Shop(ToolEnvironment):
    tool_timeout_s = 1.0

    @tool
    def price(self, article: str, currency: Literal["euro", "pound"] = "euro") -> float:
        """The price of an article."""
        return {"pear": 3.0}[article]

    @tool
    async def stock(self, articles: list[str]) -> dict[str, int]:
        """How many there are."""
        await asyncio.sleep(0)
        return dict.fromkeys(articles, 2)

    @tool
    def order(self) -> str:
        """Never comes back."""
        time.sleep(60)
        return ""

    def score(self, task: Task, answer: str, calls: Sequence[Called]) -> float:
        return float(task.answer == answer) + 0.1 * sum(call.failed for call in calls)


def play(environment: Environment, *replies: Reply, task: Task = TASK) -> Episode:
    left = iter(replies)

    def speak(asked: Asked) -> Reply:
        return next(left)

    driver = Driver(environment)
    episode = driver.play(task, speak, 300.0)
    driver.close()
    return episode


def call(name: str, **arguments: object) -> Reply:
    return Reply("", (ToolCall(name, arguments),))


def results(episode: Episode) -> list[str]:
    return [message["content"] for message in episode.exchanges[-1].asked.messages if message["role"] == "tool"]


def test_tools_are_called_and_the_reply_without_a_call_is_scored() -> None:
    shop = Shop()
    episode = play(shop, call("price", article="pear"), call("stock", articles=["pear"]), Reply("3"))
    shop.close()
    assert episode.error is None
    assert episode.score == 1.0
    assert results(episode) == ["3.0", '{"pear": 2}']


def test_what_a_tool_raises_is_its_result() -> None:
    shop = Shop()
    wrong = [call("price", article="plum"), call("prise"), call("price", fruit="pear"), call("order")]
    episode = play(shop, *wrong, Reply("", (), "the call cannot be read"), Reply("3"))
    shop.close()
    assert episode.score == 1.5
    said = results(episode)
    assert said[0] == "error: KeyError: 'plum'"
    assert said[1] == "error: there is no function prise; there are: order, price, stock"
    assert "unexpected keyword argument 'fruit'" in said[2]
    assert said[3] == "error: `order` did not return within 1 s"
    assert episode.exchanges[-1].asked.messages[-1] == {"role": "user", "content": "error: the call cannot be read"}


class Basket(ToolEnvironment):
    @tool(early=True)
    def sort(self, articles: list[str]) -> str:
        """The articles in order."""
        articles.sort()
        return articles.pop(0)

    @tool
    def first(self, letter: str) -> str:
        """The first article with a letter."""
        return next(article for article in ("pear", "plum") if article.startswith(letter))

    def score(self, task: Task, answer: str, calls: Sequence[Called]) -> float:
        return float(not any(call.failed for call in calls))


def test_a_tool_that_changes_its_arguments_changes_nothing_of_what_was_said() -> None:
    said = call("sort", articles=["plum", "pear"])
    episode = play(Basket(), said, Reply("pear"))
    assert episode.score == 1.0
    assert said.tool_calls == (ToolCall("sort", {"articles": ["plum", "pear"]}),)


def test_a_next_that_finds_nothing_in_a_tool_is_its_error_and_keeps_nobody_waiting() -> None:
    episode = play(Basket(), call("first", letter="x"), Reply("none"))
    assert episode.score == 0.0
    assert "StopIteration was raised" in str(episode.exchanges[-1].asked.messages[-1])


def test_calls_without_an_end_are_scored_without_an_answer() -> None:
    shop = Shop()
    shop.max_calls = 3
    episode = play(shop, *[call("price", article="plum")] * 9)
    shop.close()
    assert len(episode.exchanges) == 4
    assert episode.score == pytest.approx(0.3)


class Library(Shop):
    """Looks things up while the policy still speaks."""

    @tool(early=True)
    async def search(self, word: str) -> str:
        """What the books say."""
        self.__dict__.setdefault("searched", []).append(word)
        if word == "lost":
            raise KeyError(word)
        return word.upper()

    def score(self, task: Task, answer: str, calls: Sequence[Called]) -> dict[str, float]:
        return {call.call.name: float(call.began_early) for call in calls}


def test_a_tool_that_may_begin_early_does_and_its_result_is_that_of_the_call() -> None:
    library = Library()
    calls = (ToolCall("search", {"word": "a"}), ToolCall("stock", {"articles": ["b"]}), ToolCall("search", {"word": "lost"}))
    episode = play(library, Reply("I search.", calls), Reply("3"))
    library.close()
    assert episode.error is None
    assert episode.score == {"search": 1.0, "stock": 0.0}
    assert results(episode) == ["A", '{"b": 2}', "error: KeyError: 'lost'"]


def test_a_call_that_is_read_again_begins_once_also_where_an_argument_is_no_number() -> None:
    begun: list[ToolCall] = []

    async def made(call: ToolCall) -> Called:
        begun.append(call)
        return Called(call, "b", failed=False)

    async def played() -> list[Called | None]:
        with EarlyCalls({"f": Tool({}, made, quick=True, early=True)}, made, ends_at_call=False) as early:
            calls = [ToolCall("f", {"x": float("nan")}) for _ in range(3)]
            for one in calls:
                early.options["until"](ReplySoFar("", [one]))
            return [await early.result(0, calls[0]), await early.result(1, calls[0])]

    assert [done and done.began_early for done in asyncio.run(played())] == [True, None]
    assert len(begun) == 1


def test_replies_of_an_environment_that_ends_at_calls_have_one() -> None:
    library = Library()
    library.ends_at_call = True
    calls = (ToolCall("search", {"word": "a"}), ToolCall("search", {"word": "b"}))
    episode = play(library, Reply("", calls), Reply("3"))
    assert results(episode) == ["A"]
    assert episode.exchanges[0].turn.tool_calls == calls[:1]


def test_no_tool_begins_early_in_the_reply_after_the_last_call() -> None:
    library = Library()
    library.max_calls = 1
    assert play(library, call("search", word="a"), call("search", word="b")).score == {"search": 1.0}
    assert library.__dict__["searched"] == ["a"]


def test_the_model_sees_the_functions_in_the_order_of_their_names() -> None:
    shop = Shop()
    asked = play(shop, Reply("3")).exchanges[0].asked
    assert [tool["function"]["name"] for tool in asked.tools] == ["order", "price", "stock"]
    price = asked.tools[1]["function"]
    assert price["description"] == "The price of an article."
    assert price["parameters"]["required"] == ["article"]
    assert price["parameters"]["properties"]["currency"]["enum"] == ["euro", "pound"]


def test_a_class_without_tools_says_so() -> None:
    assert "has no tool" in str(play(ToolEnvironment()).error)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2 + 3 * 4", "14"),
        ("(2+3)*4", "20"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("-3 ** 2", "-9"),
        ("37 × 24", "888"),
        ("2^10", "1024"),
    ],
)
def test_arithmetic_has_a_value(expression: str, value: str) -> None:
    assert shown(evaluate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1 +",
        "1 / 0",
        "9**9**9",
        "2**99999",
        "10.0**400",
        "(-8)**0.5",
        "abs(3)",
        "__import__('os')",
        "x",
        "'a'*9",
        "True + 1",
        "1" * 300,
        "(" * 150,
        "1e999",
        "0x",
        "1 if 1 else 2",
        "1 << 9",
    ],
)
def test_anything_but_arithmetic_is_a_mistake_in_words(expression: str) -> None:
    with pytest.raises(ArithmeticMistakeError):  # which comes: nobody lives to see 9**9**9
        evaluate(expression)


def test_the_calculator_is_called_as_a_tool() -> None:
    task = Calculator().train(0)
    episode = play(
        Calculator(), call("calculate", expression=task.data["expression"]), Reply(f"It is {task.answer}."), task=task
    )
    assert episode.score == {"correct": 1.0, "called": 1.0}
    assert results(episode) == [task.answer]
    assert play(Calculator(), Reply("no idea"), task=task).score == {"correct": 0.0, "called": 0.0}


def test_the_calculator_is_called_in_plain_text_by_small_models() -> None:
    environment = Calculator(protocol="text", in_words=True, example=True, system="Use a calculator.", operators=["*"])
    task = environment.train(0)
    expression = task.data["expression"]
    episode = play(environment, Reply(f"{expression} ="), Reply(task.answer), task=task)
    assert episode.score == {"correct": 1.0, "called": 1.0}
    shown_first = [message["content"] for message in episode.exchanges[0].asked.messages]
    question = f"What is {expression.replace('*', 'times')}?"
    assert shown_first == ["Use a calculator.", "What is 12 plus 5?", "12 + 5", "17", "17", question]
    assert episode.exchanges[1].asked.messages[-1]["content"] == task.answer
    assert not episode.exchanges[0].asked.tools
    stubborn = play(environment, *[Reply("1 + ")] * 9, task=task)
    assert stubborn.score == {"correct": 0.0, "called": 0.0}
    assert stubborn.exchanges[-1].asked.messages[-1]["content"].startswith("error: ")


def test_questions_of_the_calculator_follow_from_seed_and_index_and_held_out_ones_never_come_up() -> None:
    first = Calculator(seed=1)
    assert first.train(7) == Calculator(seed=1).train(7) != Calculator(seed=2).train(7)
    held_out = {task.id for task in first.held_out(50)}
    assert len(held_out) == 50
    assert held_out.isdisjoint(first.train(index).id for index in range(2000))


@pytest.mark.parametrize("params", [{"protocol": "xml"}, {"digits": 0}, {"operators": ["/"]}, {"terms": 1}])
def test_settings_that_make_no_questions_are_refused(params: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        Calculator(**params)  # type: ignore[arg-type]
    assert "rollouts.environment.params" in caught.value.hint
