"""Replies are read as they come; what is no legal order counts against the power."""

from __future__ import annotations

import pytest

from redline.environments.diplomacy.options import Options
from redline.environments.diplomacy.orders import read_orders

MOVES = Options("move", 2, {"A PAR": ["A PAR - BUR", "A PAR H", "A PAR S F BRE - PIC"], "F BRE": ["F BRE - PIC", "F BRE H"]})
BUILDS = Options("build", 2, {"PAR": ["A PAR B"], "BRE": ["A BRE B", "F BRE B"]})


@pytest.mark.parametrize(
    "text",
    [
        "A PAR - BUR\nF BRE H",
        "1. a par -> bur.\n2. fleet BRE holds",
        "- Army PAR-BUR; F BRE hold",
        "**A PAR – BUR**\n\n* `F BRE H`",
    ],
)
def test_orders_are_read_in_the_spellings_that_models_use(text: str) -> None:
    reading = read_orders(text, MOVES)
    assert reading.orders == ("A PAR - BUR", "F BRE H")
    assert reading.faults == 0


def test_a_support_is_read() -> None:
    assert read_orders("A PAR supports F BRE - PIC", MOVES).orders == ("A PAR S F BRE - PIC",)


def test_an_illegal_order_is_one_fault_and_the_unit_has_none() -> None:
    reading = read_orders("A PAR - MOS\nF BRE H", MOVES)
    assert reading.orders == ("F BRE H",)
    assert reading.faults == 1


def test_silence_is_as_many_faults_as_orders_are_due() -> None:
    assert read_orders("", MOVES).faults == 2


def test_the_first_legal_order_of_a_unit_counts_and_the_second_is_a_fault() -> None:
    reading = read_orders("A PAR H\nA PAR - BUR\nF BRE H", MOVES)
    assert reading.orders == ("A PAR H", "F BRE H")
    assert reading.faults == 1


def test_every_line_beyond_the_orders_is_a_fault() -> None:
    assert read_orders("Here are my orders\nA PAR H\nF BRE H\nGood luck", MOVES).faults == 2


def test_waiving_twice_is_two_orders_and_a_site_is_built_on_once() -> None:
    assert read_orders("WAIVE\nwaive", BUILDS).orders == ("WAIVE", "WAIVE")
    assert read_orders("A BRE B\nF BRE B", BUILDS).orders == ("A BRE B",)


def test_nobody_waives_where_there_is_nothing_to_build() -> None:
    assert read_orders("WAIVE", MOVES).orders == ()
