"""How a bucket gets from a link into the memory of an engine: the receiver's half of every transport that copies buckets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from redline.errors import WeightSyncError
from redline.weight_sync.buckets import Range
from redline.weight_sync.transports.broadcast import GroupInlet
from redline.weight_sync.transports.checkpoint_engine import FolderInlet
from redline.weight_sync.transports.cuda_ipc import StagedInlet


class Inlet(Protocol):
    """One engine's end of a link."""

    def load(self, slot: int, into: Tensor, ranges: Sequence[Range]) -> None:
        """Fill these ranges of `into`, a run of bytes, with what the sender has put into a slot. May leave the copy to the
        device's stream."""
        ...

    def close(self) -> None: ...


INLETS: Mapping[str, Callable[[Mapping[str, Any], torch.device], Inlet]] = {
    "broadcast": GroupInlet,
    "checkpoint_engine": FolderInlet,
    "cuda_ipc": StagedInlet,
}
"""Name of a link → what opens its engine's end, from what the sender said of it."""


def open_inlet(link: str, how: Mapping[str, Any], device: torch.device) -> Inlet:
    """Open a link by its name. Raises WeightSyncError where this version does not know it, or cannot reach the other side."""
    if link not in INLETS:
        raise WeightSyncError(f"{link!r}: no such link for weights", f"one of {', '.join(INLETS)}")
    return INLETS[link](how, device)
