from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from redline.models.files.tiny import tiny_tokenizer
from redline.serve.requests.protocol import ApiError, ChatMessage
from redline.serve.vocabulary import TooLongError, Vocabulary


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words that begin with ▁, and bytes to fall back on."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁once", "upon"]
    backend = Tokenizer(models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")


def test_every_byte_of_a_byte_level_tokenizer_is_itself() -> None:
    tokenizer = tiny_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    ids = [tokenizer.encode(chr(byte))[0] for byte in range(128)]
    assert [vocabulary.token_bytes(token) for token in ids] == [bytes([byte]) for byte in range(128)]
    euro = tokenizer.encode("€")
    assert [vocabulary.token_bytes(token) for token in euro] == [b"\xe2", b"\x82", b"\xac"]


def test_a_part_of_a_character_is_spelled_in_bytes() -> None:
    tokenizer = tiny_tokenizer()
    assert Vocabulary(tokenizer).token_text(tokenizer.encode("€")[0]) == "bytes:\\xe2"


def test_a_special_token_shows_alone_but_not_in_a_text() -> None:
    tokenizer = tiny_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.token_text(tokenizer.eos_token_id) == "<|im_end|>"
    assert vocabulary.decode([*tokenizer.encode("hi"), tokenizer.eos_token_id]) == "hi"


def test_a_token_keeps_the_space_that_its_tokenizer_would_drop() -> None:
    tokenizer = sentencepiece_like()
    vocabulary = Vocabulary(tokenizer)
    assert vocabulary.token_text(tokenizer.convert_tokens_to_ids("▁once")) == " once"
    assert vocabulary.token_text(tokenizer.convert_tokens_to_ids("upon")) == "upon"
    assert vocabulary.token_bytes(tokenizer.convert_tokens_to_ids("<0xE2>")) == b"\xe2"


def test_a_row_beyond_the_tokenizer_has_no_text() -> None:
    tokenizer = tiny_tokenizer()
    assert Vocabulary(tokenizer).token_text(len(tokenizer) + 5) == ""


def test_a_model_without_a_chat_template_refuses_conversations() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ApiError, match="no chat template"):
        Vocabulary(tokenizer).render([ChatMessage(role="user", content="hi")], 100)


def test_what_a_chat_template_refuses_is_the_clients_mistake() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('only user turns') }}"
    with pytest.raises(ApiError, match="only user turns"):
        Vocabulary(tokenizer).render([ChatMessage(role="tool", content="hi")], 100)


class Counting:
    """A tokenizer with a token per character that notes how many it was given."""

    def __init__(self) -> None:
        self.num_encoded = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_encoded += len(text)
        return [1] * len(text.replace(" ", ""))


def test_a_text_that_is_far_too_long_is_known_by_its_beginning() -> None:
    tokenizer = Counting()
    with pytest.raises(TooLongError, match="more than 100 tokens"):
        Vocabulary(tokenizer).encode("x" * 10_000_000, 100)  # type: ignore[arg-type]
    assert tokenizer.num_encoded < 2000


def test_a_long_text_of_few_tokens_is_not_too_long() -> None:
    assert len(Vocabulary(Counting()).encode(" " * 1_000_000 + "x" * 100, 100)) == 100  # type: ignore[arg-type]
    with pytest.raises(TooLongError, match="of 101 tokens"):
        Vocabulary(Counting()).encode("x" * 101, 100)  # type: ignore[arg-type]
