"""Which side runs when. In every round each side runs once, in an order drawn by lot: drift of the machine hits all alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TypeVar

T = TypeVar("T")


def interleave(
    sides: Mapping[str, Callable[[int], T]], rounds: int, seed: int, seen: Callable[[int, Mapping[str, T]], None]
) -> list[dict[str, T]]:
    """What each side gave in each round, in the order of `sides`; `seen` is told after every round."""
    lot = random.Random(seed)
    rows: list[dict[str, T]] = []
    for number in range(rounds):
        order = list(sides)
        lot.shuffle(order)
        found = {name: sides[name](number) for name in order}
        rows.append({name: found[name] for name in sides})
        seen(number, rows[-1])
    return rows
