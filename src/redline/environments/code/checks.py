"""Tests of a program: what they are in a task, and when an output or a value is the expected one. All of it happens in our
process, on data; nothing of the program is called here."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redline.environments.code.inside.values import Members, Pairs
from redline.errors import TaskError

HINT = (
    'write a list of {"stdin": "1 2", "stdout": "3"}, {"call": "add(1, 2)", "returns": 3}, or "assert add(1, 2) == 3"; '
    "docs/code.md has the rest"
)
_CLOSE = 1e-9
_SETS = set | frozenset | Members


@dataclass(slots=True, frozen=True)
class Example:
    """What the program prints for an input."""

    stdin: str
    stdout: str


@dataclass(slots=True, frozen=True)
class Call:
    """What an expression with the program's functions is worth."""

    call: str
    returns: Any


@dataclass(slots=True, frozen=True)
class Assert:
    """Python that fails where the program is wrong. It runs in a process of its own; the program's functions are called in
    another, and plain data goes between the two."""

    text: str


Test = Example | Call | Assert


def read_tests(found: Any, where: str) -> list[Test]:
    """The tests of a task, which are all of one kind. Raises TaskError with what is wrong with them."""
    if isinstance(found, str):
        found = _from_text(found)
    if isinstance(found, Mapping) and found.keys() >= {"inputs", "outputs"}:
        pairs = zip(found["inputs"], found["outputs"], strict=False)
        found = [{"stdin": given, "stdout": expected} for given, expected in pairs]
    if not isinstance(found, Sequence) or isinstance(found, str) or not found:
        raise TaskError(f"{where}: no list of tests", HINT)
    tests = [_read_test(one, f"{where}[{index}]") for index, one in enumerate(found)]
    if len({isinstance(test, Example) for test in tests}) > 1:
        raise TaskError(f"{where}: inputs for a whole program beside calls of its functions", "write tests of one kind")
    return tests


def same_output(printed: str, expected: str) -> bool:
    """Whether the lines are the same; spaces at the end of a line, and empty lines at the end of all, do not count."""
    return _lines(printed) == _lines(expected)


def same_value(value: Any, expected: Any) -> bool:
    """Whether a value that came out of a program is the expected one, which may come from JSON: a tuple is like a list, a set
    like a list in any order, keys of mappings compare as JSON writes them, and floats within 1e-9 of each other are the same.
    True is not 1."""
    if isinstance(value, bool) or isinstance(expected, bool) or value is None or expected is None:
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return _same_number(value, expected)
    if isinstance(value, dict | Pairs) and isinstance(expected, dict | Pairs):
        mine, theirs = _text_keys(value), _text_keys(expected)
        return mine.keys() == theirs.keys() and all(same_value(mine[key], theirs[key]) for key in mine)
    if isinstance(value, _SETS) or isinstance(expected, _SETS):
        return _same_members(value, expected)
    if isinstance(value, Pairs):
        return False
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    return type(value) is type(expected) and bool(value == expected)


def _from_text(text: str) -> Any:
    """Tables keep lists as JSON; what is none is Python to run."""
    try:
        return json.loads(text)
    except ValueError:
        return [text] if text.strip() else []


def _read_test(row: Any, where: str) -> Test:
    if isinstance(row, str):
        return _read_assert(row, where)
    if isinstance(row, Mapping):
        if isinstance(row.get("stdin"), str) and isinstance(row.get("stdout"), str):
            return Example(row["stdin"], row["stdout"])
        if isinstance(row.get("call"), str) and "returns" in row:
            _parsed(row["call"], f"{where}.call", "eval")
            return Call(row["call"], row["returns"])
        if isinstance(row.get("assert"), str):
            return _read_assert(row["assert"], where)
    raise TaskError(f"{where}: {json.dumps(row, default=str)[:80]}: no kind of test", HINT)


def _read_assert(text: str, where: str) -> Test:
    """`assert CALL == LITERAL` is a call whose value is compared here, where the program is not."""
    tree = _parsed(text, where, "exec")
    match tree.body:
        case [ast.Assert(test=ast.Compare(left=ast.Call() as left, ops=[ast.Eq()], comparators=[right]))]:
            try:
                return Call(ast.unparse(left), ast.literal_eval(right))
            except ValueError:
                return Assert(text)
    return Assert(text)


def _parsed(text: str, where: str, mode: str) -> Any:
    try:
        return ast.parse(text.strip() if mode == "eval" else text, mode=mode)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise TaskError(f"{where} = {text[:80]!r}: not Python: {error}", HINT) from error


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_number(one: float, other: float) -> bool:
    if isinstance(one, int) and isinstance(other, int):
        return one == other
    try:
        return math.isclose(one, other, rel_tol=_CLOSE, abs_tol=_CLOSE) or (math.isnan(one) and math.isnan(other))
    except OverflowError:  # an int that no float can hold
        return False


def _text_keys(mapping: Mapping[Any, Any] | Pairs) -> dict[str, Any]:
    """Keys as texts: those of a program are never hashed as numbers."""
    pairs = mapping.items() if isinstance(mapping, Mapping) else mapping
    return {key if isinstance(key, str) else json.dumps(key, default=repr): value for key, value in pairs}


def _same_members(one: Any, other: Any) -> bool:
    if not all(isinstance(side, list | tuple | set | frozenset) and not isinstance(side, Pairs) for side in (one, other)):
        return False
    return len(one) == len(other) and sorted(map(repr, one)) == sorted(map(repr, other))
