"""Values as JSON can hold them, for calls between a run and its worker processes. Nothing is unpickled on either side.

Text, numbers, None, lists and dicts with text as keys are what they are. Tuples, bytes, arrays and numbers of NumPy, `Task` and
`Reaction` carry a tag. A value arrives as what it was, of the same type, or it is refused: an enum, a Counter or any other kind
of a text, number or mapping would be another value there.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from redline.errors import TaskError
from redline.types import Reaction, Task

ARRAY, BYTEARRAY, BYTES, INT, MAPPING = "$array", "$bytearray", "$bytes", "$int", "$mapping"
REACTION, SCALAR, TASK, TEXT, TUPLE = "$reaction", "$scalar", "$task", "$text", "$tuple"
DIGITS_BITS = 2_000
"""Whole numbers with more bits travel in hexadecimal digits: Python reads and writes only so many decimal ones."""


def to_plain(value: Any) -> Any:
    """The value as JSON can hold it. Raises TaskError, with its place in the value, for what cannot travel."""
    try:
        return _plain(value)
    except _TravelError as error:
        where = f": it is {place}" if (place := _place(value)) else ""
        raise TaskError(f"{error.what} cannot travel between a run and a worker process{where}", _HINT) from None
    except RecursionError:
        raise TaskError("a value that holds itself, or is nested too deep, cannot travel to a worker process", _HINT) from None


def from_plain(value: Any) -> Any:
    """The value that `to_plain` was given."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if tag in _TAGGED:
        return _TAGGED[tag](value[tag])
    return {key: from_plain(item) for key, item in value.items()}


def as_floats(score: Any) -> Any:
    """A reward, or the named parts of one, as the floats that they are read as in the run, so that a tensor or a number of any
    other kind reaches it. What is no number stays what it is."""
    if isinstance(score, Mapping):
        return {name: _as_float(part) for name, part in score.items()}
    return _as_float(score)


def _as_float(value: Any) -> Any:
    is_number = hasattr(type(value), "__float__") and math.prod(getattr(value, "shape", ())) == 1
    return float(value) if is_number else value


class _TravelError(Exception):
    """A value, or one in it, is none that can travel."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        """`a Counter`."""


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _AS_IT_IS or (kind is int and value.bit_length() <= DIGITS_BITS):
        return value
    if kind is list:
        return [_plain(item) for item in value]
    if kind is dict:
        return _plain_mapping(value)
    if kind is Task:
        return {TASK: [_plain(part) for part in _parts(value).values()]}
    if isinstance(value, Reaction):  # of one of another kind nobody reads more
        return {REACTION: [_plain(value.observation), _plain(as_floats(value.reward)), bool(value.done)]}
    if (pack := _PACKED.get(kind)) is not None:
        return pack(value)
    if (kind is np.ndarray or isinstance(value, np.generic)) and _has_known_format(value.dtype):
        tag, shape = (ARRAY, value.shape) if kind is np.ndarray else (SCALAR, ())
        return {tag: [value.dtype.str, shape, base64.b64encode(value.tobytes()).decode()]}
    raise _TravelError(f"a {kind.__name__}")


def _plain_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    for key in value:
        if type(key) is not str:
            raise _TravelError(f"a mapping with the key {key!r:.60}")
    plain = {key: _plain(item) for key, item in value.items()}
    return {MAPPING: plain} if next(iter(plain), "") in _TAGGED else plain


def _has_known_format(dtype: np.dtype[Any]) -> bool:
    """Whether it means the same on every machine: a long double does not."""
    return dtype.kind in "biufc" and dtype.itemsize <= (16 if dtype.kind == "c" else 8)


def _array(dtype: str, shape: list[int], data: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(base64.b64decode(data)), dtype).reshape(shape)


_AS_IT_IS = frozenset((type(None), str, bool, float))
_PACKED: Mapping[type, Callable[[Any], dict[str, Any]]] = {
    bytearray: lambda value: {BYTEARRAY: base64.b64encode(value).decode()},
    bytes: lambda value: {BYTES: base64.b64encode(value).decode()},
    int: lambda value: {INT: hex(value)},
    np.str_: lambda value: {TEXT: str(value)},
    tuple: lambda value: {TUPLE: [_plain(item) for item in value]},
}
_TAGGED: Mapping[str, Callable[[Any], Any]] = {
    ARRAY: lambda fields: _array(*fields),
    BYTEARRAY: lambda text: bytearray(base64.b64decode(text)),
    BYTES: lambda text: base64.b64decode(text),
    INT: lambda digits: int(digits, 16),
    MAPPING: lambda items: {key: from_plain(item) for key, item in items.items()},
    REACTION: lambda fields: Reaction(from_plain(fields[0]), from_plain(fields[1]), fields[2]),
    SCALAR: lambda fields: _array(*fields)[()],
    TASK: lambda fields: Task(*map(from_plain, fields)),
    TEXT: lambda text: np.str_(text),
    TUPLE: lambda items: tuple(from_plain(item) for item in items),
}

# ── what cannot ────────────────────────────────────────────────────────────────────────────────────────────────────────

_HINT = (
    "use text, numbers, bytes, lists, tuples, arrays and dicts with text as keys (of an enum its value), or set"
    " rollouts.environment.run_in=threads, and for rewards rollouts.reward_run_in=threads"
)


def _place(value: Any) -> str:
    """Where in a value the first thing is that cannot travel: `data['kind']`; empty where it is the value itself."""
    for name, part in _named_parts(value):
        try:
            _plain(part)
        except _TravelError:
            return name + _place(part)
    return ""


def _named_parts(value: Any) -> list[tuple[str, Any]]:
    if type(value) is Task:
        return list(_parts(value).items())
    if isinstance(value, Reaction):
        return [("observation", value.observation), ("reward", as_floats(value.reward))]
    if type(value) is dict:
        return [(f"[{key!r:.60}]", part) for key, part in value.items()]
    return [(f"[{index}]", part) for index, part in enumerate(value)] if type(value) in (list, tuple) else []


def _parts(task: Task) -> dict[str, Any]:
    return {"id": task.id, "messages": task.messages, "answer": task.answer, "data": task.data}
