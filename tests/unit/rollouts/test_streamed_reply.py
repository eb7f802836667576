"""Replies that are read while they are sampled: the same on every way of cutting them into pieces."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.chat_templates import tokenizer_with
from support.fakes import completion

from redline.models.detokenizer import Detokenizer
from redline.models.files.tiny import tiny_tokenizer
from redline.rollouts.call_formats import PublishedFormat
from redline.rollouts.call_reader import reader_of
from redline.rollouts.chat import Chat
from redline.rollouts.conversation import Conversation, Reply
from redline.rollouts.json_ends import JsonEnds
from redline.rollouts.streamed_reply import StreamedReply
from redline.types import Completion, Delta, FinishReason, ReplySoFar, ToolCall, Until

TOKENIZER = tiny_tokenizer()
"""A token for each byte: characters are split over tokens."""
END = TOKENIZER.eos_token_id
NOTE = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Notes a text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
QUESTION = {"role": "user", "content": "Well?"}
CALLS = {
    "ChatML": '<tool_call>\n{"name": "note", "arguments": {"text": "漢}\\"{ é"}}\n</tool_call>',
    "Hermes tools": '<tool_call>{"arguments": {"text": "漢}\\"{ é"}, "name": "note"}</tool_call>',
    "Llama tools": '{"name": "note", "parameters": {"text": "漢}\\"{ é"}}',
    "Mistral tools": '[TOOL_CALLS][{"name": "note", "arguments": {"text": "漢}\\"{ é"}}]',
    "DeepSeek calls": '<call>function<sep>note\n```json\n{"text": "漢}\\"{ é"}\n```</call>',
    "XML tools": '<tool_call>\n<function=note><parameter=text>\n漢}"{ é\n</parameter>\n</function></tool_call>',
    "ids of calls": '[TOOL_CALLS]note[CALL_ID]x7Jq[ARGS]{"text": "漢}\\"{ é"}',
}
CALL = ToolCall("note", {"text": '漢}"{ é'})
FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<call>function<sep>", "</call>", "\n```json\n", "<function=note>"),
    *("</function></tool_call>", "<parameter=text>", "</parameter>", '{"name": "note", ', '"arguments": ', '"parameters": '),
    *(
        '{"text": "é"}',
        "}",
        "[",
        "{",
        '"',
        "\\",
        "note",
        "<think>",
        "</think>",
        "[CALL_ID]",
        "[ARGS]",
        "🙂",
        " ",
        "\n",
        "\ufffd",
    ),
)


@cache
def chat_with(name: str, answer_prefix: str = "") -> Chat:
    return Chat(tokenizer_with(name), None, "", answer_prefix)


def tokens_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def in_pieces(token_ids: Sequence[int], cuts: Sequence[int]) -> Iterator[Sequence[int]]:
    """A run of tokens up to each of the cuts, and the rest."""
    places = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    for start, end in pairwise(places):
        yield token_ids[start:end]


def streamed(
    name: str, token_ids: Sequence[int], cuts: Sequence[int] = (), until: Until | None = None, answer_prefix: str = ""
) -> tuple[Completion, Reply]:
    """A reply with tools, that comes in pieces which end at the cuts, its last one with the whole."""
    chat = chat_with(name, answer_prefix)
    conversation = Conversation(chat, [END])
    conversation.ask([QUESTION], [NOTE])
    reply = StreamedReply(chat, conversation.reader, [END], until)
    for piece in in_pieces(token_ids, cuts) if cuts else ():
        assert reply.take(Delta(0, np.array(piece, np.int32), np.zeros(len(piece), np.float32))) is None
    whole = completion(token_ids, version=2, finish_reason=FinishReason.LENGTH)
    taken = reply.take(Delta(0, whole.token_ids[:0], whole.logprobs[:0], completion=whole))
    assert taken is not None
    return taken, conversation.replied(taken.token_ids, reply.reader)


def whole(name: str, token_ids: Sequence[int], answer_prefix: str = "") -> Reply:
    """What the same tokens say to somebody who waits for all of them and reads them at once."""
    conversation = Conversation(chat_with(name, answer_prefix), [END])
    conversation.ask([QUESTION], [NOTE])
    return conversation.replied(np.array(token_ids, np.int32))


REPLIES = st.lists(st.sampled_from([*FRAGMENTS, *CALLS.values()]) | st.text(max_size=5), max_size=8).map("".join)
CUTS = st.lists(st.integers(0, 10_000), max_size=12)


@pytest.mark.parametrize("name", CALLS)
@given(text=REPLIES, ends=st.booleans(), cuts=CUTS, looks=st.booleans(), prefix=st.sampled_from(["", "<tool_call>\n"]))
@settings(max_examples=30, deadline=None)
def test_a_reply_in_pieces_says_what_the_whole_says(
    name: str, text: str, ends: bool, cuts: list[int], looks: bool, prefix: str
) -> None:
    token_ids = tokens_of(text.replace("<|im_end|>", "")) + [END] * ends
    taken, reply = streamed(name, token_ids, cuts, (lambda so_far: False) if looks else None, prefix)
    assert reply == whole(name, token_ids, prefix)
    assert taken.token_ids.tolist() == token_ids
    assert taken.finish_reason == FinishReason.LENGTH, "nothing ended it"


@pytest.mark.parametrize("name", CALLS)
@given(text=REPLIES, cuts=CUTS)
@settings(max_examples=20, deadline=None)
def test_calls_are_read_from_a_text_in_pieces_as_from_the_whole(name: str, text: str, cuts: list[int]) -> None:
    """Here a piece may end anywhere in a text, and a format is asked alone."""
    format = chat_with(name).tool_use.format
    reader = reader_of(format)
    for piece in in_pieces(text, cuts):  # type: ignore[arg-type] # a text is as good as tokens
        reader.push("".join(piece))
    assert _read(reader.finish) == _read(lambda: format.read(text))


def _read(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except Exception as error:
        return type(error), str(error)


# ── until ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("before", ["", "I note: é. ", "<think>Or <tool_call>{}</tool_call>?</think>"])
@given(cuts=CUTS)
@settings(max_examples=10, deadline=None)
def test_until_a_call_is_complete_ends_the_reply_with_the_end_of_the_call(name: str, before: str, cuts: list[int]) -> None:
    if name == "Llama tools" and "note" in before:
        return  # this format knows a call only where nothing stands before it
    complete = tokens_of(before + CALLS[name])
    taken, reply = streamed(name, [*complete, *tokens_of("\nAnd the result is 🙂")], cuts, lambda so_far: so_far.tool_calls)
    assert taken.token_ids.tolist() == complete
    assert (tuple(reply.tool_calls), reply.problem) == ((CALL,), "")
    assert taken.finish_reason == FinishReason.STOP
    np.testing.assert_array_equal(taken.logprobs, completion(complete).logprobs)


@given(text=st.text(min_size=1, max_size=30), count=st.integers(1, 12), cuts=CUTS)
@example(text="漢🙂é", count=2, cuts=[1, 2, 3, 5])
@settings(max_examples=30, deadline=None)
def test_until_so_many_letters_ends_the_reply_with_the_token_that_completes_the_last(
    text: str, count: int, cuts: list[int]
) -> None:
    token_ids = tokens_of(text)
    said = TOKENIZER.decode(token_ids, skip_special_tokens=True)
    taken, reply = streamed("ChatML", token_ids, cuts, lambda so_far: len(so_far.text) >= count)
    if len(said) < count:
        assert taken.token_ids.tolist() == token_ids
        assert taken.finish_reason == FinishReason.LENGTH
    else:
        assert reply.text == said[:count]
        assert taken.token_ids.tolist() == tokens_of(said[:count])
        assert taken.finish_reason == FinishReason.STOP


def test_until_sees_whole_characters_and_each_text_once() -> None:
    seen: list[ReplySoFar] = []
    streamed("ChatML", [*tokens_of("a漢🙂"), END], until=seen.append)
    assert [so_far.text for so_far in seen] == ["a", "a漢", "a漢🙂"]


@given(token_ids=st.lists(st.integers(0, len(TOKENIZER) - 1) | st.sampled_from(tokens_of("漢🙂ab")), max_size=30), cuts=CUTS)
@example(token_ids=[*tokens_of("漢")[:1], TOKENIZER.bos_token_id, *tokens_of("漢")[1:]], cuts=[1])
@settings(max_examples=60, deadline=None)
def test_until_sees_the_text_without_special_tokens_wherever_they_stand(token_ids: list[int], cuts: list[int]) -> None:
    alone = Detokenizer(chat_with("ChatML").decoder(with_special=False))
    pieces = [alone.push([token]) for token in token_ids]
    expected = ["".join(pieces[: i + 1]) for i, piece in enumerate(pieces) if piece]
    seen: list[str] = []
    streamed("ChatML", token_ids, cuts, lambda so_far: seen.append(so_far.text))
    assert seen == expected


def test_calls_of_a_thought_that_the_prompt_began_do_not_count_before_it_ends() -> None:
    text = CALLS["ChatML"] + "</think>" + CALLS["ChatML"]
    taken, _ = streamed("ChatML", tokens_of(text + "..."), [5], lambda so_far: so_far.tool_calls, answer_prefix="<think>\n")
    assert taken.token_ids.tolist() == tokens_of(text)


def test_a_call_in_a_thought_that_never_ends_is_no_call() -> None:
    reader = chat_with("ChatML").tool_use.reader([NOTE], is_thinking=True)
    assert not reader.finish(CALLS["ChatML"]).calls


def test_a_call_without_its_end_is_not_complete_before_the_reply_is() -> None:
    """The next one may be cut off behind its first letters."""
    format = chat_with("XML tools").tool_use.format
    unended = "<tool_call>\n<function=note><parameter=text>\na\n</parameter>\n"
    reader = reader_of(format)
    reader.push(unended + CALLS["XML tools"])
    assert reader.calls == []
    assert reader.finish()[1] == format.read(unended + CALLS["XML tools"])[1]


def test_what_until_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        streamed("ChatML", tokens_of("abc"), until=lambda so_far: 1 / 0)


def test_where_another_engine_sampled_other_tokens_in_the_end_those_are_the_reply() -> None:
    chat = chat_with("ChatML")
    conversation = Conversation(chat, [END])
    conversation.ask([QUESTION], [NOTE])
    reply = StreamedReply(chat, conversation.reader, [END], lambda so_far: "b" in so_far.text)
    first = np.array(tokens_of("ab"), np.int32)
    assert reply.take(Delta(0, first, np.zeros(2, np.float32))) is None
    assert reply.is_cut
    other = completion(tokens_of("acdb" + CALLS["ChatML"]))
    taken = reply.take(Delta(0, first[:0], other.logprobs[:0], completion=other))
    assert taken is not None
    assert taken.token_ids.tolist() == tokens_of("acdb")


def test_a_tokenizer_that_reads_replies_itself_is_asked_when_a_call_is_complete_and_about_the_whole() -> None:
    asked: list[str] = []

    def parse(text: str) -> dict[str, Any]:
        asked.append(text)
        calls = [{"function": {"name": "note", "arguments": {"text": "a"}}}] * text.count("</tool_call>")
        return {"content": " kept ", "tool_calls": calls}

    reader = reader_of(PublishedFormat(parse, chat_with("ChatML").tool_use.format))
    text = "x" + 2 * '<tool_call>{"name": "note", "arguments": {"text": "a"}}</tool_call>' + "y"
    found = []
    for letter in text:
        reader.push(letter)
        found.append(len(reader.calls))
    assert found == [int(i >= (len(text) - 1) // 2) + int(i >= len(text) - 2) for i in range(len(text))]
    assert asked == [text[: (len(text) + 1) // 2], text[:-1]], "once for each"
    assert reader.finish() == (" kept ", [("note", {"text": "a"})] * 2)


def test_what_the_tokenizer_reads_counts_also_where_the_template_would_have_written_it_otherwise() -> None:
    def parse(text: str) -> dict[str, Any]:
        return {"content": "", "tool_calls": [{"function": {"name": "note", "arguments": {"text": "a"}}}]}

    reader = reader_of(PublishedFormat(parse, chat_with("ChatML").tool_use.format))
    reader.push("<tool_call>{no JSON}</tool_call>")
    assert reader.calls == []
    assert reader.finish() == ("", [("note", {"text": "a"})])


# ── where JSON ends ────────────────────────────────────────────────────────────────────────────────────────────────────

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text('"\\{}[]a', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('"\\{}[]a', max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(
    value=st.lists(JSON, max_size=3) | st.dictionaries(st.text(max_size=3), JSON, max_size=3), before=st.text(" \n", max_size=2)
)
@settings(max_examples=30, deadline=None)
def test_json_ends_with_its_last_bracket_and_not_before(value: Any, before: str) -> None:
    text = before + json.dumps(value)
    ends = JsonEnds()
    assert [ends.find(text[:length], 0) for length in range(len(text))] == [None] * len(text)
    assert ends.find(text, 0) == len(text)
    assert ends.find(text + "}]", 0) == len(text), "it stays there"
