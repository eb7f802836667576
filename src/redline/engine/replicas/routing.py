"""Which engine gets a request: the one that has the prompt's beginning cached, else the one with the least to do."""

from __future__ import annotations

from collections.abc import Sequence

from redline.engine.replicas.open_requests import OpenRequest
from redline.engine.replicas.slots import Slot

LEEWAY = 32
"""Sequences that an engine may have beyond twice the least, and still get a prompt that it has cached."""


def choose(slots: Sequence[Slot], known: OpenRequest, reserved: set[int]) -> Slot | None:
    """The place for a request; None while none can take it. `reserved` are the indices of places that are kept free for
    suspected requests: those that may not have much company."""
    free = [slot for slot in slots if slot.takes(known) and (known.company or slot.index not in reserved)]
    if not free or known.company is not None:
        return min(free, key=lambda slot: len(slot.requests), default=None)
    least = min(slot.load for slot in free)
    cached = max(free, key=lambda slot: (slot.prefixes.num_known(known.blocks), -slot.load))
    # Half of the prompt: what all prompts begin with is soon in every cache.
    has_half = bool(known.blocks) and 2 * cached.prefixes.num_known(known.blocks) >= len(known.blocks)
    if has_half and cached.load <= 2 * least + LEEWAY:
        return cached
    return min(free, key=lambda slot: slot.load)


def least_crowded(slots: Sequence[Slot]) -> set[int]:
    """The index of the engine with the fewest requests; none where no engine is there."""
    alive = [slot for slot in slots if slot.engine is not None]
    return {min(alive, key=lambda slot: len(slot.requests)).index} if alive else set()
