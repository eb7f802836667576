"""Problems about lists of integers."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate, pairwise
from random import Random

from redline.environments.code.problems.family import Family, Function, lists

LIST = "list of integers `xs`"


def sum_above(draw: Random) -> Function:
    k = draw.randint(-20, 20)
    does = f"returns the sum of those elements of the {LIST} that are greater than {k}"
    return Function("sum_above(xs)", does, lambda xs: sum(x for x in xs if x > k), [([],), *lists(draw)])


def count_multiples(draw: Random) -> Function:
    k = draw.randint(2, 9)
    does = f"returns how many elements of the {LIST} are multiples of {k}"
    return Function("count_multiples(xs)", does, lambda xs: sum(x % k == 0 for x in xs), lists(draw))


def scale(draw: Random) -> Function:
    k, m = draw.randint(2, 9), draw.randint(1, 20)
    does = f"returns a list with each element of the {LIST} times {k}, minus {m}"
    return Function("scale(xs)", does, lambda xs: [k * x - m for x in xs], [([],), *lists(draw)])


def rotate(draw: Random) -> Function:
    k = draw.randint(1, 5)
    does = f"returns the {LIST} rotated to the left by {k} places; the list may be shorter than that, but is not empty"
    return Function("rotate(xs)", does, lambda xs: xs[k % len(xs) :] + xs[: k % len(xs)], lists(draw))


def every_kth(draw: Random) -> Function:
    k, start = draw.randint(2, 4), draw.randint(0, 2)
    does = f"returns every {_nth(k)} element of the {LIST}, beginning with the one at index {start}"
    return Function("every(xs)", does, lambda xs: xs[start::k], lists(draw))


def kth_largest(draw: Random) -> Function:
    k = draw.randint(1, 5)
    does = f"returns the {_nth(k)} largest of the distinct elements of the {LIST}, or None where there are fewer"
    return Function("largest(xs)", does, lambda xs: dict(enumerate(sorted(set(xs), reverse=True))).get(k - 1), lists(draw))


def running_total(draw: Random) -> Function:
    start = draw.randint(-20, 20)
    does = f"returns the running totals of the {LIST}: as many as it has elements, each the sum so far plus {start}"
    return Function("totals(xs)", does, lambda xs: [start + x for x in accumulate(xs)], [([],), *lists(draw)])


def differences(draw: Random) -> Function:
    k = draw.randint(2, 9)
    does = f"returns the differences between neighbours in the {LIST}, later minus earlier, each times {k}"
    return Function("differences(xs)", does, lambda xs: [k * (b - a) for a, b in pairwise(xs)], [([1],), *lists(draw)])


def without_duplicates(draw: Random) -> Function:
    k = draw.randint(2, 5)
    does = f"returns the {LIST} without elements that have the same remainder modulo {k} as an earlier element"
    return Function("distinct(xs)", does, lambda xs: _first(xs, k), lists(draw))


def most_common(draw: Random) -> Function:
    k = draw.randint(2, 6)
    does = f"returns the remainder modulo {k} that is most frequent among the elements of the {LIST}; the smallest of several"
    return Function(
        "frequent(xs)", does, lambda xs: min(Counter(x % k for x in xs).items(), key=lambda p: (-p[1], p[0]))[0], lists(draw)
    )


def has_pair(draw: Random) -> Function:
    k = draw.randint(-10, 30)
    does = f"returns True where two elements at different places of the {LIST} have the sum {k}, and False otherwise"
    inputs = [*lists(draw, least=2), ([k - 3, 1, 3],), ([],)]
    return Function("has_pair(xs)", does, lambda xs: any(x + y == k for i, x in enumerate(xs) for y in xs[:i]), inputs)


def chunks(draw: Random) -> Function:
    k = draw.randint(2, 4)
    does = f"cuts the {LIST} into lists of {k} elements, the last of which may be shorter, and returns these in a list"
    return Function("chunks(xs)", does, lambda xs: [xs[i : i + k] for i in range(0, len(xs), k)], [([],), *lists(draw)])


def sort_by_distance(draw: Random) -> Function:
    k = draw.randint(-20, 20)
    does = f"returns the {LIST} sorted by distance from {k}, nearest first; of two equally near, the smaller first"
    return Function("nearest(xs)", does, lambda xs: sorted(xs, key=lambda x: (abs(x - k), x)), lists(draw))


def longest_run(draw: Random) -> Function:
    k = draw.randint(-10, 20)
    does = f"returns the length of the longest run of neighbours in the {LIST} that are all at least {k}"
    return Function("longest_run(xs)", does, lambda xs: _longest_run(xs, k), [([],), *lists(draw)])


def windows(draw: Random) -> Function:
    k = draw.randint(2, 4)
    does = f"returns the greatest sum of {k} neighbours in the {LIST}, or None where it has fewer than {k} elements"
    inputs = [([1],), *lists(draw, least=4)]
    return Function(
        "best_window(xs)", does, lambda xs: max((sum(xs[i : i + k]) for i in range(len(xs) - k + 1)), default=None), inputs
    )


def partition(draw: Random) -> Function:
    k = draw.randint(-20, 20)
    does = f"returns the elements of the {LIST} that are below {k}, then the others, both in the order they had"
    return Function("split(xs)", does, lambda xs: [x for x in xs if x < k] + [x for x in xs if x >= k], lists(draw))


def _first(xs: list[int], k: int) -> list[int]:
    seen: dict[int, int] = {}
    for x in xs:
        seen.setdefault(x % k, x)
    return list(seen.values())


def _longest_run(xs: list[int], k: int) -> int:
    best = now = 0
    for x in xs:
        now = now + 1 if x >= k else 0
        best = max(best, now)
    return best


def _nth(k: int) -> str:
    return {1: "1st", 2: "2nd", 3: "3rd"}.get(k, f"{k}th")


FAMILIES: list[Family] = [
    sum_above, count_multiples, scale, rotate, every_kth, kth_largest, running_total, differences, without_duplicates,
    most_common, has_pair, chunks, sort_by_distance, longest_run, windows, partition,
]  # fmt: skip
