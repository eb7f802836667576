"""How long each sample of a machine stands for: a log that has become large is thinned, the older part the more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np  # telemetry does without it until somebody asks

_NEIGHBOURS, _MOST_GAPS = 4, 3.0
"""A sample stands for no more than so many times the median gap of so many samples before and after it."""


def seconds_of(moments: Sequence[float]) -> np.ndarray:
    """float64[N] from the times of N samples, in order: up to the next one, but no more than a few times what its neighbours
    stand for, since nothing ran while a run was stopped. Ones where there are fewer than three."""
    import numpy as np

    if len(moments) < 3:
        return np.ones(len(moments))
    gaps = np.diff(moments, append=moments[-1])
    gaps[-1] = np.median(gaps[:-1])
    around = np.lib.stride_tricks.sliding_window_view(np.pad(gaps, _NEIGHBOURS, mode="edge"), 2 * _NEIGHBOURS + 1)
    return np.clip(gaps, 1e-9, np.maximum(_MOST_GAPS * np.median(around, axis=1), 1e-9))
