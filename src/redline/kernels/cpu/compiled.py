"""C compiled where it runs, by the system's gcc, for the CPU it runs on: a second in all, once for a user and a machine. What
it came to is kept in the user's cache (`$XDG_CACHE_HOME/redline/kernels`), by a name that says of what, by what and for what.

It computes with the threads that torch computes with: two sets of them would wait for each other's cores. So it is linked to
the OpenMP library that torch has brought, GNU's, for which clang does not compile; where that cannot be done there is no such
library.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from redline.config.user_cache import user_cache
from redline.errors import ConfigError

COMPILERS = ("gcc", "cc")
FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-fPIC"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math"),
    "-fno-schedule-insns",
)
"""Sums are taken in the order that is written: where the compiler may choose it, that of a row may depend on the company, and
more of them are under way than there are registers. Moving instructions before registers are assigned takes too many, too."""
COMPILE_S = 60.0
MOST_KEPT = 64
"""Files, of which the oldest go."""
DIGEST = hashlib.sha256().digest_size
CPU_FACTS = ("vendor_id", "model name", "flags", "CPU implementer", "CPU part", "Features", "features", "isa")
"""Lines of /proc/cpuinfo, under the names that each architecture has for them."""
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""What `numbers.h` takes for BFLOAT16."""
INSTALL = "install gcc 9 or newer"
ELSEWHERE = "set TMPDIR to a folder with room that programs may be run from"

_why_none: list[str] = []
"""Reasons and fixes, until the first of them is told."""
_told: list[str] = []


@cache
def library(source: Path, *macros: str) -> ctypes.CDLL | None:
    """The compiled source; None where there is no compiler, or not the one for these threads. Waits for the compiler, at most
    `COMPILE_S` seconds."""
    threads = _threads_of_torch()
    if threads is None:
        return None
    compiler = next((path for name in COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        _why_none.append(f"there is no C compiler; {INSTALL}")
        return None
    try:
        kept = _place(_name(compiler, threads, source, macros))
        if kept is not None and (before := _loaded(kept)) is not None:
            return before
        with tempfile.TemporaryDirectory(prefix="redline-") as folder:
            compiled, linked = Path(folder) / "compiled.o", Path(folder) / "linked.so"
            _run(compiler, *FLAGS, *macros, "-c", str(source), "-o", str(compiled))
            _run(compiler, "-shared", str(compiled), str(threads), "-lm", "-Wl,--no-undefined", "-o", str(linked))
            found = ctypes.CDLL(str(linked))  # stays when the file is gone
            if kept is not None:
                _keep(linked, kept)
            return found
    except subprocess.TimeoutExpired:
        why = f"{compiler} has not compiled its C within {COMPILE_S:.0f} s; start again when the machine is less busy"
        _why_none.append(why)
    except subprocess.SubprocessError as error:
        reason = _reason(error)
        fix = ELSEWHERE if "No space left" in reason else INSTALL
        _why_none.append(f"{compiler} does not compile its C ({reason}); {fix}")
    except OSError as error:  # a full disk, a folder that nothing may be run from
        _why_none.append(f"its C cannot be compiled ({error}); {ELSEWHERE}")
    return None


def why_none() -> str | None:
    """Why C is missing that could be there, and what to do about it; None before anybody asked for some."""
    return _why_none[0] if _why_none else None


def tell_why_none(tell: Callable[[str], None]) -> None:
    """Tell that, once in a process."""
    if _why_none and not _told:
        _told.append(_why_none[0])
        tell(f"decode steps take up to three times as long as they could on this CPU: {_why_none[0]}")


# ── what is kept ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _name(compiler: str, threads: Path, source: Path, macros: tuple[str, ...]) -> str:
    """Another one for everything that the result depends on."""
    about, file = hashlib.sha256(), os.stat(compiler)
    for text in (source, *sorted(source.parent.glob("*.h"))):
        about.update(text.read_bytes())
    about.update(repr((FLAGS, macros, os.path.realpath(compiler), file.st_size, file.st_mtime_ns, str(threads))).encode())
    about.update(_cpu().encode())
    return f"{source.stem}-{about.hexdigest()[:24]}.so"


@cache
def _cpu() -> str:
    """What `-march=native` goes by."""
    told = Path("/proc/cpuinfo").read_text(errors="replace").split("\n\n")[0].splitlines()
    return "\n".join(line for line in told if line.split("\t")[0].strip() in CPU_FACTS)


def _place(name: str) -> Path | None:
    """Where to keep it; None where there is no folder that is the user's alone."""
    try:
        folder = user_cache() / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = folder.stat()
    except (OSError, ConfigError):  # no home, or one that cannot be written
        return None
    return folder / name if about.st_uid == os.geteuid() and not about.st_mode & 0o022 else None


def _loaded(kept: Path) -> ctypes.CDLL | None:
    """None where it is not there, or not as it was written: a process that maps a library which was cut short dies of it."""
    try:
        content = kept.read_bytes() if kept.is_file() else b""
        return ctypes.CDLL(str(kept)) if content[-DIGEST:] == _digest(content[:-DIGEST]) else None
    except OSError:  # nothing may be run from there
        return None


def _keep(linked: Path, kept: Path) -> None:
    """All of it or nothing, with its digest behind it, which no loader looks at: others may load it at this moment."""
    beside = None
    try:
        with tempfile.NamedTemporaryFile(dir=kept.parent, prefix=kept.stem, suffix=".part", delete=False) as file:
            beside, content = Path(file.name), linked.read_bytes()
            file.write(content + _digest(content))
        beside.replace(kept)
        for old in sorted(kept.parent.iterdir(), key=lambda path: path.stat().st_mtime)[:-MOST_KEPT]:
            old.unlink(missing_ok=True)
    except OSError:  # it is compiled again next time
        if beside is not None:
            beside.unlink(missing_ok=True)


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


# ── the compiler ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _run(*command: str) -> None:
    """In a session of its own: an interrupt from the terminal is ours to answer. What it started ends with it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            _, told = process.communicate(timeout=COMPILE_S)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, stderr=told)


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
