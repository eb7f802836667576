"""Conversations of several replies: what was sampled stands in the next prompt as it is, and only what is new is encoded."""

from __future__ import annotations

import numpy as np

from redline.models.files.tiny import tiny_tokenizer
from redline.rollouts.chat import Chat
from redline.rollouts.conversation import Conversation

TOKENIZER = tiny_tokenizer()
END = TOKENIZER.eos_token_id


def ids(text: str) -> np.ndarray:
    return np.array(TOKENIZER.encode(text, add_special_tokens=False), dtype=np.int32)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_conversation_that_goes_on_has_the_sampled_tokens_and_then_only_what_is_new() -> None:
    conversation = Conversation(Chat(TOKENIZER, "Be brief.", " Now."), [END])
    first = conversation.ask([user("Hi.")])
    assert first.starts_anew
    assert TOKENIZER.decode(first.prompt_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi. Now.<|im_end|>\n<|im_start|>assistant\n"
    )
    sampled = ids("Hello<|im_end|>")
    reply = conversation.replied(sampled)
    assert (reply.text, reply.message) == ("Hello", {"role": "assistant", "content": "Hello"})
    second = conversation.ask([user("Hi."), reply.message, user("Bye.")])
    assert not second.starts_anew
    before = [*first.prompt_ids, *sampled]
    assert second.prompt_ids[: len(before)].tolist() == before
    new = TOKENIZER.decode(second.prompt_ids[len(before) :])
    assert new == "\n<|im_start|>user\nBye.<|im_end|>\n<|im_start|>assistant\n", "the suffix is for the first prompt alone"
    conversation.replied(ids("Bye"))
    [sequence] = conversation.sequences
    assert [TOKENIZER.decode(sequence.token_ids[start:end]) for start, end in sequence.replies] == ["Hello<|im_end|>", "Bye"]
