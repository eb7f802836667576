from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from redline.telemetry import Ledger
from redline.telemetry.ledger import LaneLedger, by_section, ledger_from_spans

ROWS = {
    "engine.decode": 6_000_400_000,
    "engine.prefill": 1_000_400_000,
    "trainer.backward": 2_000_400_000,
    "run.startup": 400_000,
}
MAIN = LaneLedger(wall_ns=sum(ROWS.values()) + 300_000, rows=ROWS, unaccounted_ns=300_000)


@dataclass
class Stretch:
    lane: str
    name: str
    start_ns: int
    end_ns: int


def rendered(ledger: Ledger, width: int = 80) -> list[str]:
    console = Console(width=width, no_color=True)
    with console.capture() as capture:
        console.print(ledger.render())
    return [line.rstrip() for line in capture.get().splitlines() if line.strip()]


def test_a_ledger_that_does_not_sum_to_the_wall_clock_is_refused() -> None:
    with pytest.raises(AssertionError, match="wall clock"):
        LaneLedger(wall_ns=10, rows={"engine.decode": 8}, unaccounted_ns=1)


def test_intervals_in_any_order_give_the_same_ledger() -> None:
    spans = [
        Stretch("main", "run.evaluate", 0, 10),
        Stretch("main", "engine.decode", 2, 5),
        Stretch("other", "engine.decode", 3, 9),
    ]
    expected = {
        "main": LaneLedger(12, {"engine.decode": 3, "run.evaluate": 7}, 2),
        "other": LaneLedger(6, {"engine.decode": 6}, 0),
    }
    for order in (spans, spans[::-1]):
        assert ledger_from_spans(order, {"main": (0, 12)}).lanes == expected


def test_a_lane_without_spans_is_unaccounted_for() -> None:
    assert ledger_from_spans([], {"main": (3, 8)}).lanes == {"main": LaneLedger(5, {}, 5)}


def test_a_ledger_survives_json() -> None:
    ledger = Ledger({"main": MAIN})
    assert Ledger.from_json(json.loads(json.dumps(ledger.to_json()))) == ledger


def test_sections_add_up_their_parts() -> None:
    assert by_section({**ROWS, "unaccounted": 5})["engine"] == 7_000_800_000
    assert by_section({**ROWS, "unaccounted": 5})["unaccounted"] == 5


def test_the_table_shows_unaccounted_last_and_the_wall_time_as_total() -> None:
    lines = rendered(Ledger({"main": MAIN}))
    first_words = [line.split()[0] for line in lines if not line.lstrip().startswith("─")]
    assert first_words == ["where", "engine", "decode", "prefill", "trainer.backward", "run.startup", "unaccounted", "total"]
    assert lines[-1].split() == ["total", "9.002", "100.0%"]


def test_the_table_of_several_lanes_names_each() -> None:
    lines = [line.strip() for line in rendered(Ledger({"main": MAIN, "rewards": MAIN}))]
    assert "lane main" in lines
    assert "lane rewards" in lines


def test_lanes_that_did_nothing_but_wait_are_named_and_not_drawn() -> None:
    idle = LaneLedger(1000, {"wait.for_calls": 995, "rollouts.reward": 5}, 0)
    busy = LaneLedger(1000, {"wait.for_calls": 900, "rollouts.reward": 100}, 0)
    lines = [line.strip() for line in rendered(Ledger({"main": MAIN, "score": idle, "rewards": busy}))]
    assert "lane rewards" in lines
    assert "lane score" not in lines
    assert "lanes that only waited: score" in lines


def test_the_table_fits_eighty_columns() -> None:
    assert max(map(len, rendered(Ledger({"main": MAIN})))) <= 80


@settings(deadline=None, max_examples=50)
@given(
    st.dictionaries(st.sampled_from(["a.a", "a.b", "b.a", "b.b", "c.a", "c.b"]), st.integers(0, 10**11)), st.integers(0, 10**9)
)
def test_the_printed_numbers_sum_to_the_printed_total(rows: dict[str, int], unaccounted_ns: int) -> None:
    ledger = Ledger({"main": LaneLedger(sum(rows.values()) + unaccounted_ns, rows, unaccounted_ns)})
    *sections, total = [line.split() for line in rendered(ledger) if "%" in line and not line.startswith("   ")]
    for column in (1, 2):
        printed = [float(cells[column].strip("%").replace(",", "")) for cells in (*sections, total)]
        assert sum(printed[:-1]) == pytest.approx(printed[-1], abs=1e-6)
