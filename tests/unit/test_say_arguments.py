"""What `policy.say` takes, and what it says of everything else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from redline.errors import TaskError
from redline.say_arguments import (
    MAX_NAME,
    check_messages,
    check_role,
    check_until,
    checked_max_tokens,
    checked_stop,
    ends_reply,
)
from redline.types import ReplySoFar

USER = {"role": "user", "content": "hello"}


@pytest.mark.parametrize("stop", [5, [5], [""], None, ["\udc80"]], ids=ascii)
def test_stop_strings_are_texts(stop: Any) -> None:
    with pytest.raises(TaskError, match=r"`policy.say` was given stop = .*\n\nhint: give texts"):
        checked_stop(stop)


async def later(reply: object) -> bool:
    return True


@pytest.mark.parametrize("until", ["\n", 5, later], ids=["text", "number", "async"])
def test_until_is_a_function_that_answers_at_once(until: Any) -> None:
    with pytest.raises(TaskError, match=r"`policy.say` was given until = .*\n\nhint: give a function of the reply so far"):
        check_until(until)
    check_until(None)
    check_until(len)


def test_an_until_whose_answer_must_be_awaited_is_refused() -> None:
    async def never(reply: ReplySoFar) -> bool:
        return False

    with pytest.raises(TaskError, match=r"until = .*\n\nhint: it is asked between two tokens"):
        ends_reply(lambda reply: never(reply), ReplySoFar("a"))
    assert ends_reply(lambda reply: reply.text, ReplySoFar("a"))
    assert not ends_reply(lambda reply: reply.tool_calls, ReplySoFar("a"))


def test_one_stop_string_may_stand_by_itself() -> None:
    assert checked_stop("end") == ("end",)
    assert checked_stop(["a", "b"]) == ("a", "b")
    assert checked_stop(()) == ()


@pytest.mark.parametrize("number", [0, -3, 2.5, "3", True], ids=repr)
def test_a_reply_has_a_whole_number_of_tokens(number: Any) -> None:
    with pytest.raises(TaskError, match=r"max_tokens = .*\n\nhint: give a whole number"):
        checked_max_tokens(number)
    assert checked_max_tokens(None) is None
    assert checked_max_tokens(np.int64(3)) == 3


@pytest.mark.parametrize("role", [5, None, "\udc80", "r" * (MAX_NAME + 1)], ids=lambda role: ascii(role)[:10])
def test_a_role_is_a_short_text_that_a_file_can_hold(role: Any) -> None:
    with pytest.raises(TaskError, match=r"role = .*\n\nhint: give a text of at most 200 characters") as caught:
        check_role(role)
    assert len(str(caught.value).encode()) < 300
    check_role("")
    check_role("r" * MAX_NAME)


@pytest.mark.parametrize(
    "messages", [[], "hello", 5, [5], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "content": 5}]], ids=str
)
def test_messages_are_mappings_with_a_role_and_a_content(messages: Any) -> None:
    with pytest.raises(TaskError, match=r"messages.* = .*\n\nhint: give "):
        check_messages(messages, ())
    check_messages((USER, {"role": "assistant", "tool_calls": []}, {"role": "user", "content": [{"type": "text"}]}), ())


@pytest.mark.parametrize("tools", ["abc", 5, None, [print]], ids=str)
def test_tools_are_schemas(tools: Any) -> None:
    with pytest.raises(TaskError, match=r"tools.* = .*\n\nhint: give .*redline.schema_of"):
        check_messages([USER], tools)
