"""Child processes that answer with lines of JSON: a peer or a revision that keeps its model loaded, a worker that holds games,
or one try that leaves nothing behind when it ends.

    parent   Child(command) ── a line on stdin ──►  child
             ask, read      ◄─ a line of JSON ───   reply(document)
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

LINES_SHOWN = 15
"""Lines of its stderr that a failure shows."""
PATIENCE_S = 30.0
"""Seconds that a child has to end once its input has."""
KILLED = -9
"""Exit code of a process that the kernel ended, usually for want of memory."""
LOG_BYTES = 4 << 20
"""A child's stderr is kept up to this; all but the newest of it is then let go."""
KEPT_BYTES = 64 << 10
"""The newest part of it, which is kept."""
LOOK_S = 1.0
"""Seconds after which the size of a child's stderr is looked at again while an answer is waited for."""
_PR_SET_PDEATHSIG = 1


class ChildError(Exception):
    """A child ended without the answer, with an error, or not in time. Who started it says what that means to a user."""

    def __init__(self, code: int | None, lines: Sequence[str], limit_s: float | None = None) -> None:
        self.code = code
        """Its exit code; None where it had not answered within `limit_s`, and was killed."""
        self.lines = list(lines)
        """The last of what it wrote to stderr."""
        what = f"not done after {limit_s:g} s" if code is None else f"ended with exit code {code}"
        super().__init__(":\n".join([what, "\n".join(self.lines)] if self.lines else [what]))


class Child:
    """One child process. A context manager; it is gone when the block ends, or after `close`."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        patience_s: float = PATIENCE_S,
        own_group: bool = False,
    ) -> None:
        """Starts it and returns at once. `env` is added to this process's environment. With `own_group`, Ctrl-C in a terminal
        does not reach it, and what it started itself is killed with it."""
        self._patience_s, self._own_group = patience_s, own_group
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
        self._log_lock = threading.Lock()
        """Held while the log is cut or closed: a number of a file that was closed may be that of another."""
        self._process = subprocess.Popen(
            list(command),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **(env or {})},
            start_new_session=own_group,
        )
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._first: list[str | None] = []
        """The answer that `has_answer` has seen."""
        threading.Thread(target=self._receive, name="child answers", daemon=True).start()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put(None)

    def ask(self, line: str, limit_s: float | None = None) -> dict[str, Any]:
        """Sends a line and blocks until the answer is there. Raises `ChildError` as `read` does."""
        assert self._process.stdin is not None
        self._bound_log()
        try:
            print(line, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        return self.read(limit_s)

    def has_answer(self, limit_s: float) -> bool:
        """Blocks until `read` would not, because of an answer or of its end, but for `limit_s` seconds at most."""
        with contextlib.suppress(queue.Empty):
            self._first = self._first or [self._next(limit_s)]
        return bool(self._first)

    def read(self, limit_s: float | None = None) -> dict[str, Any]:
        """Blocks until its next answer. Raises `ChildError` where it ends without one, and kills it where none has come after
        `limit_s` seconds."""
        try:
            line = self._first.pop() if self._first else self._next(limit_s)
        except queue.Empty:
            self.kill()
            raise ChildError(None, self.last_lines(), limit_s) from None
        if line is None:
            raise self._ended()
        document: dict[str, Any] = json.loads(line)
        return document

    def _next(self, limit_s: float | None) -> str | None:
        """Block until the next line, None at the end, and let go of old words of a child that writes without end meanwhile.
        Raises `queue.Empty` after `limit_s` seconds."""
        until = None if limit_s is None else time.monotonic() + limit_s
        while True:
            self._bound_log()
            left = LOOK_S if until is None else until - time.monotonic()
            try:
                return self._answers.get(timeout=max(0.0, min(LOOK_S, left)))
            except queue.Empty:
                if left <= LOOK_S and until is not None:
                    raise

    def finish(self) -> None:
        """Blocks until it has ended by itself. Raises `ChildError` where it ended with an error."""
        if self._process.wait():
            raise self._ended()

    def close(self) -> None:
        """Ends its input and waits for it to end; kills it where it takes longer than `patience_s`."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(self._patience_s)
        except subprocess.TimeoutExpired:
            self.kill()
        with self._log_lock:
            self._log.close()

    def kill(self) -> None:
        """Ends it at once. Any thread may, also while another waits for an answer. Blocks until it is gone."""
        if self._own_group and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def code(self) -> int | None:
        """Its exit code; None while it is alive."""
        return self._process.poll()

    def _bound_log(self) -> None:
        # The child writes through the same open file: where this one goes back to, the child goes on.
        with self._log_lock:
            if not self._log.closed:
                _keep_newest(self._log.fileno())

    def _ended(self) -> ChildError:
        return ChildError(self._process.wait(), self.last_lines())

    def last_lines(self) -> list[str]:
        """The last of what it wrote to stderr."""
        file = self._log.fileno()
        newest = os.pread(file, KEPT_BYTES, max(0, os.fstat(file).st_size - KEPT_BYTES))  # there may be gigabytes
        return newest.replace(b"\0", b"").decode(errors="replace").splitlines()[-LINES_SHOWN:]

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def bound_stderr() -> None:
    """Called by a child now and then: where its stderr is a file that has outgrown `LOG_BYTES`, keep the newest part of it
    alone."""
    _keep_newest(2)


def _keep_newest(file: int) -> None:
    status = os.fstat(file)
    if stat.S_ISREG(status.st_mode) and status.st_size > LOG_BYTES:
        newest = os.pread(file, KEPT_BYTES, status.st_size - KEPT_BYTES)
        os.lseek(file, 0, os.SEEK_SET)  # first: what somebody writes meanwhile is not far behind the end
        os.ftruncate(file, 0)
        os.write(file, newest)


def die_with(parent: int) -> None:
    """Called by a child: have the kernel kill this process when the thread that started it ends, also while C code holds the
    interpreter."""
    import ctypes  # for children alone: their parents need it not

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before it could be said
        os._exit(1)


def end_soon_after(parent: int, patience_s: float = PATIENCE_S) -> None:
    """Called by a child that ends by itself when its input does, unless it hangs: start a thread that ends it some seconds
    after the process that started it. Returns at once."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(min(LOOK_S, patience_s))
        time.sleep(patience_s)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def only_answer(command: Sequence[str], limit_s: float | None = None) -> dict[str, Any]:
    """Starts a child that answers once, and blocks until it has ended. Raises `ChildError`."""
    with Child(command) as child:
        answer = child.read(limit_s)
        child.finish()
        return answer


def take_stdout() -> Callable[[Mapping[str, Any]], None]:
    """Called by a child before anything prints: returns the function that sends an answer. Everything else that is printed goes
    to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def reply(document: Mapping[str, Any]) -> None:
        print(json.dumps(document), file=answers, flush=True)

    return reply
