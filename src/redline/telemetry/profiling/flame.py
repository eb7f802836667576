"""A flame graph of where Python was, by py-spy, where it is installed and allowed to look."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from pathlib import Path

from redline.config.installation import how_to_install
from redline.telemetry.stalls.stacks import find_py_spy

SAMPLES_PER_S = 100
LONGEST_S = 3600
PATIENCE_S = 30.0
"""For py-spy to draw."""
PR_SET_PTRACER = 0x59616D61


class FlameGraph:
    """Samples this process and its children from `start` to `stop`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._process: subprocess.Popen[str] | None = None
        self.note = ""
        """Why there is none."""

    def start(self) -> None:
        program = find_py_spy()
        if program is None:
            self.note = f"no flame graph: py-spy is not installed; {how_to_install('profile')}"
            return
        options = ["--rate", str(SAMPLES_PER_S), "--duration", str(LONGEST_S), "--nonblocking", "--subprocesses", "--threads"]
        try:
            self._process = subprocess.Popen(
                [program, "record", "--pid", str(os.getpid()), "--output", str(self._path), *options],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            self.note = f"no flame graph: {error}"
            return
        _let_look(self._process.pid)

    def stop(self) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT)
        try:
            _, complaint = self._process.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            _, complaint = self._process.communicate()
        if not self._path.exists():
            reason = (complaint.strip().splitlines() or ["no sample was taken"])[-1]
            self.note = f"no flame graph: py-spy: {reason}"


def _let_look(pid: int) -> None:
    """Where the kernel lets only parents look into a process, name the child that may look into us."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "prctl"):
        libc.prctl(PR_SET_PTRACER, pid, 0, 0, 0)
