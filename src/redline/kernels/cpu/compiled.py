"""C compiled where it runs, by the system's compiler, for the CPU it runs on: a third of a second, so that nothing is kept.

It computes with the threads that torch computes with: two sets of them would wait for each other's cores. So it is linked to
the OpenMP library that torch has brought, and where that cannot be done there is no such library.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import torch

COMPILERS = ("gcc", "cc")
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    "-fno-schedule-insns",
)
"""Sums are taken in the order that is written: where the compiler may choose it, that of a row may depend on the company, and
more of them are under way than there are registers. Moving instructions before registers are assigned takes too many, too."""
COMPILE_S = 60.0


@cache
def library(source: Path, *macros: str) -> ctypes.CDLL | None:
    """The compiled source; None where there is no compiler, or not the one for these threads. Waits for the compiler."""
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    threads = _threads_of_torch()
    if compiler is None or threads is None:
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="redline-") as folder:
            compiled, linked = Path(folder) / "compiled.o", Path(folder) / "linked.so"
            _run(compiler, *FLAGS, *macros, "-c", str(source), "-o", str(compiled))
            _run(compiler, "-shared", str(compiled), str(threads), "-lm", "-Wl,--no-undefined", "-o", str(linked))
            return ctypes.CDLL(str(linked))  # stays when the file is gone
    except (OSError, subprocess.SubprocessError):  # a full disk, a folder that nothing may be run from, a compiler that refuses
        return None


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S)


def _threads_of_torch() -> Path | None:
    """GNU's OpenMP library as torch has loaded it; None where torch computes with other threads."""
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        return None
    loaded = {
        line.split(maxsplit=5)[5].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "libgomp" in line
    }
    return Path(loaded.pop()) if len(loaded) == 1 else None
