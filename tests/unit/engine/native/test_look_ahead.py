"""How many steps a launch has."""

from __future__ import annotations

import numpy as np
import pytest

from redline.engine.native.look_ahead import MANY_ENDS, until_many_end


@pytest.mark.parametrize(
    ("left", "steps"),
    [
        ([100] * 16, 8),
        ([8] * 16, 8),
        ([3] * 16, 3),
        ([3] * 2 + [100] * 14, 3),
        ([3] + [100] * 15, 8),
        ([2] + [5] + [100] * 14, 5),
        ([0] * 8 + [100] * 8, 8),
        ([0] * 8 + [4] * 8, 4),
        ([1], 1),
        ([], 8),
    ],
)
def test_a_launch_ends_where_many_rows_do(left: list[int], steps: int) -> None:
    assert MANY_ENDS == 8
    assert until_many_end(np.array(left, np.int64), 8) == steps
