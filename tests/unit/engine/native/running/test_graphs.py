"""The cache of captured steps over a device with so much memory, and no GPU."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import pytest
import torch

from redline.engine.native.running import graphs
from redline.engine.native.running.graphs import GraphCache, nothing_collected


@dataclass
class Device:
    """Each graph takes one unit of its memory."""

    memory: int
    captures: list[str] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    num_released: int = 0

    def capture(self, key: str) -> FakeGraph:
        self.captures.append(key)
        if len(self.held) >= self.memory:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.held.add(key)
        return FakeGraph(key, self)

    def release(self) -> None:
        self.num_released += 1

    def cache(self, max_graphs: int = 100) -> OfDevice:
        return OfDevice(GraphCache(max_graphs), self)


@dataclass
class OfDevice:
    graphs: GraphCache[str, FakeGraph]
    device: Device

    def get(self, key: str) -> FakeGraph | None:
        return self.graphs.get(key, self.device)


@dataclass
class FakeGraph:
    key: str
    device: Device

    def reset(self) -> None:
        self.device.held.remove(self.key)


def test_a_graph_is_captured_once() -> None:
    device = Device(10)
    cache = device.cache()
    assert [cache.get(key).key for key in "abab"] == list("abab")  # type: ignore[union-attr]
    assert device.captures == ["a", "b"]


def test_the_one_not_used_for_longest_makes_room_and_gives_its_memory_back() -> None:
    device = Device(10)
    cache = device.cache(max_graphs=2)
    for key in "abac":
        cache.get(key)
    assert device.held == {"a", "c"}
    assert (len(cache.graphs), cache.graphs.evictions) == (2, 1)


def test_however_many_flavours_are_asked_for_the_memory_is_bounded() -> None:
    device = Device(1000)
    cache = device.cache(max_graphs=8)
    for number in range(500):
        assert cache.get(str(number)) is not None
        assert len(device.held) <= 8


def test_running_out_of_memory_frees_the_others_and_tries_again() -> None:
    device = Device(memory=2)
    cache = device.cache()
    assert all(cache.get(key) for key in "abc")
    assert device.held == {"c"}
    assert device.captures == ["a", "b", "c", "c"]
    assert device.num_released > 0, "memory that nobody holds went back to the device"


def test_where_there_is_no_memory_at_all_the_step_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "RETRY_AFTER", 3)
    device = Device(memory=0)
    cache = device.cache()
    assert [cache.get("a") for _ in range(4)] == [None] * 4
    assert device.captures == ["a", "a"], "it is not tried at every step"
    device.memory = 1
    assert cache.get("a") is not None, "but now and then"


def test_another_error_of_a_capture_is_not_hidden() -> None:
    class Broken(Device):
        def capture(self, key: str) -> FakeGraph:
            raise RuntimeError("CUDA error: device-side assert triggered")

    with pytest.raises(RuntimeError, match="assert"):
        Broken(1).cache().get("a")


def test_garbage_waits_until_a_capture_is_over() -> None:
    class Circle:
        def __init__(self) -> None:
            self.me = self

    thresholds = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with nothing_collected():
            gone = weakref.ref(Circle())
            assert len([Circle() for _ in range(10)]) == 10
            assert gone() is not None
        made = [Circle() for _ in range(10)]
        assert gone() is None, "and it is collected after that, as before"
        assert made
    finally:
        gc.set_threshold(*thresholds)


def test_a_collector_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with nothing_collected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
