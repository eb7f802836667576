"""Which blocks of the KV cache hold the tokens of each row, in order, as the host has booked them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redline.engine.native.cache.prefixes import Prefixes, side_by_side


class BlockTable:
    """Arrays over the rows. `DeviceRows` has the copy that attention reads on the device."""

    def __init__(self, num_rows: int, max_blocks: int) -> None:
        self.num_blocks_R = np.zeros(num_rows, np.int64)
        self.blocks_RN = np.zeros((num_rows, max_blocks), np.int32)

    def clear(self, row: int) -> None:
        self.num_blocks_R[row] = 0

    def append(self, row: int, blocks: Sequence[int]) -> None:
        """The row's next tokens are in these blocks."""
        first = self.num_blocks_R[row]
        self.blocks_RN[row, first : first + len(blocks)] = blocks
        self.num_blocks_R[row] += len(blocks)

    def of(self, rows_B: np.ndarray) -> np.ndarray:
        """The rows' blocks, as wide as the longest of them."""
        return self.blocks_RN[rows_B, : self.num_blocks_R[rows_B].max()]

    def side_by_side(self, rows_B: np.ndarray) -> tuple[np.ndarray, Prefixes | None]:
        """The rows in an order that puts those with a common beginning next to each other, and which those are."""
        order_B, prefixes = side_by_side(self.of(rows_B), self.num_blocks_R[rows_B])
        return rows_B[order_B], prefixes
