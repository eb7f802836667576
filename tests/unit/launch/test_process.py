"""Settings of the process: what the garbage collector looks at while steps are taken."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from redline.launch.process import sparing_what_is_there
from redline.telemetry import Recorder, recording


class Node:
    """One that can be part of a cycle."""

    other: Node | None = None


def cycle() -> weakref.ref[Node]:
    first, second = Node(), Node()
    first.other, second.other = second, first
    return weakref.ref(first)


@pytest.fixture(autouse=True)
def _thawed() -> Iterator[None]:
    """The tests' own process is frozen (`conftest.py`)."""
    count = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if count:
        gc.freeze()


def test_what_was_there_is_not_looked_at_and_what_comes_is() -> None:
    before = len(gc.get_objects())
    kept = [Node() for _ in range(1000)]
    with sparing_what_is_there():
        assert gc.get_freeze_count() > 1000
        assert len(gc.get_objects()) < before
        new = cycle()
        gc.collect()
        assert new() is None
    assert gc.get_freeze_count() == 0
    assert all(node.other is None for node in kept)


def test_what_it_takes_is_setting_up() -> None:
    with recording(Recorder()) as recorder:
        with sparing_what_is_there():
            pass
        assert recorder.step_mark()["run.setup"] > 0


def test_garbage_from_before_is_not_kept() -> None:
    old = cycle()
    with sparing_what_is_there():
        assert old() is None


def test_the_collector_is_as_before_after_an_error() -> None:
    with pytest.raises(KeyboardInterrupt), sparing_what_is_there():
        raise KeyboardInterrupt
    assert gc.get_freeze_count() == 0


def test_what_a_caller_has_frozen_stays_as_it_is() -> None:
    gc.freeze()
    count = gc.get_freeze_count()
    kept = [Node() for _ in range(1000)]
    with sparing_what_is_there():
        assert gc.get_freeze_count() <= count
    assert 0 < gc.get_freeze_count() <= count
    assert len(kept) == 1000
