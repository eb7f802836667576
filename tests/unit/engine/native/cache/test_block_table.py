"""The host's table of the blocks that hold each row's tokens."""

from __future__ import annotations

import numpy as np

from redline.engine.native.cache.block_table import BlockTable


def test_a_rows_blocks_are_in_the_order_in_which_they_came() -> None:
    table = BlockTable(3, max_blocks=4)
    table.append(1, [7, 5])
    table.append(1, [9])
    table.append(2, [4])
    assert table.of(np.array([1])).tolist() == [[7, 5, 9]]
    assert table.of(np.array([2, 1]))[:, :1].tolist() == [[4], [7]]


def test_a_new_tenant_begins_with_no_block() -> None:
    table = BlockTable(2, max_blocks=4)
    table.append(0, [1, 2, 3])
    table.clear(0)
    table.append(0, [8])
    assert table.num_blocks_R.tolist() == [1, 0]
    assert table.of(np.array([0])).tolist() == [[8]]
