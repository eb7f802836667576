"""Positions are values: a game that is set to one goes on as if it had always been there."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("diplomacy")

from diplomacy import Game
from support.diplomacy_games import random_orders

from redline.environments.diplomacy.adjudicator import Adjudicator, LiveGame, read
from redline.environments.diplomacy.environment import Diplomacy
from redline.environments.diplomacy.position import POWERS, from_bytes
from redline.errors import TaskError

ADJUDICATOR = Adjudicator()


def follow_a_game(seed: int, phases: int) -> set[str]:
    """Play with the package alone, its history kept, and beside it from bytes in every phase. Returns the kinds of phases."""
    rng, game, position = random.Random(seed), Game(), ADJUDICATOR.start()
    kinds = set()
    for _ in range(phases):
        kinds.add(position.kind)
        begun = from_bytes(position.to_bytes())
        legal = ADJUDICATOR.legal(begun)
        assert_legal_as_the_package_says(legal, game)
        orders = random_orders(legal, rng)
        for power, given_orders in orders.items():
            game.set_orders(power, given_orders)
        game.process()
        position = ADJUDICATOR.advance(begun, orders)
        assert position == read(game)
        if position.is_over:
            break
    return kinds


def assert_legal_as_the_package_says(legal: dict, game: Game) -> None:
    possible = game.get_all_possible_orders()
    places = game.get_orderable_locations()
    for power in POWERS:
        theirs = {order for place in places[power] for order in possible[place]}
        ours = set(legal[power].orders()) if power in legal else set()
        assert theirs - ours == set()
        assert all(order in possible[order.split()[1]] for order in ours - theirs)


@settings(max_examples=3, derandomize=True)
@given(st.integers(0, 2**31))
def test_a_restored_game_goes_on_as_the_one_that_was_never_left(seed: int) -> None:
    follow_a_game(seed, 14)


@pytest.mark.slow
def test_long_games_go_on_alike_through_every_kind_of_phase() -> None:
    kinds = [follow_a_game(seed, 60) for seed in range(8)]
    assert set().union(*kinds) == {"M", "R", "A"}


def test_a_position_asked_between_two_others_is_not_mixed_with_them() -> None:
    rng = random.Random(5)
    start = ADJUDICATOR.start()
    orders = random_orders(ADJUDICATOR.legal(start), rng)
    alone = ADJUDICATOR.advance(start, orders)
    ADJUDICATOR.advance(alone, random_orders(ADJUDICATOR.legal(alone), rng))
    assert ADJUDICATOR.advance(start, orders) == alone


@pytest.mark.slow
def test_a_deep_copy_plays_on_as_its_original() -> None:
    rng = random.Random(2)
    game = LiveGame()
    game.advance(random_orders(game.legal(), rng))
    copied = game.copy()
    orders = random_orders(game.legal(), rng)
    game.advance(orders)
    copied.advance(orders)
    assert copied.position == game.position


def test_a_position_is_a_few_hundred_bytes() -> None:
    assert len(ADJUDICATOR.start().to_bytes()) < 700


@pytest.mark.parametrize("state", [b"", b"S1901M", b"\xff\xfe", b"S1901M|\n|||\n|||"])
def test_bytes_that_are_no_position_are_refused(state: bytes) -> None:
    with pytest.raises(TaskError, match="position of Diplomacy"):
        from_bytes(state)


PROGRAM = """
from redline.environments.diplomacy.environment import Diplomacy
print(Diplomacy().make_state(5).decode(), end="")
"""


def test_the_same_seed_gives_the_same_state_in_another_process() -> None:
    """The package's sets come in another order in every process."""
    environ = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, check=True)
    assert done.stdout == Diplomacy().make_state(5)
