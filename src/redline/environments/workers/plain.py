"""Values as JSON can hold them, for calls between a run and its worker processes. Nothing is unpickled on either side.

Text, numbers, None, lists and mappings with text as keys are what they are; tuples, bytes, arrays, `Task` and `Reaction` carry
a tag. A value arrives as what it was, or it is refused; only text, numbers, lists and mappings of a kind of their own arrive as
the plain ones that they are equal to.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from redline.errors import TaskError
from redline.types import Reaction, Task

ARRAY, BYTES, MAPPING, REACTION, TASK, TUPLE = "$array", "$bytes", "$mapping", "$reaction", "$task", "$tuple"


def to_plain(value: Any) -> Any:
    """The value as JSON can hold it. Raises TaskError where it cannot."""
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if type(value) is tuple:
        return {TUPLE: [to_plain(item) for item in value]}
    if isinstance(value, Mapping):
        return _plain_mapping(value)
    if isinstance(value, bytes | bytearray):
        return {BYTES: base64.b64encode(value).decode()}
    if type(value) is Task:
        return {TASK: [value.id, to_plain(value.messages), value.answer, to_plain(value.data)]}
    if isinstance(value, Reaction):
        return {REACTION: [to_plain(value.observation), to_plain(value.reward), bool(value.done)]}
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    if type(value) is np.ndarray and value.dtype.kind in "biufc":
        return {ARRAY: [value.dtype.str, value.shape, base64.b64encode(value.tobytes()).decode()]}
    raise _cannot_travel(f"a {type(value).__name__}")


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


def _plain_mapping(value: Mapping[Any, Any]) -> dict[str, Any]:
    for key in value:
        if not isinstance(key, str):
            raise _cannot_travel(f"a mapping with the key {key!r}")
    plain = {key: to_plain(item) for key, item in value.items()}
    return {MAPPING: plain} if next(iter(plain), "") in _TAGGED else plain


def _array(dtype: str, shape: list[int], data: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(bytearray(base64.b64decode(data)), dtype).reshape(shape)


_TAGGED: Mapping[str, Callable[[Any], Any]] = {
    ARRAY: lambda fields: _array(*fields),
    BYTES: lambda text: base64.b64decode(text),
    MAPPING: lambda items: {key: from_plain(item) for key, item in items.items()},
    REACTION: lambda fields: Reaction(from_plain(fields[0]), from_plain(fields[1]), fields[2]),
    TASK: lambda fields: Task(fields[0], from_plain(fields[1]), fields[2], from_plain(fields[3])),
    TUPLE: lambda items: tuple(from_plain(item) for item in items),
}


def _cannot_travel(what: str) -> TaskError:
    return TaskError(
        f"{what} cannot travel between a run and a worker process",
        "use text, numbers, bytes, lists, tuples, arrays and mappings with text as keys, or set"
        " rollouts.environment.run_in=threads, and for rewards rollouts.reward_run_in=threads",
    )
