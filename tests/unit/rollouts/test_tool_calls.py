"""Tools: shown to the model and read from its replies in the format of its own template."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import tokenizer_with

from redline.errors import TaskError
from redline.models.files.tiny import tiny_tokenizer
from redline.rollouts.call_formats import HERMES, JsonFormat, NamedFormat, TaggedFormat
from redline.rollouts.chat import Chat
from redline.rollouts.conversation import Conversation, Reply
from redline.types import ToolCall

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["x", "y"],
        },
    },
}
QUESTION = {"role": "user", "content": "1 + 2?"}
ONE_CALL = (ToolCall("add", {"x": 1, "y": 2}),)


def ids(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text, add_special_tokens=False), dtype=np.int32)


@cache
def chat_with(name: str, answer_prefix: str = "") -> Chat:
    return Chat(tokenizer_with(name), None, "", answer_prefix)


def replied(name: str, text: str, answer_prefix: str = "") -> tuple[Conversation, Reply]:
    conversation = Conversation(chat_with(name, answer_prefix), [END])
    conversation.ask([QUESTION], [ADD])
    return conversation, conversation.replied(ids(text + "<|im_end|>"))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ChatML", HERMES),
        ("strips", HERMES),
        ("Hermes tools", JsonFormat("\n<tool_call>\n", "\n</tool_call>")),
        ("Llama tools", JsonFormat("", "", ("name",), ("parameters",))),
        ("Mistral tools", JsonFormat("[TOOL_CALLS]", "")),
        ("DeepSeek calls", NamedFormat("<call>function<sep>", "\n```json\n", "\n```</call>")),
        (
            "XML tools",
            TaggedFormat(
                "\n<tool_call>\n<function=", ">\n", "<parameter=", ">\n", "\n</parameter>\n", "</function>\n</tool_call>"
            ),
        ),
    ],
)
def test_the_format_of_calls_is_found_by_rendering_some(name: str, expected: Any) -> None:
    found = chat_with(name).tool_use.format
    assert type(found) is type(expected)
    assert {k: _stripped(getattr(found, k)) for k in found.__slots__} == {
        k: _stripped(getattr(expected, k)) for k in expected.__slots__
    }


def _stripped(value: Any) -> Any:
    return "".join(value.split()) if isinstance(value, str) else value


CALLS = {
    "ChatML": '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call>',
    "Hermes tools": 'I add.\n<tool_call>{"arguments": {"x": 1, "y": 2}, "name": "add"}</tool_call>',
    "Llama tools": '{"name": "add", "parameters": {"x": 1, "y": 2}}',
    "Mistral tools": '[TOOL_CALLS][{"name": "add", "arguments": {"x": 1, "y": 2}}]',
    "DeepSeek calls": '<calls><call>function<sep>add\n```json\n{"x": 1, "y": 2}\n```</call></calls>',
    "XML tools": "<tool_call>\n<function=add><parameter=x>\n1\n</parameter>\n<parameter=y>2</parameter></function></tool_call>",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_the_templates_own_format_is_read_and_its_result_shown(name: str) -> None:
    conversation, reply = replied(name, CALLS[name])
    assert (tuple(reply.tool_calls), reply.problem) == (ONE_CALL, "")
    assert "tool_call" not in reply.message["content"]
    asked = conversation.ask([QUESTION, reply.message, {"role": "tool", "content": "3"}], [ADD])
    assert not asked.starts_anew
    assert "3" in TOKENIZER.decode(asked.prompt_ids[reply.end :])
    again = Conversation(chat_with(name), [END])
    whole = TOKENIZER.decode(again.ask([QUESTION, reply.message, {"role": "tool", "content": "3"}], [ADD]).prompt_ids)
    assert '"x": 1' in whole.partition("1 + 2?")[2] or "<parameter=x>" in whole, "rendered anew, the call is there too"


def test_text_beside_a_call_is_shown_with_it_where_the_template_shows_calls_alone() -> None:
    _, reply = replied("DeepSeek calls", "I add." + CALLS["DeepSeek calls"])
    assert tuple(reply.tool_calls) == ONE_CALL
    prompt = Conversation(chat_with("DeepSeek calls"), [END]).ask([QUESTION, reply.message, QUESTION], [ADD]).prompt_ids
    assert "I add." in TOKENIZER.decode(prompt)
    assert '<call>function<sep>add\n```json\n{"x": 1, "y": 2}' in TOKENIZER.decode(prompt)


@pytest.mark.parametrize("name", ["ChatML", "Hermes tools"])
def test_calls_in_messages_of_others_have_their_arguments_as_text(name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1, "y": 2}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    prompt = Conversation(chat_with(name), [END]).ask([QUESTION, said, {"role": "tool", "content": "3"}], [ADD]).prompt_ids
    assert '"arguments": {"x": 1, "y": 2}' in TOKENIZER.decode(prompt)
    assert "None" not in TOKENIZER.decode(prompt)
    call["function"]["arguments"] = "no JSON"  # type: ignore[index]
    with pytest.raises(TaskError, match="the arguments of a call of add are no JSON object"):
        Conversation(chat_with(name), [END]).ask([QUESTION, said], [ADD])


def test_two_calls_in_one_reply_are_read_and_their_results_follow_in_order() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": %d}}\n</tool_call>'
    conversation, reply = replied("ChatML", call % 2 + "\n" + call % 3)
    assert [c.arguments["y"] for c in reply.tool_calls] == [2, 3]
    results = [{"role": "tool", "content": "3"}, {"role": "tool", "content": "4"}]
    asked = conversation.ask([QUESTION, reply.message, *results], [ADD])
    text = TOKENIZER.decode(asked.prompt_ids[reply.end :])
    assert text.count("<|im_start|>user") == 1, "as one message"
    assert text.index("<tool_response>\n3\n") < text.index("<tool_response>\n4\n")
    _, reply = replied(
        "Mistral tools", "[TOOL_CALLS]" + json.dumps([{"name": "add", "arguments": {"x": 1, "y": y}} for y in (2, 3)])
    )
    assert [c.arguments["y"] for c in reply.tool_calls] == [2, 3]
    assert [c["id"] for c in reply.message["tool_calls"]] == ["call00000", "call00001"]


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("ChatML", '<tool_call>\n{"name": "add", "arguments": {"x": 1', "after <tool_call> comes no JSON"),
        ("ChatML", "<tool_call>\n[1, 2]\n</tool_call>", 'an object with "name" and "arguments"'),
        ("ChatML", '<tool_call>{"name": "sub", "arguments": {}}</tool_call>', "there is no function sub; there are: add"),
        ("ChatML", '<tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>', "add needs the argument y"),
        ("ChatML", '<tool_call>{"name": "add", "arguments": 3}</tool_call>', "the arguments of add are no JSON object"),
        ("ChatML", '<tool_call>{"name": "add"}</tool_call>', "the arguments of add are no JSON object"),
        (
            "ChatML",
            '<tool_call>{"name": "add", "arguments": {"x": "one", "y": 2}}</tool_call>',
            'of type integer, and not "one"',
        ),
        ("ChatML", '<tool_call>{"name": "add", "arguments": {"x": true, "y": 2}}</tool_call>', "of type integer, and not true"),
        ("Llama tools", '{"name": "add", "parameters": {"x": 1,', "comes no JSON"),
        ("DeepSeek calls", "<call>function<sep>add", "come a name, ```json and"),
        ("XML tools", "<tool_call><function=add><parameter=x>1", "does not end with </parameter>"),
        ("XML tools", "<tool_call><function=>", "the name of the function is missing"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_problem_in_words(name: str, text: str, problem: str) -> None:
    _, reply = replied(name, text)
    assert problem in reply.problem
    assert not reply.tool_calls
    assert reply.message == {"role": "assistant", "content": text}, "the reply stays as it was"


@pytest.mark.parametrize("text", ["Three.", "<think><tool_call>{</think>Three.", "<think>I could <tool_call>{", ""])
@pytest.mark.parametrize("name", ["ChatML", "Llama tools"])
def test_a_reply_without_a_call_is_text(name: str, text: str) -> None:
    _, reply = replied(name, text)
    assert (reply.text, reply.tool_calls, reply.problem) == (text, (), "")


def test_no_call_is_looked_for_where_no_tools_were_offered() -> None:
    conversation = Conversation(Chat(TOKENIZER, None, ""), [END])
    conversation.ask([QUESTION])
    reply = conversation.replied(ids(CALLS["ChatML"]))
    assert (reply.tool_calls, reply.message["content"]) == ((), CALLS["ChatML"])


def test_a_call_that_the_recipe_begins_is_read_whole() -> None:
    _, reply = replied("ChatML", '{"name": "add", "arguments": {"x": 1, "y": 2}}', answer_prefix="<tool_call>\n")
    assert tuple(reply.tool_calls) == ONE_CALL


def test_a_format_made_of_special_tokens_is_read() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    tokenizer.chat_template = tokenizer_with("Mistral tools").chat_template
    conversation = Conversation(Chat(tokenizer, None, ""), [END])
    conversation.ask([QUESTION], [ADD])
    tokens = np.array(tokenizer.encode(CALLS["Mistral tools"] + "<|im_end|>", add_special_tokens=False), dtype=np.int32)
    reply = conversation.replied(tokens)
    assert tuple(reply.tool_calls) == ONE_CALL
    assert "[TOOL_CALLS]" not in reply.text


FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<call>function<sep>", "</call>", "\n```json\n", "<function=add>"),
    *(
        "<parameter=x>",
        "</parameter>",
        '{"name": "add", ',
        '"arguments": ',
        '"parameters": ',
        '{"x": 1, "y": 2}',
        "}",
        "[",
        "{",
    ),
    *('"\\ud800"', "null", "\n", "[" * 1500, "9" * 5000, "add", "</think>", "<|im_start|>"),
)


@pytest.mark.parametrize("name", CALLS)
@given(parts=st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=5), max_size=8))
@settings(max_examples=20, deadline=None)
def test_whatever_is_said_is_calls_or_a_problem_or_text_and_the_conversation_goes_on(name: str, parts: list[str]) -> None:
    conversation, reply = replied(name, "".join(parts).replace("<|im_end|>", ""))
    assert not (reply.tool_calls and reply.problem)
    results = [{"role": "tool", "content": str(call.arguments)} for call in reply.tool_calls] or [QUESTION]
    assert not conversation.ask([QUESTION, reply.message, *results], [ADD]).starts_anew
    assert Conversation(chat_with(name), [END]).ask([QUESTION, reply.message, *results], [ADD]).starts_anew


def test_a_template_without_tools_describes_them_in_the_system_message() -> None:
    def prompt(name: str, *messages: Any) -> str:
        chat = chat_with(name)
        return TOKENIZER.decode(Conversation(chat, [END]).ask([*messages, QUESTION], [ADD]).prompt_ids)

    alone = prompt("ChatML")
    assert alone.startswith("<|im_start|>system\n# Tools")
    assert json.dumps(ADD) in alone
    assert '<tool_call>\n{"name": "<function-name>"' in alone
    beside = prompt("ChatML", {"role": "system", "content": "Be brief."})
    assert beside.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    refused = prompt("no system")
    assert refused.startswith("<|im_start|>user\n# Tools")
    assert refused.count("<|im_start|>user") == 1
    own = prompt("DeepSeek calls")
    assert "<call>function<sep><function-name>" in own, "in the format that the template writes calls in"


def test_the_ids_that_a_model_gives_its_calls_are_read_over() -> None:
    text = 'Well.[TOOL_CALLS]add[CALL_ID]x7Jq[ARGS]{"x": 1, "y": 2}'
    _, reply = replied("ids of calls", text)
    assert tuple(reply.tool_calls) == ONE_CALL
    assert reply.message["content"] == "Well."


def test_a_template_whose_calls_cannot_be_read_gets_a_description_of_calls_that_can() -> None:
    """As LFM2's, which writes calls as Python does."""
    conversation, reply = replied("calls in Python", CALLS["ChatML"])
    assert tuple(reply.tool_calls) == ONE_CALL
    assert "# Tools" in TOKENIZER.decode(conversation.sequences[0].token_ids)
    assert '"description": "Adds two numbers."' in TOKENIZER.decode(conversation.sequences[0].token_ids)


def test_a_template_with_tools_gets_them_as_they_are_and_a_bare_function_too() -> None:
    chat = chat_with("Hermes tools")
    prompt = Conversation(chat, [END]).ask([QUESTION], [ADD]).prompt_ids
    oracle = tokenizer_with("Hermes tools").apply_chat_template(
        [QUESTION], tools=[ADD], add_generation_prompt=True, tokenize=False
    )
    assert TOKENIZER.decode(prompt) == oracle
    assert Conversation(chat, [END]).ask([QUESTION], [ADD["function"]]).prompt_ids.tolist() == prompt.tolist()


def test_values_between_tags_get_the_type_of_their_argument() -> None:
    text = "<tool_call><function=add><parameter=x>1</parameter><parameter=y>2</parameter><parameter=note>\n3\n4\n</parameter>"
    _, reply = replied("XML tools", text + "</function></tool_call>")
    assert reply.tool_calls[0].arguments == {"x": 1, "y": 2, "note": "3\n4"}


def test_a_tokenizer_that_says_how_replies_are_read_is_asked() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer_with("Hermes tools").chat_template
    call = {"open": "<<", "close": ">>", "repeats": True, "content": "json"}
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": call | {"transform": {"type": "function", "function": "{content}"}},
            "content": {"close": "<|im_end|>", "content": "text"},
        },
    }
    conversation = Conversation(Chat(tokenizer, None, ""), [END])
    conversation.ask([QUESTION], [ADD])
    assert (
        tuple(conversation.replied(ids('<<{"name": "add", "arguments": {"x": 1, "y": 2}}>><|im_end|>')).tool_calls) == ONE_CALL
    )
    conversation.ask([QUESTION], [ADD])
    assert "could not parse" in conversation.replied(ids('<<{"name": >><|im_end|>')).problem
