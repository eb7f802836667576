"""Runs of `redline` that end where a test wants them to: at the n-th call that some part of redline makes.

Each run is a process of its own, forked from one that has imported everything, so that dozens of them take no longer than a few
that are started from nothing. The calls are seen with Python's profiler, and redline knows nothing of it. On the way the
profiler writes down which tasks were attempted and which groups were trained on.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal

from support.forks import FORKS
from support.processes import TIMEOUT_S

import redline
from redline import cli
from redline.rollouts.user_code.source import CalledSource
from redline.telemetry import RunFolder
from redline.trainer import PolicyTrainer

SOURCE = Path(redline.__file__).parent
DEEDS = "deeds.jsonl"
CALLS = "calls.json"
OUTPUT = "output.txt"
AROUND_THE_LOOP = ("cli", "launch", "watch")
Unread = Literal["pipe", "closed"] | None


@dataclass(slots=True, frozen=True)
class Point:
    """The `count`-th call, of Python or of C, out of a section of the source: a stage, or `loop` for what is around it."""

    section: str
    count: int


# ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def forked(
    cwd: Path, *arguments: str, kill_at: Point | None = None, is_profiled: bool = True, unread: Unread = None
) -> Iterator[ForkServerProcess]:
    """`redline` with these arguments; ours to signal, and gone when the block ends. It prints into `output.txt`, or into a pipe
    that nobody reads, or into nothing at all."""
    process = FORKS.Process(target=_run, args=(cwd, arguments, kill_at, is_profiled, unread))
    process.start()
    try:
        yield process
    finally:
        if process.is_alive():
            process.kill()
        process.join()


def run_to_end(
    cwd: Path, *arguments: str, kill_at: Point | None = None, is_profiled: bool = True, unread: Unread = None
) -> int:
    """The exit code, -9 after a kill. One that hangs fails the test."""
    with forked(cwd, *arguments, kill_at=kill_at, is_profiled=is_profiled, unread=unread) as process:
        return end_of(process, cwd)


def end_of(process: ForkServerProcess, cwd: Path) -> int:
    """Wait for it; the exit code."""
    process.join(TIMEOUT_S)
    assert process.exitcode is not None, f"no end after {TIMEOUT_S} s: {output(cwd)[-2000:]}"
    return process.exitcode


def wait_until(condition: Callable[[], bool], process: ForkServerProcess, timeout_s: float = TIMEOUT_S) -> None:
    """Fails where the process ends first."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.is_alive() or condition(), "it ended before the moment came"
        assert time.monotonic() < deadline, "it neither happened nor ended"
        time.sleep(0.001)


def resume_to_end(cwd: Path, kill_at: Point | None = None) -> int:
    """Where the kill came before there was a run to continue, begin."""
    return run_to_end(cwd, "train", "letters.yaml", *(["--resume"] if is_begun(cwd) else []), kill_at=kill_at)


def is_begun(cwd: Path) -> bool:
    return any(cwd.glob("runs/*/config.json"))


def newest_run(cwd: Path) -> RunFolder:
    return RunFolder.newest(cwd / "runs", "letters")


def output(cwd: Path) -> str:
    """What all runs in the folder have printed."""
    path = cwd / OUTPUT
    return path.read_text() if path.exists() else ""


def _run(cwd: Path, arguments: tuple[str, ...], kill_at: Point | None, is_profiled: bool, unread: Unread) -> None:
    os.chdir(cwd)
    os.environ["NO_COLOR"] = "1"
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    _redirect(unread)
    sys.argv = ["redline", *arguments]
    if not is_profiled:
        cli.main()  # does not return
    profiler = _Profiler(kill_at)
    threading.setprofile(profiler)
    sys.setprofile(profiler)
    try:
        cli.main()
    finally:
        sys.setprofile(None)
        Path(CALLS).write_text(json.dumps(profiler.calls))


def _redirect(unread: Unread) -> None:
    if unread == "closed":  # as a shell's `>&- 2>&-` does it
        os.close(1)
        os.close(2)
        sys.stdout = sys.stderr = None
        return
    if unread == "pipe":
        reader, printed = os.pipe()
        os.close(reader)
    else:
        printed = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(printed, stream)


class _Profiler:
    """Counts calls by section, writes down deeds, and ends the process when its time has come."""

    def __init__(self, kill_at: Point | None) -> None:
        self._kill_at = kill_at
        self._sections: dict[int, tuple[CodeType, str | None]] = {}
        """By `id`, with the code that has it: to hash a code takes longer than most calls."""
        self._deeds = os.open(DEEDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.calls: Counter[str] = Counter()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" and event != "c_call":
            return
        code = frame.f_code
        known = self._sections.get(id(code))
        if known is None:
            known = self._sections[id(code)] = code, _section(Path(code.co_filename))
        section = known[1]
        if section is None:
            return
        count = self.calls[section] = self.calls[section] + 1
        if self._kill_at is not None and self._kill_at.section == section and self._kill_at.count == count:
            os.kill(os.getpid(), signal.SIGKILL)
        if event == "call":
            self._write_down(code, frame)

    def _write_down(self, code: CodeType, frame: FrameType) -> None:
        if code is PolicyTrainer.step.__code__:
            batch = frame.f_locals["batch"]
            deed: dict[str, Any] = {"version": batch.version, "trains_on": batch.indices, "lags": batch.lags}
        elif code is CalledSource._train.__code__:
            deed = {"attempts": frame.f_locals["index"]}
        else:
            return
        os.write(self._deeds, json.dumps({"process": os.getpid(), **deed}).encode() + b"\n")


def _section(path: Path) -> str | None:
    if not path.is_relative_to(SOURCE):
        return None
    inside = path.relative_to(SOURCE)
    return inside.parts[0] if len(inside.parts) > 1 and inside.parts[0] not in AROUND_THE_LOOP else "loop"


# ── what they did ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True)
class Deeds:
    """Of one process."""

    attempted: list[int]
    """Numbers, as they were begun."""
    trained: dict[int, tuple[int, ...]]
    """Version → the numbers of its batch."""
    lags: list[int]


def deeds(cwd: Path) -> list[Deeds]:
    """Of all processes that ran in the folder, in their order."""
    found: dict[int, Deeds] = {}
    path = cwd / DEEDS
    for line in path.read_text().splitlines() if path.exists() else ():
        deed = json.loads(line)
        of_process = found.setdefault(deed["process"], Deeds([], {}, []))
        if "attempts" in deed:
            of_process.attempted.append(deed["attempts"])
        else:
            of_process.trained[deed["version"]] = tuple(deed["trains_on"])
            of_process.lags += deed["lags"]
    return list(found.values())


def calls(cwd: Path) -> Counter[str]:
    """By section, of the last process that came to its end."""
    return Counter(json.loads((cwd / CALLS).read_text()))
