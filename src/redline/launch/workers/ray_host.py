"""The actor that holds a process on a node of a Ray cluster.

    driver, rank 0                             node
    HostedProcess ─── start, news ────────►  actor: ProcessHost ──► process: `redline train …`, an engine's worker
                  ◄── lines, exit code ────                     ◄── stdout, stderr

An actor does no work: the process does, as it would without Ray, and exchanges tensors with others by its own connections. Ray
only says where it runs and when its node is gone. Actor and process end together (`ray_hosted.py`).
"""

from __future__ import annotations

import os
import platform
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redline

NEWS_S = 5.0
"""Seconds that an actor waits for something to tell."""
LINES_KEPT = 10_000
"""Lines that wait to be asked for; older ones are let go."""
_SET_BY_RAY = ("OMP_NUM_THREADS",)
"""What Ray sets in its workers by the number of their CPUs; a recipe decides it here."""


@dataclass(slots=True, frozen=True)
class Job:
    """What a process is to run."""

    module: str
    arguments: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of the node."""
    folder: str | None = None
    """Its working folder; None is the actor's."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Name → text of files that are put into a folder of its own; `{files}` in an argument is that folder."""


class ProcessHost:
    """What the actor does. Methods return plain values; Ray calls them, several at once."""

    def __init__(self) -> None:
        self._news: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._began = threading.Event()
        self._problem = ""
        self._files = ""

    def describe(self) -> dict[str, str]:
        """Name this node, and say which redline it has."""
        import ray

        return {
            "address": str(ray.util.get_node_ip_address()),
            "host": socket.gethostname(),
            "pid": str(os.getpid()),
            "redline": redline.__version__,
            "python": platform.python_version(),
            "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        }

    def free_port(self) -> int:
        """A port of this node that nobody uses now."""
        with socket.socket() as sock:
            sock.bind(("", 0))
            return int(sock.getsockname()[1])

    def reads(self, path: str) -> str | None:
        """The text of a small file; None where this node does not see it."""
        try:
            return Path(path).read_text()
        except (OSError, ValueError):
            return None

    def has_folder(self, path: str) -> bool:
        """Whether this node has the folder."""
        return Path(path).is_dir()

    def start(self, job: Job) -> int:
        """Start the process and return its id. Raises OSError where that fails."""
        # The kernel ends the process with the thread that started it: that thread waits for it, whatever Ray does with its own.
        threading.Thread(target=self._run, args=(job,), name="hosted process", daemon=True).start()
        self._began.wait()
        if self._process is None:
            raise OSError(self._problem)
        return self._process.pid

    def news(self, wait_s: float = NEWS_S) -> list[tuple[str, Any]]:
        """What happened since the last call, at least one thing unless `wait_s` seconds pass: `("out", line)`, `("err", line)`,
        and at last `("end", exit code)`."""
        found: list[tuple[str, Any]] = []
        with suppress(queue.Empty):
            found.append(self._news.get(timeout=wait_s))
            while len(found) < 1000:
                found.append(self._news.get_nowait())
        return found

    def signal(self, number: int) -> None:
        """Send a signal to the process, where it is alive."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """End the process and what it started in its group, at once."""
        if self._process is not None and self._process.poll() is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    # ── in the thread of the process ───────────────────────────────────────────────────────────────────────────────────

    def _run(self, job: Job) -> None:
        with tempfile.TemporaryDirectory(prefix="redline-") as files:
            try:
                self._process = self._popen(job, files)
            except OSError as error:
                self._problem = str(error)
                return
            finally:
                self._began.set()
            readers = [threading.Thread(target=self._read, args=(kind,), daemon=True) for kind in ("out", "err")]
            for reader in readers:
                reader.start()
            code = self._process.wait()
            for reader in readers:
                reader.join(5.0)  # what it started may hold its output open
            self._news.put(("end", code))

    def _popen(self, job: Job, files: str) -> subprocess.Popen[str]:
        for name, text in job.files.items():
            Path(files, name).write_text(text)
        arguments = [argument.replace("{files}", files) for argument in job.arguments]
        env = {name: value for name, value in os.environ.items() if name not in _SET_BY_RAY}
        return subprocess.Popen(
            [sys.executable, "-m", "redline.launch.workers.ray_hosted", str(os.getpid()), job.module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**env, "PYTHONUNBUFFERED": "1", **job.env},
            cwd=job.folder,
            start_new_session=True,  # Ctrl-C in the driver's terminal reaches the run by way of the driver
        )

    def _read(self, kind: str) -> None:
        assert self._process is not None
        stream = self._process.stdout if kind == "out" else self._process.stderr
        assert stream is not None
        for line in stream:
            if self._news.qsize() > LINES_KEPT:  # nobody has asked for long
                with suppress(queue.Empty):
                    self._news.get_nowait()
            self._news.put((kind, line.rstrip("\n")))
