"""Which of several engines has the beginning of a prompt in its cache, as far as its requests tell."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from redline.types import GenerateRequest

BLOCK_TOKENS = 16
MAX_BLOCKS = 1 << 16
"""Blocks that are remembered of an engine: a million tokens."""


def blocks_of(request: GenerateRequest) -> list[int]:
    """One number for each whole block of the prompt, which stands for all tokens up to its end."""
    ids, found = request.prompt_ids, []
    so_far = hash(request.adapter)
    for start in range(0, len(ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        so_far = hash((so_far, ids[start : start + BLOCK_TOKENS].tobytes()))
        found.append(so_far)
    return found


class PrefixMemory:
    """The prompts that one engine was given lately."""

    def __init__(self) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > MAX_BLOCKS:
            self._blocks.popitem(last=False)

    def num_known(self, blocks: Sequence[int]) -> int:
        """How many blocks of a prompt, from its beginning, the engine was given before."""
        for count, block in enumerate(blocks):
            if block not in self._blocks:
                return count
        return len(blocks)

    def clear(self) -> None:
        """The engine's weights have changed, or it is another process: nothing of it is cached any more."""
        self._blocks.clear()
