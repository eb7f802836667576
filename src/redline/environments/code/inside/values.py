"""Plain data between processes: None, truth values, numbers, texts, bytes, lists, tuples, sets and mappings, and nothing else.

A value that an answer returns crosses as data and is compared elsewhere, so that no `__eq__` of the answer's is ever called.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

LONGEST = 1 << 20
"""Bytes of one message."""
DEEPEST = 100


class Members(list[Any]):
    """The members of a set, in no order."""


class Pairs(list[Any]):
    """The keys and values of a mapping."""


_KINDS: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": frozenset, "bytes": bytes.fromhex, "dict": dict}
_UNHASHED = {**_KINDS, "set": Members, "dict": Pairs}


class NotPlainError(Exception):
    """A value is no plain data."""


def pack(value: Any) -> bytes:
    """One line of JSON. Raises NotPlainError."""
    try:
        line = json.dumps(_plain(value, DEEPEST)).encode()
    except NotPlainError:
        raise
    except Exception as error:  # numbers of more digits than may be printed, lone halves of characters
        raise NotPlainError(f"{type(error).__name__}: {error}") from error
    if len(line) >= LONGEST:
        raise NotPlainError(f"the value takes more than {LONGEST:,} bytes")
    return line + b"\n"


def unpack(line: bytes, *, hashed: bool = True) -> Any:
    """The value of a line. Raises NotPlainError where it is none; calls nothing that the line could name. Without `hashed`,
    sets and mappings come as lists: numbers can be chosen so that a table of them takes hours to fill."""
    try:
        return _value(json.loads(line), DEEPEST, _KINDS if hashed else _UNHASHED)
    except NotPlainError:
        raise
    except (ValueError, TypeError, RecursionError, AttributeError) as error:
        raise NotPlainError(f"not a value: {type(error).__name__}") from error


def _plain(value: Any, depth: int) -> Any:
    """Read with the methods of the built-in types alone, also where the value's class has others."""
    if depth == 0:
        raise NotPlainError(f"nested deeper than {DEEPEST}")
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, dict):
        return {"dict": [[_plain(k, depth - 1), _plain(v, depth - 1)] for k, v in dict.items(value)]}
    if isinstance(value, tuple):
        return {"tuple": [_plain(one, depth - 1) for one in tuple.__iter__(value)]}
    if isinstance(value, list):
        return [_plain(one, depth - 1) for one in list.__iter__(value)]
    if kind in (set, frozenset):
        return {"set": [_plain(one, depth - 1) for one in value]}
    if kind in (bytes, bytearray):
        return {"bytes": value.hex()}
    raise NotPlainError(f"a value of type {kind.__name__} is no plain data")


def _value(data: Any, depth: int, kinds: dict[str, Callable[[Any], Any]]) -> Any:
    if depth == 0:
        raise NotPlainError(f"nested deeper than {DEEPEST}")
    if isinstance(data, list):
        return [_value(one, depth - 1, kinds) for one in data]
    if not isinstance(data, dict):
        return data
    ((kind, content),) = data.items()
    if kind not in _KINDS:
        raise NotPlainError(f"not a value: {kind!r}")
    if kind == "dict" and not all(isinstance(pair, list) and len(pair) == 2 for pair in content):
        raise NotPlainError("not a mapping")
    if kind == "set" and len({json.dumps(one) for one in content}) < len(content):
        raise NotPlainError("not a set: a member comes twice")
    return kinds[kind](content if kind == "bytes" else [_value(one, depth - 1, kinds) for one in content])
