"""Problems about single numbers."""

from __future__ import annotations

import math
from random import Random

from redline.environments.code.problems.family import Family, Function


def linear(draw: Random) -> Function:
    a, b = draw.randint(2, 20), draw.randint(1, 99)
    return Function("linear(x)", f"returns {a} times x plus {b}", lambda x: a * x + b, _singles(draw))


def clamp(draw: Random) -> Function:
    low = draw.randint(-30, 0)
    high = low + draw.randint(5, 60)
    does = f"returns x, but {low} where x is below {low} and {high} where it is above {high}"
    return Function("clamp(x)", does, lambda x: max(low, min(high, x)), [*_singles(draw), (low - 1,), (high + 1,)])


def digit_sum(draw: Random) -> Function:
    k = draw.randint(2, 9)
    does = f"returns the sum of the decimal digits of the non-negative integer n, times {k}"
    return Function("digit_sum(n)", does, lambda n: k * sum(map(int, str(n))), [(0,), *_singles(draw, 0, 99_999)])


def count_divisible(draw: Random) -> Function:
    k = draw.randint(2, 12)
    does = f"returns how many integers from 1 to n are divisible by {k}"
    return Function("count_divisible(n)", does, lambda n: max(0, n) // k, [(0,), *_singles(draw, 1, 500)])


def power_mod(draw: Random) -> Function:
    m = draw.randint(7, 997)
    inputs = [(draw.randint(0, 99), draw.randint(0, 30)) for _ in range(6)]
    return Function("power_mod(a, n)", f"returns a to the power n, modulo {m}", lambda a, n: pow(a, n, m), inputs)


def is_prime(draw: Random) -> Function:
    k = draw.randint(1, 40)
    does = f"returns True where n + {k} is a prime number, and False otherwise"
    return Function("is_prime(n)", does, lambda n: _is_prime(n + k), _singles(draw, 0, 200))


def fibonacci(draw: Random) -> Function:
    a, b = draw.randint(0, 5), draw.randint(1, 9)
    does = f"returns element n, counted from 0, of the sequence {a}, {b}, … in which each is the sum of the two before it"
    return Function("element(n)", does, lambda n: _fibonacci(a, b, n), [(0,), (1,), *_singles(draw, 2, 40)])


def collatz(draw: Random) -> Function:
    k = draw.choice((3, 5, 7))
    does = (
        f"starts at n and makes {k * 4} moves, each of which halves an even number and turns an odd number x into {k} * x + 1; "
        "it returns where it arrives"
    )
    return Function("walk(n)", does, lambda n: _walk(n, k), _singles(draw, 1, 99))


def to_base(draw: Random) -> Function:
    base = draw.randint(2, 9)
    does = f"returns the non-negative integer n written in base {base}, as a string without leading zeros"
    return Function("to_base(n)", does, lambda n: _to_base(n, base), [(0,), *_singles(draw, 1, 9_999)])


def steps_to_one(draw: Random) -> Function:
    k = draw.randint(2, 9)
    does = f"returns how often the positive integer n must be divided by {k}, without the remainder, until it is 0"
    return Function("divisions(n)", does, lambda n: _divisions(n, k), _singles(draw, 1, 99_999))


def common_divisor(draw: Random) -> Function:
    k = draw.randint(2, 30)
    does = f"returns the greatest common divisor of the positive integers a and {k} * b"
    inputs = [(draw.randint(1, 300), draw.randint(1, 300)) for _ in range(6)]
    return Function("divisor(a, b)", does, lambda a, b: math.gcd(a, k * b), inputs)


def _singles(draw: Random, low: int = -99, high: int = 99) -> list[tuple[int]]:
    return [(draw.randint(low, high),) for _ in range(6)]


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def _fibonacci(a: int, b: int, n: int) -> int:
    for _ in range(n):
        a, b = b, a + b
    return a


def _walk(n: int, k: int) -> int:
    for _ in range(k * 4):
        n = k * n + 1 if n % 2 else n // 2
    return n


def _to_base(n: int, base: int) -> str:
    digits = ""
    while n:
        n, digit = divmod(n, base)
        digits = str(digit) + digits
    return digits or "0"


def _divisions(n: int, k: int) -> int:
    count = 0
    while n:
        n, count = n // k, count + 1
    return count


FAMILIES: list[Family] = [
    linear, clamp, digit_sum, count_divisible, power_mod, is_prime, fibonacci, collatz, to_base, steps_to_one, common_divisor,
]  # fmt: skip
