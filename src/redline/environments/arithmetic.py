"""Arithmetic that is safe to run on what a model wrote: numbers, + - * / // % **, brackets, and nothing else."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

LONGEST = 200
"""Characters of an expression."""
MOST_BITS = 1000
"""Bits of a whole number on the way: powers of powers would fill the memory, and a float holds up to 1024."""
OPERATORS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


class ArithmeticMistakeError(ValueError):
    """An expression has no value; the message says why, in words that can be shown to the policy."""


def evaluate(expression: str) -> float:
    """The value of an expression: an int where it is whole. Raises ArithmeticMistakeError."""
    text = expression.strip().replace("×", "*").replace("÷", "/").replace("−", "-").replace("^", "**")
    if len(text) > LONGEST:
        raise ArithmeticMistakeError(f"an expression has {LONGEST} characters at most")
    try:
        value = _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, ArithmeticMistakeError):
            raise
        raise ArithmeticMistakeError(f"{expression.strip()[:40]!r} is not arithmetic") from None
    except ZeroDivisionError:
        raise ArithmeticMistakeError("division by zero") from None
    except OverflowError:
        raise ArithmeticMistakeError("the value is too large") from None
    if not math.isfinite(value):
        raise ArithmeticMistakeError("the value is too large")
    return int(value) if abs(value) < 2**53 and value % 1 == 0 else value


def shown(value: float) -> str:
    """A value as a person writes it: 7, 0.333333."""
    return str(value) if isinstance(value, int) else f"{value:.6g}"


def _value(node: ast.expr) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _refuse_large_power(left, right)
        value = OPERATORS[type(node.op)](left, right)
        if isinstance(value, complex) or (isinstance(value, int) and value.bit_length() > MOST_BITS):
            raise ArithmeticMistakeError("the value is too large" if isinstance(value, int) else "the value is no real number")
        return value
    raise ArithmeticMistakeError("only numbers, + - * / // % ** and brackets can be calculated")


def _refuse_large_power(base: float, exponent: float) -> None:
    if isinstance(base, int) and abs(base) > 1 and abs(exponent) * base.bit_length() > MOST_BITS:
        raise ArithmeticMistakeError("the value is too large")
