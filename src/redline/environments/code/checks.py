"""Tests of a program: what they are in a task, and when an output or a value is the expected one. All of it happens in our
process, on data; nothing of the program is called here."""

from __future__ import annotations

import ast
import builtins
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redline.environments.code.inside.values import Members, Pairs
from redline.errors import TaskError

HINT = (
    'write a list of {"stdin": "1 2", "stdout": "3"}, {"call": "add(1, 2)", "returns": 3}, or "assert add(1, 2) == 3"; '
    "docs/code.md has the rest"
)
_CLOSE = 1e-9
_CLOSE_TO_ZERO = 1e-12
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
    """A set, or `Members`, is met in any order; a list in its own alone."""


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
        found = _paired(found["inputs"], found["outputs"], where)
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
    """Whether a value that came out of a program is the expected one, which may come from JSON: a tuple is like a list, an
    expected set like a list in any order, and a mapping whose expected keys are all texts has its keys compared as JSON writes
    them. An expected int is met by that very number alone, a float by what is within 1e-9 of it, relative to its size. True is
    not 1. Only what is expected decides how it is compared: a program that returns a set for a list is wrong."""
    if isinstance(value, bool) or isinstance(expected, bool) or value is None or expected is None:
        return value is expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return _same_number(value, expected)
    if isinstance(expected, dict | Pairs):
        return isinstance(value, dict | Pairs) and _same_members(*_pairs(value, expected))
    if isinstance(expected, _SETS):
        return (
            isinstance(value, list | tuple | set | frozenset)
            and not isinstance(value, Pairs)
            and _same_members(value, expected)
        )
    if isinstance(value, Pairs | _SETS):
        return False
    if isinstance(value, list | tuple) and isinstance(expected, list | tuple):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    return type(value) is type(expected) and bool(value == expected)


def _paired(inputs: Any, outputs: Any, where: str) -> list[dict[str, Any]]:
    if not all(isinstance(side, list | tuple) for side in (inputs, outputs)):
        raise TaskError(f"{where}: inputs and outputs are not two lists", HINT)
    if len(inputs) != len(outputs):
        raise TaskError(f"{where}: {len(inputs)} inputs and {len(outputs)} outputs", "give each input one output")
    return [{"stdin": given, "stdout": expected} for given, expected in zip(inputs, outputs, strict=True)]


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
            return Call(row["call"], _expected(row, where))
        if isinstance(row.get("assert"), str):
            return _read_assert(row["assert"], where)
    raise TaskError(f"{where}: {json.dumps(row, default=str)[:80]}: no kind of test", HINT)


def _expected(row: Mapping[str, Any], where: str) -> Any:
    in_any_order, returns = row.get("any_order", False), row["returns"]
    if not isinstance(in_any_order, bool) or (in_any_order and not isinstance(returns, list | tuple | set | frozenset)):
        raise TaskError(f"{where}.any_order = {in_any_order!r}: needs true or false, and a list to return", HINT)
    return Members(returns) if in_any_order else returns


def _read_assert(text: str, where: str) -> Test:
    """`assert CALL == LITERAL` is a call whose value is compared here, where the program is not."""
    tree = _parsed(text, where, "exec")
    match tree.body:
        case [ast.Assert(test=ast.Compare(left=ast.Call() as left, ops=[ast.Eq()], comparators=[right]))]:
            try:
                expected = ast.literal_eval(right)
                return Call(ast.unparse(left), expected) if _is_plain_call(left) else Assert(text)
            except ValueError:
                return Assert(text)
            except (TypeError, MemoryError, RecursionError) as error:
                raise TaskError(f"{where} = {text[:80]!r}: not a value: {error}", HINT) from error
    return Assert(text)


def _is_plain_call(call: ast.Call) -> bool:
    """Whether a call is `name(LITERALS)` or `Class(LITERALS).name(LITERALS)`, with names that the program has to define. All
    else would run in the program's process, with builtins and methods that the program can replace. Raises ValueError for
    arguments that are no literals, and TypeError for literals that are no values."""
    for argument in (*call.args, *(named.value for named in call.keywords)):
        ast.literal_eval(argument)
    match call.func:
        case ast.Name(id=name):
            return not hasattr(builtins, name)
        case ast.Attribute(value=ast.Call(func=ast.Name(id=name)) as made) if name[0].isupper():
            return _is_plain_call(made)
    return False


def _parsed(text: str, where: str, mode: str) -> Any:
    try:
        return ast.parse(text.strip() if mode == "eval" else text, mode=mode)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise TaskError(f"{where} = {text[:80]!r}: not Python: {error}", HINT) from error


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def _same_number(value: float, expected: float) -> bool:
    if isinstance(expected, int):
        return value == expected  # Python compares an int and a float exactly
    try:
        if math.isnan(expected):
            return math.isnan(value)
        return math.isclose(value, expected, rel_tol=_CLOSE, abs_tol=0.0 if expected else _CLOSE_TO_ZERO)
    except OverflowError:  # an int that no float can hold
        return False


def _pairs(value: Any, expected: Any) -> tuple[list[Any], list[Any]]:
    """Keys and values of two mappings; the program's keys are never hashed. Keys of JSON are texts, whatever they were."""
    mine, theirs = (list(side.items()) if isinstance(side, dict) else list(side) for side in (value, expected))
    if all(isinstance(key, str) for key, _ in theirs):
        mine = [(_key_text(key), one) for key, one in mine]
    return mine, theirs


def _key_text(key: Any) -> str:
    return key if isinstance(key, str) else json.dumps(key, default=repr)


def _same_members(value: Any, expected: Any) -> bool:
    if len(value) != len(expected):
        return False
    mine, theirs = (
        sorted(side, key=lambda one: (_place(one, _coarse), _place(one, lambda number: number))) for side in (value, expected)
    )
    return all(map(same_value, mine, theirs))


def _place(one: Any, number: Callable[[Any], Any]) -> tuple[Any, ...]:
    """Where a value stands among others of any type."""
    if one is None or isinstance(one, bool) or (isinstance(one, float) and math.isnan(one)):
        return (0, repr(one))
    if isinstance(one, int | float):
        return (1, number(one))
    if isinstance(one, str):
        return (2, one)
    if isinstance(one, dict | Pairs):
        pairs = one.items() if isinstance(one, dict) else one
        return (3, *sorted((_key_text(key), _place(value, number)) for key, value in pairs))
    if isinstance(one, _SETS):
        return (4, *sorted(_place(member, number) for member in one))
    if isinstance(one, list | tuple):
        return (4, *(_place(member, number) for member in one))
    return (5, repr(one))


def _coarse(number: float) -> float:
    """The same for floats that differ by rounding errors. The factor keeps round numbers away from where the rounding turns."""
    try:
        return float(f"{number * 0.7390851332151607:.6g}")
    except OverflowError:
        return math.inf if number > 0 else -math.inf
