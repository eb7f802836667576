from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.models.detokenizer import Detokenizer
from redline.serve.answers.detokenizer import CompletionText


def decode_bytes(ids: list[int]) -> str:
    """A tokenizer with a token per byte."""
    return bytes(ids).decode(errors="replace")


def decode_words(ids: list[int]) -> str:
    """A tokenizer whose words begin with a space, and which drops the one that begins a text."""
    words = ["▁once", "▁upon", "▁a", "time", "."]
    return "".join(words[i] for i in ids).replace("▁", " ").removeprefix(" ")


def pieces(text: CompletionText, tokens: Sequence[int], stop: str | None = None) -> list[str]:
    return [*(text.push([token]) for token in tokens), text.finish(stop)]


def plain(stop: Sequence[str] = (), prompt: Sequence[int] = ()) -> CompletionText:
    return CompletionText(decode_bytes, prompt, stop)


# ── characters ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_character_of_several_tokens_comes_with_the_last_of_them() -> None:
    assert pieces(plain(), list("a€b".encode())) == ["a", "", "", "€", "b", ""]


def test_a_character_that_stays_incomplete_comes_at_the_end() -> None:
    assert pieces(plain(), list("a€".encode())[:-1]) == ["a", "", "", "\N{REPLACEMENT CHARACTER}"]


@given(st.binary(max_size=40))
def test_the_pieces_of_any_tokens_are_the_text_of_all_of_them(raw: bytes) -> None:
    assert "".join(pieces(plain(), list(raw))) == decode_bytes(list(raw))


@given(st.binary(max_size=40), st.data())
def test_how_tokens_are_grouped_changes_no_text(raw: bytes, data: st.DataObject) -> None:
    text, given_out, left = plain(), "", list(raw)
    while left:
        size = data.draw(st.integers(1, len(left)))
        given_out += text.push(left[:size])
        left = left[size:]
    assert given_out + text.finish(None) == "".join(pieces(plain(), list(raw)))


@pytest.mark.parametrize("token", [[0x80], [0xE2, 0x82], [0xF0, 0x9F, 0x98], [0xE2]])
def test_bytes_that_never_make_a_character_cost_the_same_at_any_length(token: list[int]) -> None:
    """Each decoding is of a few tokens, however many have come, and the text is what all of them give at once."""
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes(ids)

    detokenizer, raw = Detokenizer(decode), token * (600 // len(token))
    text = "".join(detokenizer.push([byte]) for byte in raw) + detokenizer.flush()
    assert text == decode_bytes(raw)
    assert longest < 32


def test_a_character_after_many_lone_bytes_is_whole() -> None:
    raw = [0x80] * 50 + list("€".encode())
    assert "".join(pieces(plain(), raw)) == decode_bytes(raw)
    assert decode_bytes(raw).endswith("€")


def test_tokens_without_text_are_not_decoded_again_for_ever() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode_bytes([byte for byte in ids if byte != 0])  # 0 is a special token

    detokenizer = Detokenizer(decode, list(b"abcd"))
    assert "".join(detokenizer.push([byte]) for byte in [0] * 500 + [ord("x")]) == "x"
    assert longest < 32


def test_the_space_between_prompt_and_answer_is_kept() -> None:
    answer = CompletionText(decode_words, [0])
    assert "".join(pieces(answer, [1, 2, 3, 4])) == " upon atime."


def test_what_completes_a_character_of_the_prompt_is_not_lost() -> None:
    half, rest = list("😀".encode()[:2]), list("😀".encode()[2:])
    given = pieces(plain(prompt=[*b"a", *half]), [*rest, *b"bc"])
    assert "".join(given) == decode_bytes(rest) + "bc"


def test_without_a_prompt_a_text_begins_as_the_tokenizer_has_it() -> None:
    detokenizer = Detokenizer(decode_words)
    assert detokenizer.push([0]) + detokenizer.push([1]) == "once upon"


def test_offsets_say_where_in_the_text_each_token_begins() -> None:
    text = CompletionText(decode_bytes, with_offsets=True)
    text.push(list("a€b".encode()))
    assert text.offsets == [0, 1, 1, 1, 2]


# ── stops ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_text_is_cut_before_the_stop_string() -> None:
    assert "".join(pieces(plain(["END"]), list(b"all END"), stop="END")) == "all "


def test_what_may_become_a_stop_string_is_held_back_and_let_go_when_it_does_not() -> None:
    assert pieces(plain(["END"]), list(b"aENT")) == ["a", "", "", "ENT", ""]


def test_a_stop_string_inside_one_token_is_cut() -> None:
    words = ["one ", "two STOP three"]
    text = CompletionText(lambda ids: "".join(words[i] for i in ids), stop=["STOP"])
    assert pieces(text, [0, 1], stop="STOP") == ["one ", "two ", ""]


def test_a_complete_stop_string_waits_for_the_last_word_of_the_engine() -> None:
    text = plain(["END"])
    assert text.push(list(b"END")) == ""
    assert text.finish("END") == ""


def test_a_stop_string_that_the_engine_did_not_heed_is_text() -> None:
    """Before min_tokens."""
    assert "".join(pieces(plain(["b"]), list(b"abab"), stop="b")) == "aba"


def test_the_end_lets_go_of_everything_when_no_stop_string_caused_it() -> None:
    assert "".join(pieces(plain(["END"]), list(b"aEN"))) == "aEN"


def test_a_stop_token_has_no_text() -> None:
    text = CompletionText(decode_bytes, stop_token_ids=[ord("!")])
    assert "".join(pieces(text, list(b"hi!"))) == "hi"


@given(st.text("ab€", max_size=30), st.lists(st.text("ab€", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_piece_ever_has_to_be_taken_back(said: str, stops: list[str]) -> None:
    """Against an engine that stops at the first token which completes a stop string."""
    raw = said.encode()
    ends = [(end, stop) for end in range(1, len(raw) + 1) for stop in stops if stop in decode_bytes(list(raw[:end]))]
    end, stop = ends[0] if ends else (len(raw), None)
    heard = decode_bytes(list(raw[:end]))
    expected = heard[: heard.index(stop)] if stop else heard
    so_far = ""
    text = plain(stops)
    for token in raw[:end]:
        so_far += text.push([token])
        assert expected.startswith(so_far)
    assert so_far + text.finish(stop) == expected
    at_once = plain(stops)
    assert at_once.push(list(raw[:end])) + at_once.finish(stop) == expected


@pytest.mark.parametrize("stops", [["a"], ["ab"], ["ba", "abb"]])
def test_nothing_is_held_back_that_cannot_become_a_stop_string(stops: list[str]) -> None:
    assert plain(stops).push(list(b"xyz")) == "xyz"
