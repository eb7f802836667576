"""Rows of a JSONL log → an Arrow table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa


def table_of(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """One column for each key that some row has, in the order in which the keys appear; null where a row lacks it. Keeps the
    values alone, so that a long log needs a fraction of the memory of its rows."""
    columns: dict[str, list[Any]] = {}
    count = 0
    for row in rows:
        for key, value in row.items():
            column = columns.setdefault(key, [])
            if len(column) < count:  # rows before this one that lack the key
                column.extend([None] * (count - len(column)))
            column.append(value)
        count += 1
    for column in columns.values():
        column.extend([None] * (count - len(column)))
    return pa.table({key: _array(column) for key, column in columns.items()})


def _array(values: list[Any]) -> pa.Array:
    """An array of the type that all values have. Where there is no such type the numbers become float64, and anything else the
    JSON text of each value."""
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError, ValueError):
        pass
    if all(value is None or isinstance(value, int | float) for value in values):
        return pa.array([None if value is None else float(value) for value in values])
    return pa.array([None if value is None else json.dumps(value, ensure_ascii=False) for value in values])
