"""The stacks of every thread of this process, and of every process it has started."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from redline.config.installation import how_to_install
from redline.telemetry.workers import child_pids

PY_SPY_S = 10.0
"""For one process."""
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib", "scripts"))
_OURS = str(Path(__file__).parents[2])
_collector = threading.Lock()
"""Held while the garbage collector is switched off."""


@dataclass(slots=True, frozen=True)
class ThreadStack:
    """The stack of one thread, the innermost call last."""

    thread_id: int
    name: str
    lines: list[str]
    place: str
    """As `place_of` has it."""


@dataclass(slots=True, frozen=True)
class ChildStack:
    """The stack of a process, or the reason why it cannot be read."""

    pid: int
    command: str
    state: str
    lines: list[str]


def current_frames() -> dict[int, FrameType]:
    """The innermost frame of every thread, by the thread's number.

    Python 3.11 holds a lock over all threads while it makes them. A garbage collection in between may wait for that lock, to
    let go of a `threading.local`, or for a thread that does: for ever (https://github.com/python/cpython/issues/106883).
    """
    with _collector:
        was_on = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if was_on:
                gc.enable()


def own_stacks() -> list[ThreadStack]:
    """The stacks of all threads but the caller's."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        _thread_stack(thread_id, names.get(thread_id, "not started by Python"), traceback.extract_stack(frame))
        for thread_id, frame in current_frames().items()
        if thread_id != threading.get_ident()
    ]


def child_stacks() -> list[ChildStack]:
    """The stacks of all descendants, by py-spy where it is installed and allowed to."""
    return [ChildStack(pid, _command(pid), _state(pid), py_spy_dump(pid)) for pid in descendants()]


def descendants() -> list[int]:
    found: list[int] = []
    waiting = child_pids()
    while waiting:
        pid = waiting.pop(0)
        found.append(pid)
        waiting += child_pids(pid)
    return found


def py_spy_dump(pid: int) -> list[str]:
    """Lines of a stack dump; one line with the reason where there is none."""
    program = find_py_spy()
    if program is None:
        return [f"no stack: py-spy is not installed; {how_to_install('profile')}"]
    try:
        done = subprocess.run(
            [program, "dump", "--nonblocking", "--pid", str(pid)], capture_output=True, text=True, timeout=PY_SPY_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"no stack: py-spy: {error}"]
    if done.returncode:
        return [f"no stack: py-spy: {(done.stderr.strip().splitlines() or ['no reason given'])[-1]}"]
    return done.stdout.rstrip().splitlines()


def find_py_spy() -> str | None:
    """Beside this interpreter, or on the path."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


def _thread_stack(thread_id: int, name: str, frames: traceback.StackSummary) -> ThreadStack:
    lines = [
        f"{frame.filename}:{frame.lineno}, in {frame.name}" + (f": {frame.line}" if frame.line else "") for frame in frames
    ]
    return ThreadStack(thread_id, name, lines, place_of(frames))


def place_of(frames: traceback.StackSummary) -> str:
    """The innermost call in the user's own code, else in ours, else anywhere: `letters.py:17, in score: time.sleep(1)`."""
    ours = next((frame for frame in reversed(frames) if frame.filename.startswith(_OURS)), None)
    return users_place(frames) or _in_words(ours or (frames[-1] if frames else None))


def users_place(frames: traceback.StackSummary) -> str:
    """The innermost call in the user's own code; empty where none is."""
    return _in_words(next((frame for frame in reversed(frames) if _is_users(frame)), None))


def _is_users(frame: traceback.FrameSummary) -> bool:
    return not frame.filename.startswith((*_LIBRARIES, _OURS, "<"))


def _in_words(frame: traceback.FrameSummary | None) -> str:
    if frame is None:
        return ""
    return f"{Path(frame.filename).name}:{frame.lineno}, in {frame.name}" + (f": {frame.line}" if frame.line else "")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip() or "unknown"
    except OSError:
        return "it has just ended"


def _state(pid: int) -> str:
    """As the kernel has it, with what the process sleeps on: `S (sleeping) in futex_wait_queue`."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        state = next(line.partition("\t")[2] for line in status.splitlines() if line.startswith("State:"))
        channel = Path(f"/proc/{pid}/wchan").read_text().strip("0\n")
    except (OSError, StopIteration):
        return "gone"
    return f"{state} in {channel}" if channel else state
