"""Where the last tokens of a row occurred before."""

from __future__ import annotations

import numpy as np
from support.growing_texts import PROMPT, World

from redline.engine.native.speculation.texts import ORDERS, PIECE, SCOPES


def test_a_sibling_that_said_the_same_says_what_follows() -> None:
    world = World()
    first, second = world.begin(0), world.begin(1)
    world.grow(first, *range(20, 40))
    world.grow(second, 7, 8, 9, 25, 26, 27)
    assert world.what_follows(second) == [28, 29, 30, 31]


def test_the_first_tokens_follow_on_the_prompt_as_they_did_for_a_finished_sibling() -> None:
    world = World()
    first = world.begin(0)
    world.grow(first, 1, 2, 3)
    world.end(first)
    second = world.begin(1)
    assert world.what_follows(second) == [1, 2, 3]


def test_a_text_is_found_in_itself_and_in_its_prompt() -> None:
    world = World()
    text = world.begin(0)
    world.grow(text, 103, 104, 105)
    assert world.what_follows(text) == [106, 107, 108, 109]
    world.grow(text, *range(1, 9), *range(50, 60), 1, 2, 3)
    assert world.what_follows(text) == [4, 5, 6, 7]


def test_the_longer_of_two_n_grams_is_believed() -> None:
    world = World()
    first, second, third = (world.begin(row) for row in range(3))
    longest = list(range(10, 10 + max(ORDERS)))
    world.grow(first, *longest, 1, 1, 1, *range(200, 200 + PIECE))
    world.grow(second, *longest[-min(ORDERS) :], 2, 2, 2, *range(300, 300 + PIECE))
    world.grow(third, *longest)
    assert world.what_follows(third)[:3] == [1, 1, 1]


def test_texts_of_another_scope_are_not_found() -> None:
    world = World()
    first, second = world.begin(0, b"one"), world.begin(1, b"another", PROMPT + 50)
    world.grow(first, *range(20, 40))
    world.grow(second, 20, 21, 22)
    assert world.what_follows(second) == []


def test_what_was_remembered_is_found() -> None:
    world = World()
    world.texts.remember(b"task", np.array([*PROMPT, 4, 5, 6, 7], np.int32))
    assert world.what_follows(world.begin(0)) == [4, 5, 6, 7]


def test_what_is_kept_of_a_prompt_does_not_keep_all_of_it() -> None:
    world = World()
    long = np.arange(100_000, dtype=np.int32)
    text = world.begin(0, prompt=long)
    kept = [text.lead, text.scope.prompt_ids, *(other.tokens for other in text.scope.texts.values())]
    assert not any(np.shares_memory(part, long) for part in kept)


def test_a_row_that_changes_hands_takes_no_text_along() -> None:
    world = World()
    first = world.begin(0)
    world.grow(first, *range(20, 40))
    second = world.begin(1)
    world.grow(second, 20, 21, 22)
    assert world.what_follows(second) == [23, 24, 25, 26]
    world.end(first)
    world.begin(0, b"other", PROMPT + 50)
    world.rows.tokens_RN[0] = 77
    assert world.what_follows(second) == [23, 24, 25, 26]


def test_scopes_that_nobody_asks_for_are_forgotten_and_the_bound_holds() -> None:
    world = World(max_tokens=200)
    for number in range(20):
        text = world.begin(0, b"%d" % number)
        world.grow(text, *range(20, 40))
        world.end(text)
        assert world.texts.num_kept_tokens <= 200
    assert world.what_follows(world.begin(0, b"19")) == [20, 21, 22, 23]
    assert world.what_follows(world.begin(0, b"0")) == []


def test_a_full_table_loses_guesses_and_never_lies() -> None:
    world = World(table_size=16)
    rng = np.random.default_rng(0)
    for number in range(50):
        text = world.begin(0, b"%d" % number)
        world.grow(text, *rng.integers(0, 5, 60).tolist())
        self_found = world.texts.find([text])[0] if world.what_follows(text) else None
        if self_found is not None:
            end = text.read(world.rows).tolist()
            before = world.texts.slice(self_found.text, self_found.offset - min(ORDERS), self_found.offset)
            assert before == end[-min(ORDERS) :]
        world.end(text)


def test_a_scope_whose_places_were_taken_is_indexed_again() -> None:
    world = World(table_size=64)
    first = world.begin(0, b"first")
    world.grow(first, *range(20, 40))
    world.end(first)
    for number in range(20):
        other = world.begin(1, b"%d" % number)
        world.grow(other, *np.random.default_rng(number).integers(0, 99, 30).tolist())
        world.what_follows(other)
        world.end(other)
    again = world.begin(0, b"first")
    world.grow(again, 20, 21, 22)
    assert world.what_follows(again) == [23, 24, 25, 26]


def test_of_a_task_that_comes_again_and_again_the_newest_attempts_are_kept() -> None:
    world = World(max_scope_tokens=100)
    for number in range(30):
        text = world.begin(0)
        world.grow(text, *range(200 + number, 220 + number))
        world.end(text)
        assert world.texts.num_kept_tokens <= 100
    assert world.what_follows(world.begin(0)) == [229, 230, 231, 232]


def test_every_turn_of_a_conversation_may_copy_from_its_own_prompt() -> None:
    world = World()
    world.begin(0)
    later = world.begin(1, prompt=np.concatenate([PROMPT, np.arange(300, 320, dtype=np.int32)]))
    world.grow(later, 305, 306, 307)
    assert world.what_follows(later) == [308, 309, 310, 311]


def test_short_texts_are_bounded_by_their_number() -> None:
    """Each takes as much beside its tokens as hundreds of those do."""
    world = World(max_texts=64)
    growing = world.begin(0)
    for number in range(1000):
        world.texts.remember(f"task {number}".encode(), np.array([number], np.int32))
    assert len(world.texts._texts) == 64
    assert len(world.texts._scopes) <= 64
    for number in range(1000):
        world.texts.remember(b"task", np.array([*PROMPT, 4, 5, number, number], np.int32))
    assert len(growing.scope.texts) == 64 // SCOPES + 1, "and the one that grows"
    assert world.what_follows(growing)[:3] == [4, 5, 999], "the newest stay"
