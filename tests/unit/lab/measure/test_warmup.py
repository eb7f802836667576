from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from redline.lab.measure import warmup
from redline.lab.measure.warmup import is_steady, warm_up, warm_up_together


def test_few_runs_say_nothing() -> None:
    assert not is_steady([1.0, 1.0])
    assert is_steady([1.0, 1.0, 1.0])


def test_runs_that_each_get_faster_are_not_steady() -> None:
    assert not is_steady([1.3, 1.2, 1.1])
    assert is_steady([1.02, 1.01, 1.0]), "by less than anybody can tell"
    assert is_steady([1.2, 1.1, 1.2])


def test_a_compilation_is_not_noise() -> None:
    assert not is_steady([4.0, 1.0, 1.1])
    assert is_steady([4.0, 1.0, 1.1, 1.05])


def taking(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> Callable[[int], int]:
    """Run i takes `seconds[i]` on the clock and gives i."""
    return all_taking({"run": seconds}, monkeypatch)["run"]


def all_taking(sides: dict[str, list[float]], monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[int], int]]:
    """The same of several sides, by one clock."""
    now = 0.0
    monkeypatch.setattr(warmup.time, "perf_counter", lambda: now)

    def run(name: str, number: int) -> int:
        nonlocal now
        now += sides[name][number]
        return number

    return {name: partial(run, name) for name in sides}


def test_it_ends_with_the_first_steady_runs_and_keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    last, found = warm_up(taking([9.0, 3.0, 1.0, 1.1, 1.0, 1.0], monkeypatch), max_seconds=100)
    assert last == 4
    assert found.as_json() == {"seconds": pytest.approx([9.0, 3.0, 1.0, 1.1, 1.0]), "settled": True}


def test_what_never_settles_ends_at_the_cap_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = warm_up(taking([0.5**number for number in range(20)], monkeypatch))
    assert len(found.seconds) == warmup.MAX_RUNS
    assert not found.is_settled


def test_seconds_are_capped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    _, found = warm_up(taking([40.0, 30.0, 20.0], monkeypatch), max_seconds=60)
    assert len(found.seconds) == 2


def test_sides_that_warm_up_together_take_as_many_runs_as_the_slowest_to_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = all_taking({"early": [1.0] * 6, "late": [9.0, 3.0, 1.0, 1.1, 1.0, 1.0]}, monkeypatch)
    last, found = warm_up_together(sides, max_seconds=100)
    assert last == {"early": 4, "late": 4}
    assert [len(each.seconds) for each in found.values()] == [5, 5]
    assert all(each.is_settled for each in found.values())


def test_a_side_whose_seconds_are_up_goes_on_while_another_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    sides = all_taking({"quick": [9.0, 3.0, 1.0, 1.1, 1.0], "slow": [40.0] * 5}, monkeypatch)
    _, found = warm_up_together(sides, max_seconds=60)
    assert [len(each.seconds) for each in found.values()] == [5, 5]


def test_noise_alone_seldom_holds_it_up() -> None:
    lot = random.Random(0)
    steady = [is_steady([lot.gauss(1, 0.1) for _ in range(3)]) for _ in range(2000)]
    assert sum(steady) / len(steady) > 0.8
