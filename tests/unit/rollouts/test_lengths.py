from __future__ import annotations

from redline.rollouts.lengths import ExpectedLengths


def test_a_task_is_expected_to_be_as_long_as_the_last_attempts_at_it() -> None:
    lengths = ExpectedLengths()
    assert (lengths.of("a"), lengths.mean) == (None, 0.0)
    lengths.learn("a", [10, 20])
    lengths.learn("b", [60])
    assert (lengths.of("a"), lengths.of("b"), lengths.mean) == (15.0, 60.0, 30.0)
    lengths.learn("a", [4, 6])
    assert (lengths.of("a"), lengths.mean) == (5.0, 70 / 3)


def test_attempts_that_sampled_nothing_tell_nothing() -> None:
    lengths = ExpectedLengths()
    lengths.learn("a", [0, 8, 0])
    lengths.learn("b", [0, 0])
    assert (lengths.of("a"), lengths.of("b")) == (8.0, None)


def test_longer_ones_come_first_among_those_of_a_version_and_new_ones_are_of_average_length() -> None:
    lengths = ExpectedLengths()
    lengths.learn("short", [2])
    lengths.learn("long", [20])
    ordered = sorted(["short", "new", "long", "newer"], key=lambda task: lengths.order(task, 3))
    assert ordered == ["long", "new", "newer", "short"]
    assert lengths.order("short", 2) < lengths.order("long", 3)


def test_what_is_remembered_is_bounded_and_follows_from_the_last_groups_alone() -> None:
    lengths, fresh = ExpectedLengths(max_groups=3), ExpectedLengths(max_groups=3)
    groups = [("a", [1]), ("b", [2]), ("a", [3]), ("c", [4]), ("d", [5])]
    for task, found in groups:
        lengths.learn(task, found)
    for task, found in groups[-3:]:
        fresh.learn(task, found)
    assert [lengths.of(task) for task in "abcd"] == [3.0, None, 4.0, 5.0]
    assert [fresh.of(task) for task in "abcd"] == [lengths.of(task) for task in "abcd"]
    assert fresh.mean == lengths.mean == 4.0
