from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from redline.kernels import available

SOURCE = Path(available.__file__).parents[1]


def test_a_tensor_on_the_cpu_is_never_for_the_kernels() -> None:
    assert available.has_triton() is (importlib.util.find_spec("triton") is not None)
    assert not available.kernels_serve(torch.zeros(1))


@pytest.mark.gpu
@pytest.mark.parametrize("installed", [False, True])
def test_a_tensor_on_a_gpu_is_for_the_kernels_where_triton_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(available, "has_triton", lambda: installed)
    assert available.kernels_serve(torch.zeros(1, device="cuda")) is installed


def test_nothing_else_asks_whether_triton_is_installed() -> None:
    asking = [path for path in SOURCE.rglob("*.py") if 'find_spec("triton")' in path.read_text()]
    assert [path.relative_to(SOURCE).as_posix() for path in asking] == ["kernels/available.py"]


def test_asking_loads_no_triton() -> None:
    code = "import sys; from redline.kernels.available import has_triton; has_triton(); print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
