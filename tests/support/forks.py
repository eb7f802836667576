"""Processes of `redline` that are forked from one that has imported everything: to import torch and transformers takes longer
than most runs of the tests. What such a process is given and leaves is what a user's has: arguments, folder, environment,
output, exit code; it can be signalled, and its functions of `atexit` are called."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from multiprocessing import forkserver
from pathlib import Path

from redline import cli

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "redline.cli",
        "redline.launch.run",
        "redline.launch.start",
        "redline.launch.workers.ray_ranks",
        "redline.serve.server",
        "redline.models.files.tiny",
        "redline.telemetry.console.unread_output",
        "numpy.ctypeslib",
        "transformers.modeling_utils",
        "transformers.tokenization_utils_tokenizers",
        "transformers.models.auto.modeling_auto",
        "transformers.models.auto.tokenization_auto",
        "transformers.models.llama.configuration_llama",
        "support.crashing_runs",
        "support.frozen",
    ]
)


def start_the_origin() -> None:
    """Start the process that others are forked from, with the environment as it is now and `tests/` on its path, where
    multiprocessing would not look for what is to be imported. Returns at once."""
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), *([before] if before else [])])
    try:
        forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before


class Forked:
    """A process that was forked; has what the tests use of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], cwd: Path, environ: dict[str, str], stdout: Path, stderr: Path) -> None:
        """Output is added to the files `stdout` and `stderr`."""
        stdout.touch()
        stderr.touch()
        self._process = FORKS.Process(target=_run, args=(arguments, cwd, environ, stdout, stderr))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        self.stdout = _Output(self, stdout)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("redline", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Output:
    """What a process prints on stdout, whole once it has ended."""

    def __init__(self, process: Forked, path: Path) -> None:
        self._process, self._path = process, path

    def read(self) -> str:
        """Blocks until the process has ended."""
        self._process.wait()
        return self._path.read_text()

    def close(self) -> None:
        pass


def _run(arguments: Sequence[str], cwd: Path, environ: dict[str, str], stdout: Path, stderr: Path) -> None:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    sys.stdout, sys.stderr = _opened(stdout, 1), _opened(stderr, 2)
    sys.argv = ["redline", *arguments]
    code = 1
    try:
        cli.main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # as the interpreter does it
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _opened(path: Path, number: int) -> TextIOWrapper:
    written = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(written, number)
    os.close(written)
    return open(number, "w", buffering=1, closefd=False)
