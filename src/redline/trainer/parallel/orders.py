"""What rank 0 decides, for the ranks that follow it: numbered orders of a kind, JSON fields and named arrays.

The head of an order goes through the store, where a follower waits for it as long as sampling takes, and is told when rank 0 is
lost meanwhile. Its arrays follow as raw bytes in one broadcast. Nothing is unpickled: a dtype is one of a few names.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from redline.telemetry import span
from redline.trainer.parallel.pulse import Pulse

END = "end"
"""The kind of the last order."""
DTYPES = ("bool", "uint8", "int8", "int32", "int64", "float32", "float64")
SHORTEST_LOOK_S, LONGEST_LOOK_S = 0.001, 0.02
"""How often a follower that waits looks for its order: less often the longer it waits."""
LOOKS_PER_S = 5000
"""Looks of all followers together, once they have waited a while: a small part of what the store answers."""


@dataclass(slots=True, frozen=True)
class Order:
    """Something that every rank has to do now."""

    kind: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What JSON can hold."""
    arrays: Mapping[str, np.ndarray] = field(default_factory=dict)


class Orders:
    """The numbered orders of one run: rank 0 gives them, the others take each once."""

    def __init__(self, store: dist.Store, pulse: Pulse, world: int) -> None:
        self._store, self._pulse = store, pulse
        self._longest_look_s = max(LONGEST_LOOK_S, world / LOOKS_PER_S)
        self._count = self._forgotten = 0

    def give(self, order: Order) -> None:
        """Tell every follower. Returns once the arrays, where there are any, are with all of them."""
        self._count += 1
        arrays = {name: np.ascontiguousarray(array) for name, array in order.arrays.items()}
        shapes = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
        self._store.set(f"order/{self._count}", json.dumps({"kind": order.kind, "fields": order.fields, "arrays": shapes}))
        if arrays:
            flat = np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays.values()])
            with span("wait.for_ranks"):
                dist.broadcast(torch.from_numpy(flat), 0)

    def met(self) -> None:
        """All ranks have met since the last order, so that each has taken it: forget it and those before."""
        while self._forgotten < self._count:
            self._forgotten += 1
            self._store.delete_key(f"order/{self._forgotten}")

    def take(self) -> Order:
        """Block until rank 0 gives the next order. Raises `RankLostError` where rank 0 is lost."""
        self._count += 1
        key = f"order/{self._count}"
        look_s = SHORTEST_LOOK_S
        with span("wait.for_rank_0"):
            while not self._store.check([key]):  # its own way to wait warns each time that nothing came
                self._pulse.check()
                time.sleep(look_s)
                look_s = min(2 * look_s, self._longest_look_s)
        head = json.loads(self._store.get(key))
        return Order(head["kind"], head["fields"], _receive(head["arrays"]) if head["arrays"] else {})

    @property
    def is_over(self) -> bool:
        """Whether rank 0 has given the last order, which need not be taken yet; False where the store does not answer."""
        key = f"order/{self._count + 1}"
        with suppress(dist.DistError, RuntimeError):
            return bool(self._store.check([key])) and json.loads(self._store.get(key))["kind"] == END
        return False


def _receive(shapes: Mapping[str, tuple[str, list[int]]]) -> dict[str, np.ndarray]:
    assert all(dtype in DTYPES for dtype, _ in shapes.values()), f"arrays of rank 0: {shapes}"
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for dtype, shape in shapes.values()]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(flat, 0)
    pieces = torch.split(flat, sizes)
    return {
        name: piece.numpy().copy().view(np.dtype(dtype)).reshape(shape)
        for (name, (dtype, shape)), piece in zip(shapes.items(), pieces, strict=True)
    }
