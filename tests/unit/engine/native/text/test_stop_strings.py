"""The engine ends a completion at a stop string, and the server cuts its text there: both see the same text."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from redline.engine.native.text.stop_strings import StopSearch
from redline.serve.answers.detokenizer import CompletionText

TOKENS = [b"a", b"b", b"ab", b"bab", b"\xe2", b"\x82", b"\xac", b"b\xe2", b"\xaca", "€".encode(), b""]
"""Whole characters, parts of one, both, and nothing."""


class ByteTokenizer:
    def decode(self, ids: list[int], **options: Any) -> str:
        return b"".join(TOKENS[id_] for id_ in ids).decode(errors="replace")


TOKENIZER = ByteTokenizer()
texts = st.text("ab€", min_size=1, max_size=3)


def sampled_until_stop(tokens: list[int], stops: list[str]) -> tuple[list[int], str | None]:
    search = StopSearch(TOKENIZER, tuple(stops))  # type: ignore[arg-type]
    for count in range(1, len(tokens) + 1):
        found = search.look(np.array(tokens[:count]))
        if found:
            return tokens[: found[0]], found[1]
    return tokens, None


def test_the_stop_string_that_begins_first_is_the_one() -> None:
    assert sampled_until_stop([TOKENS.index(b"a"), TOKENS.index(b"bab")], ["a€", "b", "ab"]) == ([0, 3], "ab")


def test_a_stop_string_that_waited_for_half_a_character_is_cut_whole_and_streamed() -> None:
    """The engine sees the text of a token with half a character in it once it knows that there is no other half."""
    tokens = [TOKENS.index(token) for token in (*[b"a"] * 9, b"b\xe2", b"\xe2", b"a")]
    assert sampled_until_stop(tokens, ["b"]) == (tokens, "b")
    at_once, streamed = CompletionText(TOKENIZER.decode, (), ["b"]), CompletionText(TOKENIZER.decode, (), ["b"])
    assert at_once.push(tokens) + at_once.finish("b") == "a" * 9
    assert "".join(streamed.push([token]) for token in tokens) + streamed.finish("b") == "a" * 9


@given(st.lists(st.integers(0, len(TOKENS) - 1), max_size=24), st.lists(texts, min_size=1, max_size=3), st.data())
def test_text_ends_before_the_first_stop_string_however_it_is_cut_into_pieces(
    tokens: list[int], stops: list[str], data: st.DataObject
) -> None:
    kept, stop = sampled_until_stop(tokens, stops)
    whole = TOKENIZER.decode(kept)
    if stop is not None:
        whole = whole[: min(whole.find(other) for other in stops if other in whole)]
    text, said, begin = CompletionText(TOKENIZER.decode, (), stops), "", 0
    while begin < len(kept):
        size = data.draw(st.integers(1, len(kept) - begin))
        said += text.push(kept[begin : begin + size])
        begin += size
    assert said + text.finish(stop) == whole
