"""What this machine can do is measured once for all tests of benches and plans: it takes longer than what they look at."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from redline.lab.measure import machine

_product_seconds = cache(machine._product_seconds)
_stream_seconds = machine._stream_seconds
_whole_stream_seconds = cache(machine._stream_seconds)


def _stream_measured_once(length: int, device: torch.device) -> tuple[float, float]:
    """Shorter streams are held against moves of the same moment."""
    whole = length == machine.STREAM_BYTES[device.type]
    return (_whole_stream_seconds if whole else _stream_seconds)(length, device)


@pytest.fixture(scope="module", autouse=True)
def machine_measured_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_product_seconds", _product_seconds)
        patch.setattr(machine, "_stream_seconds", _stream_measured_once)
        yield
