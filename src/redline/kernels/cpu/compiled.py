"""C compiled where it runs, by the system's gcc, for the CPU it runs on: a third of a second, so that nothing is kept.

It computes with the threads that torch computes with: two sets of them would wait for each other's cores. So it is linked to
the OpenMP library that torch has brought, GNU's, for which clang does not compile; where that cannot be done there is no such
library.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
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
INSTALL = "install gcc 9 or newer"
ELSEWHERE = "set TMPDIR to a folder with room that programs may be run from"

_why_none: list[str] = []
"""Reasons and fixes, until the first of them is told."""
_told: list[str] = []


@cache
def library(source: Path, *macros: str) -> ctypes.CDLL | None:
    """The compiled source; None where there is no compiler, or not the one for these threads. Waits for the compiler."""
    threads = _threads_of_torch()
    if threads is None:
        return None
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        _why_none.append(f"there is no C compiler; {INSTALL}")
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="redline-") as folder:
            compiled, linked = Path(folder) / "compiled.o", Path(folder) / "linked.so"
            _run(compiler, *FLAGS, *macros, "-c", str(source), "-o", str(compiled))
            _run(compiler, "-shared", str(compiled), str(threads), "-lm", "-Wl,--no-undefined", "-o", str(linked))
            return ctypes.CDLL(str(linked))  # stays when the file is gone
    except subprocess.SubprocessError as error:
        reason = _reason(error)
        fix = ELSEWHERE if "No space left" in reason else INSTALL
        _why_none.append(f"{compiler} does not compile its C ({reason}); {fix}")
    except OSError as error:  # a full disk, a folder that nothing may be run from
        _why_none.append(f"its C cannot be compiled ({error}); {ELSEWHERE}")
    return None


def tell_why_none(tell: Callable[[str], None]) -> None:
    """Tell, once in a process, that C is missing that could be there, and what to do about it."""
    if _why_none and not _told:
        _told.append(_why_none[0])
        tell(f"decode steps take up to three times as long as they could on this CPU: {_why_none[0]}")


def _run(*command: str) -> None:
    """In a session of its own: an interrupt from the terminal is ours to answer."""
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_S, start_new_session=True)


def _reason(error: subprocess.SubprocessError) -> str:
    """The compiler's first complaint."""
    lines = (getattr(error, "stderr", None) or b"").decode(errors="replace").splitlines()
    return next((line.strip() for line in lines if "error" in line), lines[0].strip() if lines else str(error))[:200]


def _threads_of_torch() -> Path | None:
    """GNU's OpenMP library as torch has loaded it; None where torch computes with other threads."""
    if sys.platform != "linux" or not torch.backends.openmp.is_available():
        return None
    return _own_library(Path("/proc/self/maps").read_text(errors="replace"), Path(torch.__file__).parent)


def _own_library(maps: str, package: Path) -> Path | None:
    """The OpenMP library beside a package among the files that a process has mapped, else the only one."""
    files = {Path(fields[5].strip()) for line in maps.splitlines() if len(fields := line.split(maxsplit=5)) == 6}
    loaded = [path for path in files if path.name.startswith("libgomp")]
    own = [path for path in loaded if str(path).startswith(str(package))]  # torch/lib or torch.libs; others may have theirs
    found = own or loaded
    return found[0] if len(found) == 1 else None
