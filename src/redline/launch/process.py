"""Settings of the whole process: threads, kernel caches, the allocator, the garbage collector."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from redline.config import Config, EngineRecipe
from redline.telemetry import span

KERNEL_CACHE_CAPACITY = 128
"""Shapes whose kernels are kept. The layers of a step share a dozen, and decoding returns to some dozens."""


def prepare_process(config: Config | EngineRecipe) -> None:
    """Set what belongs to the process rather than to a stage: CPU threads, and on a CPU the kernel caches and the allocator."""
    torch.set_num_threads(config.run.num_threads or 1)
    if config.run.device == "cpu" and sys.platform == "linux":
        _bound_kernel_caches()
        _keep_freed_memory()


def _bound_kernel_caches() -> None:
    """torch caches a compiled product for each shape it has met, a thousand by default. Packed batches have a new shape at
    every step, and what is kept of each lies between the large blocks of the heap, which then no longer fit where they were."""
    for variable in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(variable, str(KERNEL_CACHE_CAPACITY))


def _keep_freed_memory() -> None:
    """Let glibc reuse large blocks instead of returning them: a step allocates the same hundreds of megabytes again and again,
    and the kernel clears every page it hands out."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, 2**30)  # M_MMAP_THRESHOLD


@contextmanager
def sparing_what_is_there() -> Iterator[None]:
    """Inside, Python's collector leaves alone what there is now: several hundred thousand objects of torch, transformers and
    the model. A step of many attempts makes enough new ones for a full collection every few steps, a fifth of a second each.
    Where the caller has frozen objects already, nothing happens: to thaw ours would thaw theirs."""
    if gc.get_freeze_count():
        yield
        return
    with span("run.setup"):
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
