"""Rows as columns: what charts need, at eight bytes a number."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

Json = Any


class Columns:
    """The numbers of a log, by key. A row that lacks a key has NaN there."""

    def __init__(self, index: str) -> None:
        """`index` is the key that every row has, and that the others are drawn over."""
        self.index = index
        self.values: dict[str, array[float]] = {index: array("d")}

    def __len__(self) -> int:
        return len(self.values[self.index])

    def add(self, row: Mapping[str, Any]) -> None:
        """A row without the index is none of ours."""
        if not isinstance(row.get(self.index), int | float):
            return
        before = len(self)
        for key, value in row.items():
            if isinstance(value, int | float):
                column = self.values.get(key)
                if column is None:
                    column = self.values[key] = array("d", [math.nan]) * before
                column.append(value)
        for column in self.values.values():
            if len(column) == before:
                column.append(math.nan)

    def tail_mean(self, key: str, count: int) -> float | None:
        """Of the last rows that have it."""
        found = [value for value in self.values.get(key, ())[-count:] if math.isfinite(value)]
        return sum(found) / len(found) if found else None

    def since(self, start: int) -> dict[str, Json]:
        """The rows from `start` on, for JSON: the index as a list, others as one where their values differ, else as the one
        value that they all have. Six digits are more than a screen shows."""
        rows: dict[str, Json] = {self.index: [_number(value, 15) for value in self.values[self.index][start:]]}
        for key, column in self.values.items():
            if key != self.index and len(column) > start:
                numbers = [_number(value, 6) for value in column[start:]]
                rows[key] = numbers[0] if all(number == numbers[0] for number in numbers) else numbers
        return rows


def _number(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.{digits}g}")
