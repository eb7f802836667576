"""The generators of the process as JSON: python's, numpy's, torch's on the CPU and on every CUDA device.

redline itself draws nothing from them (its samples are a hash, see `engine/native/running/sampler.py`); a task or a model of
a user may."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state() -> dict[str, Any]:
    """The state of every generator now, as JSON."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, _text(np.asarray(keys, dtype=np.uint32).tobytes()), position, has_gauss, cached],
        "torch": _text(torch.get_rng_state().numpy().tobytes()),
        "cuda": [_text(state.numpy().tobytes()) for state in cuda],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Continue from what `random_state` gave. CUDA devices that were not there then, or are not now, are left alone."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.frombuffer(base64.b64decode(keys), dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_bytes(state["torch"]))
    for device, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_bytes(text), device)


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _bytes(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
