"""Tensors in a TensorDict (the extra `bench`). The only file that knows the library."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def save(path: Path, tensors: Mapping[str, Tensor], note: str, *, consolidated: bool) -> None:
    """A folder with a memory-mapped file for each tensor, or one file with all of them."""
    values = _tensordict(tensors, note)
    if consolidated:
        values.consolidate(filename=path)
    else:
        values.memmap(path)


def load(path: Path, *, consolidated: bool) -> Any:
    from tensordict import TensorDict

    return TensorDict.from_consolidated(path) if consolidated else TensorDict.load_memmap(path)


def dumps(tensors: Mapping[str, Tensor], note: str, *, consolidated: bool) -> bytes:
    values = _tensordict(tensors, note)
    return pickle.dumps(values.consolidate() if consolidated else values, protocol=pickle.HIGHEST_PROTOCOL)


def loads(data: bytes) -> Any:
    return pickle.loads(data)


def _tensordict(tensors: Mapping[str, Tensor], note: str) -> Any:
    from tensordict import TensorDict

    return TensorDict({**tensors, "others": note}, batch_size=[])
