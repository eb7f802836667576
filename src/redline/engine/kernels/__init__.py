"""Triton kernels of prefill and decode. Needs triton; only code that runs on a CUDA device may import it."""

from redline.engine.kernels.copy_blocks import copy_blocks
from redline.engine.kernels.decode_attention import TILES, DecodeBatch, Tile, choose_splits, decode_attention
from redline.engine.kernels.rotate_and_store import rotate_and_store
from redline.engine.kernels.shared_prefix import SharedPrefixes

__all__ = [
    "TILES",
    "DecodeBatch",
    "SharedPrefixes",
    "Tile",
    "choose_splits",
    "copy_blocks",
    "decode_attention",
    "rotate_and_store",
]
