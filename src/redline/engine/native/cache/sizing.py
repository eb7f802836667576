"""How large the KV cache is."""

from __future__ import annotations

import torch

from redline.config.sections.engine import EngineConfig
from redline.engine.native.cache.kv_cache import KVCache, KVShape
from redline.errors import EngineError

BLOCK_SIZE_CPU, BLOCK_SIZE_CUDA = 16, 64
CPU_CACHE_BYTES = 4 * 2**30


def block_size_for(config: EngineConfig, device: torch.device) -> int:
    return config.block_size or (BLOCK_SIZE_CUDA if device.type == "cuda" else BLOCK_SIZE_CPU)


def num_blocks_for(
    config: EngineConfig,
    shape: KVShape,
    block_size: int,
    max_len: int,
    device: torch.device,
    dtype: torch.dtype,
    routing: tuple[int, int] | None = None,
) -> int:
    """Blocks within the budget, one of them scratch; never more than all rows at full length could hold."""
    per_block = KVCache.bytes_per_block(shape, block_size, dtype, routing)
    budget = config.kv_cache_memory_bytes or _default_budget(config, device)
    blocks = min(budget // per_block, config.max_num_seqs * -(-max_len // block_size) + 1)
    if blocks < 2:
        raise EngineError(
            f"a KV cache of {budget:,} bytes does not hold one block of {per_block:,}",
            "raise engine.kv_cache_memory_bytes or engine.gpu_memory_utilization",
        )
    return int(blocks)


def _default_budget(config: EngineConfig, device: torch.device) -> int:
    """On a GPU: gpu_memory_utilization · total, less what is in use already."""
    if device.type != "cuda":
        return CPU_CACHE_BYTES
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, int(total * config.gpu_memory_utilization) - (total - free - cached))
