from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redline.buffer.admission import most_at_once, must_wait, num_urgent, room
from redline.buffer.selection import choose
from redline.buffer.store.group_store import GroupInfo
from redline.config.sections.buffer import GroupOrder
from redline.types import VersionSpan

# ── how many may be begun ──────────────────────────────────────────────────────────────────────────────────────────────


def test_lockstep_begins_one_batch_at_a_time() -> None:
    assert room(0, target=100, max_lag=0, groups_per_step=8) == 8
    assert room(3, target=100, max_lag=0, groups_per_step=8) == 5
    assert room(8, target=100, max_lag=0, groups_per_step=8) == 0


def test_the_target_is_kept_between_one_batch_and_the_lag_budget() -> None:
    assert [room(0, target, max_lag=2, groups_per_step=4) for target in (0, 4, 7, 12, 99)] == [4, 4, 7, 12, 12]


def test_no_more_are_begun_than_the_steps_that_are_left_train_on() -> None:
    assert [room(0, target=12, max_lag=2, groups_per_step=4, steps_left=left) for left in (9, 3, 2, 1, 0)] == [12, 12, 8, 4, 0]
    assert room(6, target=12, max_lag=2, groups_per_step=4, steps_left=1) == 0


def test_a_batch_waits_for_groups_under_way_that_have_no_slack_left() -> None:
    assert must_wait([4], version=6, max_lag=2, groups_per_step=3)
    assert not must_wait([5, 5, 6], version=6, max_lag=2, groups_per_step=3)
    assert not must_wait([], version=6, max_lag=2, groups_per_step=3)


def test_a_batch_waits_for_groups_under_way_that_the_later_batches_have_no_place_for() -> None:
    """All four have slack for one more batch, which takes three."""
    assert must_wait([5, 5, 5, 5], version=6, max_lag=2, groups_per_step=3)
    assert not must_wait([5, 5, 5, 6, 6, 6], version=6, max_lag=2, groups_per_step=3)


def test_more_than_the_target_is_no_reason_to_take_groups_back() -> None:
    assert room(10, target=4, max_lag=2, groups_per_step=4) == 0


@given(
    oldest=st.lists(st.integers(0, 4), max_size=30),
    max_lag=st.integers(0, 4),
    size=st.integers(1, 5),
)
def test_places_for_the_oldest_save_every_group_that_can_be_saved(oldest: list[int], max_lag: int, size: int) -> None:
    """Nobody else comes, and each batch gives the places it must, to the oldest: then as many are trained as if all places
    always went to the oldest, which is the best that can be done."""

    def trained(places_at: dict[int, int]) -> int:
        waiting, count = sorted(v for v in oldest if v + max_lag >= 4), 0
        for version in range(4, 4 + max_lag + 1):
            waiting = [v for v in waiting if v + max_lag >= version]
            due = num_urgent(waiting, version, max_lag, size)
            taken = places_at.get(version, due)
            count += len(waiting[:taken])
            waiting = waiting[taken:]
        return count

    assert trained({}) == trained(dict.fromkeys(range(100), size))


def test_groups_beyond_the_budget_take_no_place() -> None:
    assert num_urgent([0, 0, 0], version=3, max_lag=2, groups_per_step=4) == 0


# ── which make the batch ───────────────────────────────────────────────────────────────────────────────────────────────


def infos(*oldest: int, silent: tuple[int, ...] = ()) -> list[GroupInfo]:
    return [GroupInfo(i, VersionSpan(version, version), i not in silent, 0.0) for i, version in enumerate(oldest)]


def chosen(
    ready: list[GroupInfo],
    version: int,
    *,
    max_lag: int,
    size: int,
    order: GroupOrder = "fresh_first",
    in_flight: tuple[int, ...] = (),
    replays: tuple[GroupInfo, ...] = (),
) -> list[int] | None:
    found = choose(ready, in_flight, replays, version, max_lag, size, order)
    return None if found is None else [group.index for group in found]


def test_lockstep_takes_groups_as_they_were_begun() -> None:
    assert chosen(infos(3, 3, 3, 3, silent=(0, 1))[::-1], 3, max_lag=0, size=2) == [0, 1]


@pytest.mark.parametrize(("order", "taken"), [("fresh_first", [2, 3]), ("oldest_first", [0, 1]), ("signal_first", [1, 2])])
def test_where_nothing_is_due_the_order_decides(order: GroupOrder, taken: list[int]) -> None:
    assert chosen(infos(5, 5, 6, 6, silent=(0, 3)), 6, max_lag=4, size=2, order=order) == taken


def test_among_equally_fresh_groups_one_with_signal_is_preferred() -> None:
    assert chosen(infos(6, 6, 6, silent=(0,)), 6, max_lag=4, size=2) == [1, 2]


@pytest.mark.parametrize("order", ["fresh_first", "signal_first"])
def test_a_group_at_the_end_of_its_budget_goes_first(order: GroupOrder) -> None:
    assert 0 in (chosen(infos(2, 6, 6, 6, silent=(0,)), 6, max_lag=4, size=2, order=order) or [])


def test_groups_under_way_are_left_the_places_that_they_will_need() -> None:
    """Two ready and two under way, all due by the next version: who waits now would be one too many then."""
    assert chosen(infos(3, 3, 6, 6), 6, max_lag=4, size=2) == [2, 3]
    assert chosen(infos(3, 3, 6, 6), 6, max_lag=4, size=2, in_flight=(3, 3)) == [0, 1]


def test_a_full_batch_is_never_waited_with() -> None:
    assert chosen(infos(2, 2), 6, max_lag=4, size=2, in_flight=(6, 6, 6)) == [0, 1]
    assert chosen(infos(2), 6, max_lag=4, size=2, in_flight=(6, 6, 6)) is None


def test_replays_fill_a_batch_and_displace_nobody() -> None:
    replays = tuple(GroupInfo(number, VersionSpan(5, 5), True, 0.0) for number in (10, 11))
    assert chosen(infos(6), 6, max_lag=4, size=2, replays=replays) == [0, 10]
    assert chosen(infos(6, 6), 6, max_lag=4, size=2, replays=replays) == [0, 1]


def test_replays_wait_for_groups_under_way_that_would_grow_too_old() -> None:
    replays = tuple(GroupInfo(number, VersionSpan(5, 5), True, 0.0) for number in (10, 11))
    assert chosen([], 6, max_lag=4, size=2, in_flight=(2,), replays=replays) is None
    assert chosen([], 6, max_lag=4, size=2, in_flight=(3,), replays=replays) == [10, 11]


@given(max_lag=st.integers(0, 5), size=st.integers(1, 9))
def test_the_budget_is_room_for_the_batches_up_to_the_lag(max_lag: int, size: int) -> None:
    assert most_at_once(max_lag, size) == sum(size for _ in range(max_lag + 1))
