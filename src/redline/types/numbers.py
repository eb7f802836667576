"""Numbers that are the same whether they were stored meanwhile or not."""

from __future__ import annotations

import numpy as np


def in_float32(value: float) -> float:
    """The shortest decimal number that float32 takes for the same as this one: 0.1 stays 0.1, and becomes it again where the
    store has kept it in 32 bits."""
    return float(str(np.float32(value)))
