from __future__ import annotations

from ctypes import c_char_p
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from redline.kernels import nvrtc


@pytest.mark.parametrize(("status", "kind"), [(2, torch.OutOfMemoryError), (700, RuntimeError)])
def test_no_memory_for_a_module_is_what_torch_says_of_none_for_a_tensor(
    status: int, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who can do with less catches that."""

    def tell(number: int, place: Any) -> None:
        place._obj.value = c_char_p(f"error {number}".encode()).value

    monkeypatch.setattr(nvrtc, "_driver", lambda: SimpleNamespace(cuGetErrorString=tell))
    with pytest.raises(RuntimeError, match=f"CUDA: error {status}") as caught:
        nvrtc._check(status)
    assert type(caught.value) is kind
    nvrtc._check(0)
