r"""Whether two mathematical answers are equal by value, as math-verify sees it: \boxed{\frac{1}{2}} is 0.5.

math-verify limits its time by `signal.alarm`, which works in a main thread alone and not inside a computation such as 9**9**9.
It therefore runs in processes of its own (`math_process.py`), which the kernel ends after `LIMIT_S` seconds whatever they
compute; the next question starts another.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import redline
from redline.config.installation import how_to_install
from redline.errors import TaskError

LIMIT_S = 5
"""Seconds that a comparison may take; most take milliseconds."""
LIMIT_BYTES = 2**31
"""Memory of a process."""
MAX_PROCESSES = 4
"""Processes, of about 70 MB each; a second one is started only when threads ask at the same time."""


class MathVerifier:
    """Compares answers in processes of its own. Any thread may ask; as many are answered at once as there may be processes."""

    def __init__(self, limit_s: int = LIMIT_S) -> None:
        self._limit_s = limit_s
        self._idle: SimpleQueue[subprocess.Popen[str]] = SimpleQueue()
        self._places = threading.Semaphore(min(MAX_PROCESSES, os.cpu_count() or 1))
        weakref.finalize(self, _end_all, self._idle)

    def equal(self, reference: str, answer: str) -> bool:
        """Whether the answer has the reference's value. Blocks until that is known. Raises `TaskError` where the reference
        cannot be read, or the comparison ran out of time or memory."""
        found = self._ask({"reference": reference, "answer": answer})
        if found is None:
            raise TaskError(
                f"math-verify gave no verdict on {answer[-60:]!r} within {self._limit_s} s and {LIMIT_BYTES >> 30} GiB",
                "such an answer has no reward; tell the policy in the prompt what its answer should look like",
            )
        if "unread" in found:
            what = f"math-verify finds no expression in the reference {reference[:60]!r}"
            raise TaskError(what, r"write it as LaTeX, such as \frac{1}{2}")
        return bool(found["equal"])

    def can_read(self, reference: str) -> bool:
        """Whether math-verify finds an expression in a reference. Blocks until that is known."""
        found = self._ask({"reference": reference, "answer": ""})
        return found is not None and "unread" not in found

    def _ask(self, question: dict[str, str]) -> dict[str, Any] | None:
        """The answer of a process; None where it ended without one."""
        with self._places:
            try:
                process = self._idle.get_nowait()
            except Empty:
                process = self._start()
            line = _ask(process, json.dumps(question) + "\n")
            if not line:
                _end(process)
                return None
            self._idle.put(process)
        found: dict[str, Any] = json.loads(line)
        return found

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "redline.rollouts.rewards.math_process", str(self._limit_s), str(LIMIT_BYTES)]
        source = str(Path(redline.__file__).parent.parent)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))}
        # In a session of its own, so that Ctrl-C in a terminal reaches the run and not the process.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env, start_new_session=True
        )
        assert process.stdout is not None
        if process.stdout.readline() != "ready\n":
            raise TaskError("math-verify did not start; its reason stands above", how_to_install("math"))
        return process


def _ask(process: subprocess.Popen[str], question: str) -> str:
    """The whole line that the process answers, or nothing where it ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(question)
        process.stdin.flush()
        line = process.stdout.readline()
    except BrokenPipeError:
        return ""
    return line if line.endswith("\n") else ""


def _end_all(idle: SimpleQueue[subprocess.Popen[str]]) -> None:
    with contextlib.suppress(Empty):
        while True:
            _end(idle.get_nowait())


def _end(process: subprocess.Popen[str]) -> None:
    """It ends with its input."""
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):
            assert pipe is not None
            pipe.close()
    process.wait()
