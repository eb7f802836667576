"""The C of CPUs, with the compilers that are here."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.forks import FORKS

from redline.config.processor import multiplies_in
from redline.kernels.cpu import compiled, draws, matrix_products, products, quantized, steps, training
from redline.kernels.cpu.compiled import FLAGS

NAMES = ("gcc", *(f"gcc-{version}" for version in range(9, 17)))
GCCS = {os.path.realpath(path): name for name in reversed(NAMES) if (path := shutil.which(name))}
"""Each once: `gcc` is mostly another name of one of them."""
MATRIX_UNITS = ("-march=sapphirerapids",) if platform.machine() == "x86_64" else ()
SOURCES = {
    "products": [products.SOURCE],
    "draws": [draws.SOURCE],
    "training": [training.SOURCE],
    "steps, float32": [steps.SOURCE, "-DD=64", "-DBFLOAT16=0"],
    "quantized": [quantized.SOURCE, "-DBITS=16" if platform.machine() == "x86_64" else "-DBITS=8"],
    "steps, bfloat16": [steps.SOURCE, "-DD=96", "-DBFLOAT16=1"],
    "matrix products": [matrix_products.SOURCE, *MATRIX_UNITS],
    "matrix products, emulated": [matrix_products.SOURCE, "-DEMULATED=1"],
}
VECTORS = [(), ("-mno-avx512f",), ("-mno-avx",)] if platform.machine() == "x86_64" else [()]


@pytest.mark.parametrize("compiler", GCCS.values())
@pytest.mark.parametrize("vectors", VECTORS, ids=str)
@pytest.mark.parametrize("source", SOURCES)
def test_each_compiles_it_without_a_warning(compiler: str, vectors: tuple[str, ...], source: str, tmp_path: Path) -> None:
    if source == "quantized" and (vectors == ("-mno-avx",) or not multiplies_in("int8")):
        pytest.skip("there is no instruction for it")
    if source == "matrix products" and MATRIX_UNITS and major(compiler) < 11:
        pytest.skip("it knows no matrix units")
    warned = ("-Wall", "-Wextra", "-Werror")
    made = subprocess.run(
        [compiler, *FLAGS, *warned, *vectors, *SOURCES[source], "-c", "-o", tmp_path / "compiled.o"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not made.returncode, made.stderr


def major(compiler: str) -> int:
    return int(subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, check=True).stdout.split(".")[0])


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "redline" / "kernels"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Of a few lines: how it is compiled and kept is the same for all."""
    (tmp_path / "source").mkdir()
    file = tmp_path / "source" / "small.c"
    file.write_text("#include <omp.h>\n#include <math.h>\ndouble root(void) { return sqrt(omp_get_max_threads()); }\n")
    return file


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As in a process that has compiled nothing yet."""
    if compiled.library(products.SOURCE) is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    monkeypatch.setattr(compiled, "_why_none", [])
    monkeypatch.setattr(compiled, "_told", [])
    return []


def compiler_that(does: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "gcc").write_text(f"#!/bin/sh\n{does}\n")
    (folder / "gcc").chmod(0o755)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: str(folder / name))


def test_a_missing_compiler_is_told_once_with_what_to_do(
    source: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    for macro in ("-DONE", "-DTWO"):
        assert compiled.library(source, macro) is None
        compiled.tell_why_none(told.append)
    [line] = told
    assert line.endswith("there is no C compiler; install gcc 9 or newer")


def test_what_a_compiler_complains_of_is_told(
    source: Path, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_that("echo 'note: hm' >&2; echo 'x.c:1: error: no such builtin' >&2; exit 1", tmp_path, monkeypatch)
    assert compiled.library(source, "-DREFUSED") is None
    compiled.tell_why_none(told.append)
    assert "(x.c:1: error: no such builtin); install gcc" in told[0]
    assert "\n" not in told[0]


def test_a_library_that_cannot_be_loaded_is_told(source: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a folder that is mounted noexec."""

    def refused(path: str) -> None:
        raise OSError(f"{path}: failed to map segment from shared object")

    monkeypatch.setattr(compiled.ctypes, "CDLL", refused)
    assert compiled.library(source, "-DNOEXEC") is None
    compiled.tell_why_none(told.append)
    assert "failed to map segment" in told[0]
    assert "set TMPDIR" in told[0]


def test_nothing_is_told_where_all_compiles_or_nothing_can_be_done(
    source: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled.library(source, "-DFINE") is not None
    monkeypatch.setattr(compiled, "_threads_of_torch", lambda: None)
    assert compiled.library(source, "-DOTHER_THREADS") is None
    compiled.tell_why_none(told.append)
    assert not told


def mapped(*paths: str) -> str:
    return "".join(f"7f00-7f01 r-xp 00000000 08:01 12  {path}\n" for path in paths) + "7f02-7f03 rw-p 00000000 00:00 0\n"


def test_torchs_own_threads_are_found_among_those_of_others() -> None:
    package, own = Path("/env/torch"), "/env/torch/lib/libgomp.so.1"
    others = ("/env/scikit_learn.libs/libgomp-a34b.so.1.0.0", "/home/libgomp-notes/weights.safetensors")
    assert compiled._own_library(mapped(own, *others), package) == Path(own)
    assert compiled._own_library(mapped("/env/torch.libs/libgomp-98df.so.1"), package) == Path(
        "/env/torch.libs/libgomp-98df.so.1"
    )
    assert compiled._own_library(mapped("/usr/lib/libgomp.so.1", others[1]), package) == Path("/usr/lib/libgomp.so.1")
    assert compiled._own_library(mapped("/usr/lib/libgomp.so.1", others[0]), package) is None
    assert compiled._own_library(mapped(), package) is None


def test_where_there_is_no_folder_to_compile_in_that_is_told(
    source: Path, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> str:
        raise FileNotFoundError("no usable temporary directory found")

    monkeypatch.setattr(compiled.tempfile, "gettempdir", refused)
    assert compiled.library(source, "-DNOWHERE") is None
    compiled.tell_why_none(told.append)
    assert "set TMPDIR" in told[0]


def test_an_interrupt_from_the_terminal_does_not_reach_the_compiler(
    source: Path, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would end it, and the run would go on without what it compiles."""
    compiler_that(f"cut -d' ' -f6 /proc/$$/stat > {tmp_path}/session; exit 1", tmp_path, monkeypatch)
    assert compiled.library(source, "-DSESSION") is None
    assert int((tmp_path / "session").read_text()) != os.getsid(0)


# ── what is kept ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the compiler was asked to do, each time as in a new process."""
    if compiled.library(products.SOURCE) is None:
        pytest.skip("no compiler here, or torch computes with other threads")
    asked, run = [], compiled._run
    monkeypatch.setattr(compiled, "_run", lambda *command: (asked.append(command[-1]), run(*command)))
    return asked


def compiled_anew(source: Path, *macros: str) -> bool:
    return compiled.library.__wrapped__(source, *macros) is not None


def test_a_compiler_that_takes_too_long_ends_with_all_that_it_started_and_that_is_told(
    source: Path, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = tmp_path / "child"
    compiler_that(f"sleep 60 & echo $! > {child}.part; mv {child}.part {child}; wait", tmp_path, monkeypatch)
    monkeypatch.setattr(compiled, "COMPILE_S", 1.0)
    assert compiled.library(source) is None
    reason = compiled.why_none()
    assert reason is not None
    assert "has not compiled its C within 1 s" in reason
    deadline = time.monotonic() + 10
    while _runs(int(child.read_text())):
        assert time.monotonic() < deadline, "what the compiler started is still running"
        time.sleep(0.05)


def _runs(process: int) -> bool:
    """Whether a process that is nobody's child any more has not ended."""
    status = Path(f"/proc/{process}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_what_is_no_file_in_the_place_of_a_kept_one_is_not_waited_for(source: Path, own_cache: Path) -> None:
    assert compiled.library(source) is not None
    [kept] = own_cache.iterdir()
    kept.unlink()
    os.mkfifo(kept)
    compiled.library.cache_clear()
    assert compiled.library(source) is not None


def test_the_next_process_finds_what_this_one_compiled(source: Path, commands: list[str], own_cache: Path) -> None:
    assert compiled_anew(source, "-DKEPT")
    assert len(commands) == 2, "compiled and linked"
    assert compiled_anew(source, "-DKEPT")
    assert len(commands) == 2
    assert compiled_anew(source, "-DOTHER")
    assert len(commands) == 4
    assert {file.suffix for file in own_cache.iterdir()} == {".so"}, "nothing is left but libraries"


def test_another_cpu_and_another_source_are_compiled_for(
    source: Path, commands: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compiled_anew(source, "-DMINE")
    monkeypatch.setattr(compiled, "_cpu", lambda: "another")
    assert compiled_anew(source, "-DMINE")
    assert len(commands) == 4
    names = {compiled._name("/bin/sh", Path("libgomp"), source, ()) for source in (products.SOURCE, draws.SOURCE)}
    assert len(names) == 2


LOADS = """
import os
from pathlib import Path
from redline.kernels.cpu import compiled
os.environ["XDG_CACHE_HOME"] = {cache!r}
assert compiled.library(Path({source!r})).root
"""


def loaded_by_a_new_process(source: Path) -> int | None:
    """Its exit code. It has not compiled or loaded anything before."""
    process = FORKS.Process(target=exec, args=(LOADS.format(cache=os.environ["XDG_CACHE_HOME"], source=str(source)), {}))
    process.start()
    process.join()
    return process.exitcode


def cut_short(content: bytes) -> bytes:
    return content[: len(content) // 2]


def with_a_hole(content: bytes) -> bytes:
    return content[:4096] + bytes(4096) + content[8192:]


def of_another(content: bytes) -> bytes:
    """A library without our functions."""
    threads = compiled._threads_of_torch()
    assert threads is not None
    return threads.read_bytes()


@pytest.mark.parametrize("damage", [cut_short, with_a_hole, of_another])
def test_a_file_that_is_not_as_it_was_written_is_compiled_again(
    source: Path, commands: list[str], own_cache: Path, damage: Callable[[bytes], bytes]
) -> None:
    """Loading one ends the process. The loader sees by itself that a file is far too short, and no more."""
    assert loaded_by_a_new_process(source) == 0
    [kept] = own_cache.glob("small-*")  # where the processes are forked from may have compiled others
    whole = kept.read_bytes()
    kept.write_bytes(damage(whole))
    assert loaded_by_a_new_process(source) == 0
    assert kept.read_bytes() == whole


def test_threads_that_compile_at_once_leave_one_whole_file(
    commands: list[str], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As several engines of a process do. Each has written when the first of them goes on."""
    linked, wait = own_cache.parent / "linked.so", threading.Barrier(4)
    kept = compiled._place("kept.so")
    assert kept is not None
    linked.write_bytes(bytes(100_000))
    replace = Path.replace

    def replaced(self: Path, target: Path) -> Path:
        wait.wait(timeout=10)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", replaced)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: compiled._keep(linked, kept), range(4)))
    assert [file.name for file in own_cache.iterdir()] == ["kept.so"]
    assert kept.read_bytes()[: -compiled.DIGEST] == linked.read_bytes()


def test_a_folder_that_others_may_write_to_is_neither_read_nor_written(
    source: Path, commands: list[str], own_cache: Path
) -> None:
    own_cache.mkdir(parents=True, exist_ok=True)
    own_cache.chmod(0o777)
    before = set(own_cache.iterdir())
    for count in (2, 4):
        assert compiled_anew(source, "-DSHARED")
        assert len(commands) == count
    assert set(own_cache.iterdir()) == before


def test_without_a_home_it_is_compiled_each_time(
    source: Path, commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for count in (2, 4):
        assert compiled_anew(source, "-DHOMELESS")
        assert len(commands) == count


def test_the_oldest_go(source: Path, commands: list[str], own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "MOST_KEPT", 2)
    for number in range(3):
        assert compiled_anew(source, f"-DNUMBER={number}")
    assert len(list(own_cache.iterdir())) == 2
