"""Fresh memory that shows when it is used: what the allocator hands out is otherwise zero on some days and NaN on others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """Inside, torch fills every uninitialised tensor with NaN (or the largest integer)."""
    was_deterministic, was_filled = (
        torch.are_deterministic_algorithms_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all()
        yield
    finally:
        torch.use_deterministic_algorithms(was_deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = was_filled
