"""Numbers that are the same whether they were stored meanwhile or not."""

from __future__ import annotations

import numpy as np

LARGEST = float(np.finfo(np.float32).max)


def in_float32(value: float) -> float:
    """The shortest decimal number that float32 takes for the same as this one: 0.1 stays 0.1, and becomes it again where the
    store has kept it in 32 bits."""
    single = np.float32(value)
    shortest = float(str(single))
    return shortest if abs(shortest) <= LARGEST else float(single)
