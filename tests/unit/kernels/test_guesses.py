"""Guesses on the device, in Triton's interpreter, and compiled for Hopper."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from redline.kernels.decode.guesses import NO_PLACE, Entries, GuessBook, begin_guessing, end_guessing, find_guesses

TEXT = [0, 6, 7, 8, 9, 5, 6, 7, 1, 2, 3, -1, 4, 6, 7, 8, 3, 3]
"""Of slot 0."""
COUNTS = [4, 1, 3]
"""Entries of each row of the batch."""


@pytest.fixture(autouse=True)
def interpreted(interpreter: None) -> None: ...


def make_rows(last: list[list[int]], limit: int = 100, stops: tuple[int, ...] = ()) -> SimpleNamespace:
    """Rows that have sampled these tokens; the last row is dead."""
    count, R = torch.tensor([*(len(tokens) for tokens in last), 0]), len(last) + 1
    recent = torch.full((R, 8), -1, dtype=torch.int32)
    for row, tokens in enumerate(last):
        for number, token in enumerate(tokens):
            recent[row, number % 8] = token
    return SimpleNamespace(
        alive_R=torch.tensor([True] * len(last) + [False]),
        next_token_R=torch.tensor([*(tokens[-1] for tokens in last), 0]),
        position_R=count + 9,
        sampled_R=count.clone(),
        limit_R=torch.full((R,), limit),
        streams_R=torch.arange(R),
        temperature_R=torch.ones(R),
        stops_RS=torch.tensor([[*stops, -1]] * R),
        recent_RO=recent,
    )


def make_book(rows: SimpleNamespace, place: list[int]) -> GuessBook:
    book = GuessBook.empty(2, 2048, len(rows.alive_R), torch.device("cpu"))
    book.texts_SL[0, : len(TEXT)] = torch.tensor(TEXT, dtype=torch.int32)
    book.lengths_S[0] = len(TEXT)
    book.slot_R[: len(place)] = 0
    book.place_R[: len(place)] = torch.tensor(place)
    return book


def make_entries(rows: SimpleNamespace) -> Entries:
    """The three rows, and a dead one that fills batch and entries up."""
    begins, dead = [0, 4, 5, 0], len(rows.alive_R) - 1
    which = [row for row, count in enumerate(COUNTS) for _ in range(count)]
    ahead = [a for count in COUNTS for a in range(count)]
    return Entries(
        torch.tensor([0, 1, 2, dead]),
        torch.tensor(begins),
        torch.tensor([*COUNTS, 0]),
        torch.tensor([*which, dead]),
        torch.tensor([*ahead, 0]),
        most=4,
    )


def run(rows: SimpleNamespace, book: GuessBook, sampled: list[int], broken: int | None = None) -> tuple[object, list[int]]:
    """What goes in, and what comes out when these are sampled."""
    entries = make_entries(rows)
    find_guesses(rows, book, entries)
    inputs = begin_guessing(rows, book, entries)
    out = torch.full((1, 9), -9), torch.zeros((1, 9))
    logprobs = torch.zeros(9)
    if broken is not None:
        logprobs[broken] = float("nan")
    end_guessing(rows, book, entries, (torch.tensor([*sampled, 0]), logprobs), torch.zeros(len(rows.alive_R)).long(), out)
    return inputs, out[0][0, :8].tolist()


LAST = [[2, 5, 6, 7], [9, 9], [4, 6, 7, 8]]
"""The first follows on 5 6 7; the second on nothing; the third on 4 6 7 8, not on 6 7 8."""


def test_a_row_guesses_what_followed_where_most_of_its_last_tokens_occurred() -> None:
    rows = make_rows(LAST)
    inputs, _ = run(rows, make_book(rows, [NO_PLACE] * 3), [0] * 8)
    assert inputs.tokens_B[:8].tolist() == [7, 1, 2, 3, 9, 8, 3, 3]
    assert inputs.positions_B.tolist() == [13, 14, 15, 16, 11, 13, 14, 15, -1]
    assert inputs.counters_B[:8].tolist() == [4, 5, 6, 7, 2, 4, 5, 6]


def test_a_text_that_repeats_itself_is_followed_from_where_enough_of_it_comes() -> None:
    """Its newest place, the very end, would give one guess of three."""
    rows = make_rows([[5, 5, 5, 5]] * 3)
    book = make_book(rows, [NO_PLACE] * 3)
    book.texts_SL[0, :12] = torch.tensor([9] + [5] * 11, dtype=torch.int32)
    book.texts_SL[0, 12:] = -1
    book.lengths_S[0] = 13
    inputs, out = run(rows, book, [5] * 8)
    assert inputs.tokens_B[:8].tolist() == [5] * 8
    assert (inputs.positions_B >= 0).tolist() == [True] * 8 + [False], "only what fills the batch up has no guess"
    assert out == [5] * 8


def test_among_places_that_are_as_good_the_lot_decides_anew_each_time() -> None:
    """The newest of them would be found, and fail, again and again."""
    text, guessed = [1, 2, 3, 4, 4, 4, -1, 1, 2, 3, 5, 5, 5, -1, *[8] * 20], set()
    for filling in range(0, 24, 3):
        rows = make_rows([[9] * (filling + row) + [1, 2, 3] for row in range(3)])
        book = make_book(rows, [NO_PLACE] * 3)
        book.texts_SL[0, : len(text)] = torch.tensor(text, dtype=torch.int32)
        book.lengths_S[0] = len(text)
        inputs, _ = run(rows, book, [0] * 8)
        guessed |= {inputs.tokens_B[1].item(), inputs.tokens_B[6].item()}
    assert guessed == {4, 5}


def test_tokens_count_up_to_the_first_that_is_not_the_guess() -> None:
    rows = make_rows(LAST)
    book = make_book(rows, [NO_PLACE] * 3)
    _, out = run(rows, book, [1, 2, 5, 6, 4, 3, 3, 9])
    assert out == [1, 2, 5, -1, 4, 3, 3, 9]
    assert rows.sampled_R.tolist() == [7, 3, 7, 0]
    assert rows.position_R.tolist() == [16, 12, 16, 9]
    assert rows.next_token_R[:3].tolist() == [5, 4, 9]
    assert rows.alive_R.tolist() == [True, True, True, False]
    assert book.place_R[:3].tolist() == [-2 - 11, NO_PLACE, -2 - 19], "those that lost their places would be there"
    assert [rows.recent_RO[0, number % 8].item() for number in range(7)] == [2, 5, 6, 7, 1, 2, 5]


def test_a_place_goes_on_and_one_that_is_lost_is_kept_where_none_is_found() -> None:
    rows = make_rows(LAST)
    book = make_book(rows, [2, -2 - 3, NO_PLACE])
    inputs, out = run(rows, book, [7, 8, 9, 5, 8, 0, 0, 0])
    assert inputs.tokens_B[:4].tolist() == [7, 7, 8, 9]
    assert out[:5] == [7, 8, 9, 5, 8]
    assert book.place_R[:2].tolist() == [6, 4]


def test_nothing_is_guessed_beyond_a_text_or_a_limit() -> None:
    rows = make_rows(LAST, limit=6)
    inputs, out = run(rows, make_book(rows, [10, 10, NO_PLACE]), [3, 4, 4, 4, 1, 3, 3, 5])
    assert inputs.positions_B.tolist() == [13, 14, -1, -1, 11, 13, 14, -1, -1], "behind 3 is an end, and the third may have two"
    assert out == [3, 4, -2, -2, 1, 3, 3, -2]
    assert rows.alive_R.tolist() == [False, True, False, False], "two of them are at their limit"
    assert rows.sampled_R.tolist() == [6, 3, 6, 0]


@pytest.mark.parametrize("how", ["stop", "nan"])
def test_a_row_ends_in_the_middle_of_what_was_guessed_right(how: str) -> None:
    rows = make_rows(LAST, stops=(2,) if how == "stop" else ())
    _, out = run(rows, make_book(rows, [NO_PLACE] * 3), [1, 2, 3, 6, 4, 3, 3, 9], broken=1 if how == "nan" else None)
    assert out[:4] == [1, 2, -1, -1]
    assert rows.alive_R.tolist() == [False, True, True, False]
    assert rows.sampled_R[0] == 6
