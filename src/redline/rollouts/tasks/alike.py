"""Whether two values of the user's code are alike, whatever they hold: arrays, sets, objects without an `==` of their own."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence, Set
from typing import Any

from redline.types import Task

DEPTH = 20
"""How deep a value is looked into; one that holds itself has no end."""


def alike(one: Any, other: Any) -> bool:
    """Whether two values look the same."""
    return looks(one) == looks(other)


def question(task: Task) -> str:
    """What a task asks, without its id."""
    return digest([task.messages, task.answer, task.data])


def digest(value: Any) -> str:
    """A short text that is the same for values that look the same, in other processes too."""
    return hashlib.sha256(json.dumps(looks(value)).encode()).hexdigest()[:32]


def looks(value: Any, depth: int = DEPTH) -> Any:
    """A value as lists and texts. Mappings and sets have no order; an object is its kind and its attributes."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return f"{type(value).__name__} {value!r}"
    kind = type(value).__qualname__
    if depth == 0:
        return kind
    if isinstance(value, Mapping):
        return ["mapping", *sorted(([looks(key, depth - 1), looks(one, depth - 1)] for key, one in value.items()), key=str)]
    if isinstance(value, Set):
        return ["set", *sorted((looks(one, depth - 1) for one in value), key=str)]
    if isinstance(value, Sequence):
        return [kind, *(looks(one, depth - 1) for one in value)]
    if callable(getattr(value, "tolist", None)):  # arrays and tensors
        return [kind, str(getattr(value, "dtype", "")), looks(value.tolist(), depth - 1)]
    attributes = [*getattr(value, "__dict__", ()), *_slots(value)]
    return [kind, *([name, looks(getattr(value, name), depth - 1)] for name in attributes)]


def _slots(value: Any) -> list[str]:
    names = [getattr(kind, "__slots__", ()) for kind in type(value).__mro__]
    each = [name for some in names for name in ((some,) if isinstance(some, str) else some)]
    return [name for name in each if not name.startswith("__") and hasattr(value, name)]
