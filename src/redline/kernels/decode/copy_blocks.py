"""Copying whole blocks of the KV cache, for a row that must write into a block it shares."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Elements per program: 128 threads with two 16-byte loads each."""


def copy_blocks(caches: Tensor, source_N: Tensor, target_N: Tensor) -> None:
    """Copy block `source_N[i]` onto block `target_N[i]` in all layers, keys and values.

    `caches` is [L, 2, blocks, K, block size, D]. Pairs with a negative source are skipped, so a captured copy can be replayed
    with fewer. They run in any order: no block may be the target of two pairs, or the target of one and the source of another.
    """
    assert caches.is_contiguous()
    elements = caches[0, 0, 0].numel()
    if len(source_N):
        grid = (len(source_N), caches.shape[0] * 2, triton.cdiv(elements, BLOCK))
        _copy_blocks[grid](caches, source_N, target_N, caches.shape[2], ELEMENTS=elements, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _copy_blocks(caches, sources, targets, num_blocks, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    source = tl.load(sources + tl.program_id(0)).to(tl.int64)
    target = tl.load(targets + tl.program_id(0)).to(tl.int64)
    element = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = (element < ELEMENTS) & (source >= 0)
    plane = caches + tl.program_id(1).to(tl.int64) * num_blocks * ELEMENTS
    content = tl.load(plane + source * ELEMENTS + element, mask=inside)
    tl.store(plane + target * ELEMENTS + element, content, mask=inside)
