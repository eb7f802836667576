from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from redline.lab.traces.intervals import Intervals, any_of, both

INTERVALS = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def made(pairs: list[tuple[int, int]]) -> Intervals:
    start, end = (np.array([pair[side] for pair in pairs], np.int64) for side in (0, 1))
    return Intervals.union(start, end)


def moments(pairs: list[tuple[int, int]]) -> set[int]:
    return {moment for start, end in pairs for moment in range(start, end)}


@given(INTERVALS, INTERVALS)
def test_sets_of_moments_are_what_counting_them_gives(a: list[tuple[int, int]], b: list[tuple[int, int]]) -> None:
    one, other = made(a), made(b)
    assert moments(list(one)) == moments(a)
    assert one.total == len(moments(a))
    assert moments(list(both(one, other))) == moments(a) & moments(b)
    assert moments(list(one.without(other))) == moments(a) - moments(b)
    assert moments(list(any_of([one, other]))) == moments(a) | moments(b)
    assert moments(list(one.outside(10, 40))) == set(range(10, 40)) - moments(a)


@given(INTERVALS)
def test_intervals_of_a_set_do_not_touch(pairs: list[tuple[int, int]]) -> None:
    found = made(pairs)
    assert (found.start[1:] > found.end[:-1]).all()
