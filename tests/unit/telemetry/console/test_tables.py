"""Tables at any width: numbers stay whole, and nothing is left out."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich import box
from rich.console import Console
from rich.table import Table

from redline.telemetry.console.tables import UNLIMITED, Fitted, log_console, results_console

NUMBERS = ("1,234,567 tok/s", "12,345 tok/s", "98.7%", "2.13× (1.98–2.31)")
WHY = "it is bound by reading every weight once for each token that is generated"


def table() -> Table:
    made = Table(box=box.SIMPLE_HEAD, title="generate on cpu", title_justify="left", caption="two sides in turn")
    made.add_column("", no_wrap=True)
    for title in ("redline", "bound", "of bound", "ratio, 95% interval"):
        made.add_column(title, justify="right", no_wrap=True)
    made.add_column("why")
    made.add_row("throughput", *NUMBERS, WHY)
    made.add_row("time to first token", "12.3 ms", "4.5 ms", "36.6%", "", "")
    return made


def printed(made: Table, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(Fitted(made))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize("width", [UNLIMITED, 200, 120, 80, 60, 40])
def test_every_number_is_whole_at_every_width(width: int) -> None:
    text = printed(table(), width)
    assert "…" not in text
    for number in (*NUMBERS, "12.3 ms", "4.5 ms", "36.6%", "throughput", "time to first token", "two sides in turn"):
        assert number in text
    assert max(map(len, text.splitlines())) <= width


def test_a_pipe_gets_one_line_for_a_row() -> None:
    [line] = [line for line in printed(table(), UNLIMITED).splitlines() if "throughput" in line]
    assert all(number in line for number in NUMBERS)
    assert WHY in line


def test_text_gives_way_to_numbers() -> None:
    lines = printed(table(), 120).splitlines()
    [line] = [line for line in lines if "throughput" in line]
    assert all(number in line for number in NUMBERS)
    assert WHY not in line
    assert set(WHY.split()) <= {word for line in lines for word in line.split()}


def test_what_fits_no_width_becomes_a_list_that_says_what_each_value_is() -> None:
    lines = [line.split() for line in printed(table(), 60).splitlines()]
    assert ["throughput"] in lines
    assert ["redline", "1,234,567", "tok/s"] in lines
    assert ["of", "bound", "36.6%"] in lines
    assert ["ratio,", "95%", "interval", "2.13×", "(1.98–2.31)"] in lines


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.integers(-(10**9), 10**9), min_size=4, max_size=4), min_size=1, max_size=4),
    st.integers(min_value=24, max_value=120),
)
def test_no_digit_is_ever_lost(rows: list[list[int]], width: int) -> None:
    made = Table(box=box.SIMPLE_HEAD)
    for index in range(4):
        made.add_column(f"column {index}", justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*(f"{value:,}" for value in row))
    words = printed(made, width).split()
    for value in (value for row in rows for value in row):
        assert f"{value:,}" in words


def test_results_are_on_stdout_and_make_room_for_a_document(capsys: pytest.CaptureFixture[str]) -> None:
    results_console().print("found")
    results_console(as_json=True).print("beside a document")
    log_console().print("progress")
    assert capsys.readouterr() == ("found\n", "beside a document\nprogress\n")


def test_a_width_that_is_asked_for_counts_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    assert results_console().width == UNLIMITED
    monkeypatch.setenv("COLUMNS", "80")
    assert results_console().width == 80
