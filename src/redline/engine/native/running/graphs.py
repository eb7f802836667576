"""Captured decode steps: a bounded number of them, and none where there is no memory for one.

A graph is made for each size of batch and each flavour of sampling that requests ask for. Both come from clients, so the least
recently used one makes room for the next, and running out of memory costs speed, not the engine.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

import torch

MAX_GRAPHS = 256
"""A run of one flavour needs about a hundred; each takes some megabytes of the driver's memory."""
RETRY_AFTER = 1000
"""Launches that run without a graph before its capture is tried again: memory may have been given back."""

Key = TypeVar("Key")


class Graph(Protocol):
    def reset(self) -> None:
        """Give back what it holds."""
        ...


Captured = TypeVar("Captured", bound=Graph)
KeyIn = TypeVar("KeyIn", contravariant=True)
CapturedOut = TypeVar("CapturedOut", bound=Graph, covariant=True)


class Capturing(Protocol[KeyIn, CapturedOut]):
    """Whose steps are captured."""

    def capture(self, key: KeyIn) -> CapturedOut:
        """Record a step. May raise `torch.OutOfMemoryError`."""
        ...

    def release(self) -> None:
        """Wait until no graph runs, and give memory that none holds back to the device."""
        ...


@contextmanager
def nothing_collected() -> Iterator[None]:
    """No garbage is collected meanwhile. A graph that nobody needs may be part of it, and to let go of one is forbidden to a
    thread that captures another: it makes the capture invalid."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class GraphCache(Generic[Key, Captured]):
    """Least recently used first. Knows its owner only while it is asked: an owner that nobody needs is gone at once, with
    all of its memory, instead of when the garbage collector finds the circle."""

    def __init__(self, max_graphs: int = MAX_GRAPHS) -> None:
        self._max_graphs = max_graphs
        self._graphs: OrderedDict[Key, Captured] = OrderedDict()
        self._without: dict[Key, int] = {}
        """Launches left before the capture of a graph that did not fit is tried again."""
        self.captures = self.evictions = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def get(self, key: Key, device: Capturing[Key, Captured]) -> Captured | None:
        """The graph, captured now if need be; None where there is no memory for it, so that the step has to run without."""
        found = self._graphs.get(key)
        if found is not None:
            self._graphs.move_to_end(key)
            return found
        if self._without.get(key, 0) > 0:
            self._without[key] -= 1
            return None
        if len(self._graphs) >= self._max_graphs:
            self._evict(1, device)
        self.captures += 1
        return self._captured(key, device)

    def _captured(self, key: Key, device: Capturing[Key, Captured]) -> Captured | None:
        """Once as it is, and once more with everything else gone."""
        for is_last in (False, True):
            try:
                self._graphs[key] = captured = device.capture(key)
            except torch.OutOfMemoryError:
                self._evict(len(self._graphs), device)
                if is_last:
                    self._without[key] = RETRY_AFTER
            else:
                self._without.pop(key, None)
                return captured
        return None

    def _evict(self, count: int, device: Capturing[Key, Captured]) -> None:
        device.release()  # none of them may be running
        for _ in range(count):
            _, graph = self._graphs.popitem(last=False)
            graph.reset()
        self.evictions += count
        device.release()
