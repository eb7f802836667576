"""Tensors as bytes and back: digests, and the format of safetensors without a copy of the whole.

A body is what a `.safetensors` file holds: the length of a JSON header, the header with the type, shape and place of every
tensor, the tensors end to end. Any reader of safetensors takes it, and reading it runs no code.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from redline.errors import ModelError

DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The name that safetensors has for each type."""
MAX_HASHERS = 8
"""Threads that hash at once; more than the memory's bandwidth feeds are of no use."""


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in host memory: its own where it lies there in one piece, else those of a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name → SHA-256 of the tensor's bytes. Blocks; several threads hash, since hashing lets others run."""
    with ThreadPoolExecutor(min(MAX_HASHERS, os.cpu_count() or 1), thread_name_prefix="digests") as pool:
        found = pool.map(lambda tensor: hashlib.sha256(raw_bytes(tensor)).hexdigest(), tensors.values())
        return dict(zip(tensors, found, strict=True))


def in_groups(tensors: Mapping[str, Tensor], most_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Tensors in their order, in groups that each are closed once they hold `most_bytes`."""
    group: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        group[name] = tensor
        size += tensor.nbytes
        if size >= most_bytes:
            yield group
            group, size = {}, 0
    if group:
        yield group


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> list[bytes | memoryview]:
    """Tensors as the parts of a safetensors body, in order."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    parts, end = [], 0
    for name, tensor in tensors.items():
        part = raw_bytes(tensor)
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + part.nbytes],
        }
        parts.append(part)
        end += part.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # so that what follows is aligned
    return [struct.pack("<Q", len(encoded)) + encoded, *parts]


def unpack(body: bytes | bytearray) -> dict[str, Tensor]:
    """The tensors of a safetensors body, in host memory. Raises ModelError where it is none."""
    try:
        return load(bytes(body) if isinstance(body, bytearray) else body)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ModelError(f"these bytes are no safetensors: {error}", "send what safetensors writes") from error
