"""Triton kernels of prefill and decode. Needs triton; only code that runs on a CUDA device may import it."""

from redline.kernels.decode.attention import TILES, DecodeBatch, Tile, choose_splits, decode_attention
from redline.kernels.decode.copy_blocks import copy_blocks
from redline.kernels.decode.rotate_and_store import rotate_and_store
from redline.kernels.decode.shared_prefix import SharedPrefixes

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
