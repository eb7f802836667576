"""The C of CPUs, with the compilers that are here."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from redline.kernels.cpu import draws, products, steps
from redline.kernels.cpu.compiled import FLAGS

GCCS = [name for name in ("gcc", *(f"gcc-{version}" for version in range(9, 17))) if shutil.which(name)]
SOURCES = {
    "products": [products.SOURCE],
    "draws": [draws.SOURCE],
    "steps, float32": [steps.SOURCE, "-DD=64", "-DBFLOAT16=0"],
    "steps, bfloat16": [steps.SOURCE, "-DD=96", "-DBFLOAT16=1"],
}
VECTORS = [(), ("-mno-avx512f",), ("-mno-avx",)] if platform.machine() == "x86_64" else [()]


@pytest.mark.parametrize("compiler", GCCS)
@pytest.mark.parametrize("vectors", VECTORS, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_each_compiles_it_without_a_warning(compiler: str, vectors: tuple[str, ...], source: str, tmp_path: Path) -> None:
    warned = ("-Wall", "-Wextra", "-Werror")
    made = subprocess.run(
        [compiler, *FLAGS, *warned, *vectors, *SOURCES[source], "-c", "-o", tmp_path / "compiled.o"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not made.returncode, made.stderr
