"""Rows as columns: what charts need, at eight bytes a number, and in a page no more points than a screen can show."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

Json = Any
Item = TypeVar("Item")
MOST_POINTS = 1500
"""As many rows are sent one by one; of more, the older ones in buckets."""
BUCKETS = 600
RECENT = 300
"""Rows at the end that are always sent one by one."""
QUANTILES = (0.0, 0.5, 0.9, 0.99, 1.0)


@dataclass(slots=True, frozen=True)
class Whole:
    """All rows of a log, as a page gets them."""

    rows: dict[str, Json]
    """As `Columns.since` gives them; a bucket is a row too, with the means of its rows and the index of its last."""
    thinned: dict[str, Json] | None
    """None where every row is there by itself."""
    num_points: int


@dataclass(slots=True, frozen=True)
class _Layout:
    """Where the values of a row go."""

    known: list[str]
    columns: list[array[float]]
    """Columns of the known keys, in their order."""
    absent: list[array[float]]
    """Columns that the row has no key for."""
    unknown: list[str]
    """Keys that never had a number."""


class Columns:
    """The numbers of a log, by key. A row that lacks a key has NaN there."""

    def __init__(self, index: str) -> None:
        """`index` is the key that every row has, and that the others are drawn over."""
        self.index = index
        self.values: dict[str, array[float]] = {index: array("d")}
        self._layouts: dict[tuple[str, ...], _Layout] = {}
        """Keys of a row → where its values go: most rows have the keys of the row before."""

    def __len__(self) -> int:
        return len(self.values[self.index])

    def add(self, row: Mapping[str, Any]) -> None:
        """A row without the index is none of ours."""
        if not is_finite(row.get(self.index)):
            return
        keys = tuple(row)
        layout = self._layouts.get(keys)
        if layout is None or any(isinstance(row[key], int | float) for key in layout.unknown):
            layout = self._layouts[keys] = self._lay_out(row)
        values = row.values() if not layout.unknown else [row[key] for key in layout.known]
        for column, value in zip(layout.columns, values, strict=True):
            try:
                column.append(value if isinstance(value, int | float) else math.nan)
            except OverflowError:  # a whole number that no float holds
                column.append(math.nan)
        for column in layout.absent:
            column.append(math.nan)

    def _lay_out(self, row: Mapping[str, Any]) -> _Layout:
        before = len(self)
        for key, value in row.items():
            if key not in self.values and isinstance(value, int | float):
                self.values[key] = array("d", [math.nan]) * before
                self._layouts.clear()  # to others it is absent
        known = [key for key in row if key in self.values]
        absent = [column for key, column in self.values.items() if key not in row]
        return _Layout(known, [self.values[key] for key in known], absent, [key for key in row if key not in self.values])

    def head_mean(self, key: str, count: int) -> float | None:
        """The mean over the first `count` rows that have the key; None where none has."""
        return _mean_of_finite(self.values.get(key, ())[:count])

    def tail_mean(self, key: str, count: int, by: str = "") -> float | None:
        """The mean over the last `count` rows, of those that have the key; None where none has. `by` is what the rows weigh: of
        a rate the seconds that it was measured over. Without a weight in any of them, all count alike."""
        values, weights = self.values.get(key, ())[-count:], self.values.get(by, ())[-count:]
        pairs = [(w * v, w) for v, w in zip(values, weights, strict=False) if math.isfinite(w * v)]
        total = sum(weight for _, weight in pairs)
        return sum(part for part, _ in pairs) / total if total > 0 else _mean_of_finite(values)

    def means(self, key: str, most: int) -> list[float]:
        """At most so many points over the whole log, each the mean of the finite values that it stands for."""
        values = np.array(self.values.get(key, ()), dtype=np.float64)
        values = values[np.isfinite(values)]
        size = max(1, -(-len(values) // most))
        return [round(float(np.mean(values[i : i + size])), 6) for i in range(0, len(values), size)]

    def since(self, start: int) -> dict[str, Json]:
        """The rows from `start` on, for JSON: the index as a list, others as one where their values differ, else as the one
        value that they all have. Six digits are more than a screen shows."""
        rows: dict[str, Json] = {self.index: _numbers(self.values[self.index][start:], 15)}
        for key, column in self.values.items():
            if key != self.index and len(column) > start:
                rows[key] = _short(_numbers(column[start:], 6))
        return rows

    def whole(self) -> Whole:
        """All rows; of a long log the older ones in buckets of equal size, each with the mean, the least and the greatest value
        of every key, so that no extreme is lost. The newest `RECENT` rows are there by themselves."""
        if len(self) <= MOST_POINTS:
            return Whole(self.since(0), None, len(self))
        older = len(self) - RECENT
        size = -(-older // BUCKETS)
        points = -(-older // size)
        ends = [min(older, (i + 1) * size) - 1 for i in range(points)]
        index = self.values[self.index]
        rows: dict[str, Json] = {self.index: _numbers([*(index[end] for end in ends), *index[older:]], 15)}
        low, high, quantiles = dict[str, Json](), dict[str, Json](), dict[str, Json]()
        for key, column in self.values.items():
            if key == self.index:
                continue
            values = np.frombuffer(column, dtype=np.float64)
            means, least, greatest = _buckets(values[:older], size, points)
            rows[key] = _short([*_numbers(means, 5), *_numbers(column[older:], 6)])
            quantiles[key] = _quantiles(values)
            if not np.array_equal(least, greatest, equal_nan=True):
                low[key], high[key] = _numbers(least, 5), _numbers(greatest, 5)
        thinned = {"size": size, "points": points, "rows": len(self), "low": low, "high": high, "quantiles": quantiles}
        return Whole(rows, thinned, points + RECENT)


def is_finite(value: Any) -> bool:
    """Whether a value of a row is a number that a page can hold."""
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:
        return False


def spread(items: Sequence[Item], most: int) -> list[Item]:
    """At most so many of them, evenly, the first and the last among them."""
    last = len(items) - 1
    return [items[i] for i in sorted({round(place * last / (most - 1)) for place in range(most)})] if items else []


def _buckets(values: np.ndarray, size: int, points: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean, least and greatest finite value of each bucket; NaN where it has none."""
    finite = np.isfinite(values)
    padded = np.full(points * size, np.nan)
    padded[: len(values)][finite] = values[finite]
    table, counts = padded.reshape(points, size), np.zeros(points * size)
    counts[: len(values)] = finite
    num = counts.reshape(points, size).sum(axis=1)
    empty = num == 0
    with np.errstate(invalid="ignore", divide="ignore"):
        means = np.nansum(table, axis=1) / num
    least = np.where(empty, np.nan, np.fmin.reduce(table, axis=1))
    greatest = np.where(empty, np.nan, np.fmax.reduce(table, axis=1))
    return np.clip(means, least, greatest), least, greatest


def _quantiles(values: np.ndarray) -> list[float | int | None]:
    finite = values[np.isfinite(values)]
    return _numbers(np.quantile(finite, QUANTILES), 6) if len(finite) else [None] * len(QUANTILES)


def _short(numbers: list[float | int | None]) -> Json:
    """One value in place of a list of equals."""
    first = numbers[0]
    return first if all(number == first for number in numbers) else numbers


def _numbers(values: Any, digits: int) -> list[float | int | None]:
    return [_number(value, digits) for value in values]


def _number(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() and abs(value) < 2**53 else float(f"{value:.{digits}g}")


def _mean_of_finite(values: Sequence[float]) -> float | None:
    found = [value for value in values if math.isfinite(value)]
    return sum(found) / len(found) if found else None
