"""Where verbs print what they found, and tables that never cut a value off.

A terminal has a width: a table gives its text columns what its numbers leave, and where that is too little it becomes a list
of rows. A pipe has none: tables are as wide as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Column, Table
from rich.text import Text

UNLIMITED = 100_000
"""Columns of a console that has no width."""
LEAST_TEXT = 16
"""Columns that a text gets before it is worth wrapping."""


def results_console(*, as_json: bool = False) -> Console:
    """Return the console for results: stdout, or stderr where stdout is left to one JSON document."""
    return _console(stderr=as_json)


def log_console() -> Console:
    """Return the console for progress and remarks: stderr."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if console.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return console
    return Console(stderr=stderr, highlight=False, width=UNLIMITED)


class Fitted:
    """A table that is printed whole at any width. Columns with `no_wrap` keep their content on one line."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        most = [_widest(console, options, column) for column in self.table.columns]
        least = [_least(console, options, column) for column in self.table.columns]
        whole = copy.copy(self.table)
        whole.columns = _with_widths(self.table.columns, most)
        if _width(console, options, whole) > options.max_width:
            whole.pad_edge = whole.show_edge = False
        room = options.max_width - (_width(console, options, whole) - sum(most))
        if sum(least) > room:
            yield from _as_list(self.table)
            return
        if sum(most) > room:
            whole.columns = _with_widths(self.table.columns, _shared(most, least, room))
        yield whole


def _width(console: Console, options: ConsoleOptions, table: Table) -> int:
    return Measurement.get(console, options.update_width(UNLIMITED), table).minimum


def _with_widths(columns: Sequence[Column], widths: Sequence[int]) -> list[Column]:
    return [dataclasses.replace(column, width=width) for column, width in zip(columns, widths, strict=True)]


def _widest(console: Console, options: ConsoleOptions, column: Column) -> int:
    """Width of the longest line of a column, which its cells need not to wrap."""
    return max([column.min_width or 0, *(found.maximum for found in _measured(console, options, column))])


def _least(console: Console, options: ConsoleOptions, column: Column) -> int:
    """Width below which a column would lose something."""
    if column.no_wrap:
        return _widest(console, options, column)
    title, *cells = _measured(console, options, column)
    widest = max((cell.maximum for cell in cells), default=0)
    return max(title.minimum, *(cell.minimum for cell in cells), min(widest, LEAST_TEXT))


def _measured(console: Console, options: ConsoleOptions, column: Column) -> Iterator[Measurement]:
    for cell in (column.header, *column.cells):
        yield Measurement.get(console, options.update_width(UNLIMITED), cell)


def _shared(most: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Widths that sum to at most `room`: each column has its least, and what is left goes to those that want more."""
    wanted, spare = [most_ - least_ for most_, least_ in zip(most, least, strict=True)], room - sum(least)
    return [width + spare * more // (sum(wanted) or 1) for width, more in zip(least, wanted, strict=True)]


def _as_list(table: Table) -> Iterator[RenderableType]:
    """Each row as a heading, its first cell, and a line for each other cell that says something."""
    if table.title:
        yield Text(str(table.title), style="italic")
    titles = [_text(column.header).plain.replace("\n", "") for column in table.columns]
    indent = max(map(len, titles), default=0) + 2
    for row, cells in zip(table.rows, zip(*(column.cells for column in table.columns), strict=True), strict=True):
        first, *others = [_text(cell) for cell in cells]
        first.stylize(row.style or "")
        yield first
        for title, cell in zip(titles[1:], others, strict=True):
            if cell.plain.strip():
                yield Text.assemble((f"  {title:<{indent}}", "dim"), cell, overflow="fold")
    if table.caption:
        yield Text(str(table.caption), style="dim")


def _text(cell: RenderableType) -> Text:
    return cell.copy() if isinstance(cell, Text) else Text.from_markup(str(cell))
