"""Values that a run's config.json gives back as they were. Loads no torch."""

from __future__ import annotations

import math
from typing import Any

_PLAIN = (str, int, float, bool, type(None))
MAX_DEPTH = 100
"""Lists and mappings in each other."""
MAX_BITS = 14_000
"""Bits of a whole number: Python reads back no more than 4,300 digits."""


def refuse_what_json_changes(values: dict[str, Any]) -> dict[str, Any]:
    """Return the mapping itself. Raises ValueError, with the place and the fix, for a value that JSON cannot hold or would
    change: a run that goes on would be another than the one that began."""
    for key, value in values.items():
        _refuse(value, key, 1)
    return values


def _refuse(value: Any, place: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"{place[:60]}… holds itself, or is nested more than {MAX_DEPTH} deep; make it flatter")
    if type(value) is dict:
        for key, part in value.items():
            if type(key) is not str:
                what = f"{place} has the key {key!r:.40}, a {type(key).__name__}, which config.json cannot hold"
                raise ValueError(f"{what}; put the key in quotes and make of it there what you need")
            _refuse(part, f"{place}.{key}", depth + 1)
    elif type(value) is list:
        for index, part in enumerate(value):
            _refuse(part, f"{place}[{index}]", depth + 1)
    elif (why := _why_changed(value)) is not None:
        raise ValueError(f"{place} is {why}")


def _why_changed(value: Any) -> str | None:
    """What a value is that JSON does not hold as it is, and the fix; None for any other."""
    kind = type(value)
    if kind not in _PLAIN:
        fix = "write a list" if kind in (tuple, set, frozenset) else "put it in quotes and make of it there what you need"
        return f"{value!r:.40}, a {kind.__name__}, which config.json cannot hold; {fix}"
    if kind is float and not math.isfinite(value):
        return f"{value!r}, no finite number; leave it out, or give it a name such as 'inf' and make of it there what you need"
    if kind is int and value.bit_length() > MAX_BITS:
        return f"a number of {value.bit_length():,} bits, which config.json cannot hold; put it in quotes"
    if kind is str and not _is_whole_text(value):
        return f"{value!r:.40}, half a character, which config.json cannot hold; give whole characters"
    return None


def _is_whole_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
