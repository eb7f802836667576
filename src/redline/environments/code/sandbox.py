"""Runs programs that nobody trusts, in processes of their own. Any thread may ask; a call blocks until the program has ended.

    redline ──control──► zygote ──fork──► cell          one socket per job: the request goes in, results come out
                                                        closing it ends the cell, and so does the end of this process

What a test expects never leaves this process: a cell gets programs, inputs and calls, and gives outputs and values.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from redline.environments.code.inside.cell import Limits
from redline.environments.code.inside.values import LONGEST, NotPlainError, Pairs, pack, unpack
from redline.errors import TaskError

SOURCE = str(Path(__file__).parents[3])
"""The folder that holds the package `redline`: the zygote imports its own part from there."""
NO_RESULT = "a cell ended before it had a result: something outside has killed it"
VERDICT_KB = 4
"""Output of a judge for each assert, at most: 600 characters, each as an escape of JSON."""
START_S, SET_UP_S = 60.0, 30.0
"""Seconds that a busy machine may take to start the zygote, and to set a cell up."""
_ZYGOTE = "redline.environments.code.inside.zygote"
_START = (
    "import sys, importlib; sys.path.insert(0, sys.argv[1]); "
    "importlib.import_module(sys.argv[2]).main(int(sys.argv[3]), sys.argv[4])"
)


@dataclass(slots=True, frozen=True)
class Ran:
    """How one run of a program went."""

    stdout: str
    stderr: str
    status: int
    """Exit status; the negative number of the signal that ended it."""
    limit: str
    """The limit that ended it: time, output or files; empty where none did."""
    seconds: float


@dataclass(slots=True, frozen=True)
class Called:
    """What came of one call of a program's function."""

    value: Any = None
    problem: str = ""
    """Why there is no value."""


@dataclass(slots=True, frozen=True)
class Program:
    """What to run."""

    text: str
    command: tuple[str, ...] = ()
    """What runs the file `file`, which holds the text; nothing: our own Python does."""
    file: str = "answer.py"


class Sandbox:
    """A zygote and the jobs that it was given. The zygote starts with the first job, and again if something ends it."""

    def __init__(self, limits: Limits, *, packages: Sequence[str] = (), without: Sequence[str] = ()) -> None:
        """`packages` are folders from which programs may import. `without` names protections to leave off, to see what happens
        where a machine does not have them."""
        self.limits, self._packages = limits, [os.path.abspath(path) for path in packages]
        scratch = f"{tempfile.gettempdir()}/redline-code-{os.geteuid()}"
        self._settings = json.dumps({"readable": self._packages, "scratch": scratch, "without": list(without)})
        self._lock = threading.Lock()
        self._zygote: _Zygote | None = None
        self._is_closed = False

    @property
    def protections(self) -> Mapping[str, Any]:
        """The fields of `inside.ground.Ground`: what is on, and why the rest is off. Starts the zygote if need be."""
        with self._lock:
            return self._started().ground

    @property
    def pid(self) -> int:
        """The zygote's process id."""
        with self._lock:
            return self._started().process.pid

    def run(self, program: Program, inputs: Sequence[str]) -> list[Ran]:
        """Run a program once for each input. Those after one that met a limit are not run."""
        request = {"kind": "run", "program": program.text, "command": program.command, "file": program.file, "inputs": inputs}
        with self._job(request, self.limits.time_s * len(inputs)) as job:
            runs = list(job.results())
        if len(runs) < len(inputs) and not (runs and runs[-1].limit):
            raise broken(NO_RESULT)
        return runs

    def call(self, program: str, calls: Sequence[str]) -> tuple[list[Called], Ran | None]:
        """Define a program's functions in one process and evaluate these expressions there, in order. Returns their values, and
        how the process went, None where it had to be ended; those after one that took too long are not evaluated."""
        ours, theirs = socket.socketpair()
        with ours, self._job({"kind": "serve", "program": program}, self.limits.time_s * (len(calls) + 1), theirs) as job:
            found, hangs = _evaluate(_Channel(ours), calls, self.limits.time_s)
            ours.close()
            ran = None if hangs else next(job.results(), None)
        if ran is None and not hangs:
            raise broken(NO_RESULT)
        return found, ran

    def judge(self, program: str, asserts: Sequence[str]) -> list[str]:
        """Run asserts in a process of their own, which calls the program's functions in another. Returns for each why it
        failed, or nothing where it held."""
        one, other = socket.socketpair()
        seconds = self.limits.time_s * (len(asserts) + 1)
        with (
            self._job({"kind": "serve", "program": program}, seconds, one),
            self._job({"kind": "judge", "asserts": asserts}, seconds, other) as judging,
        ):
            ran = next(judging.results(), None)
        if ran is None:
            raise broken(NO_RESULT)
        return _verdicts(ran, len(asserts))

    def close(self) -> None:
        """End the zygote and every cell. Blocks for some seconds at most."""
        with self._lock:
            self._is_closed = True
            self._end()

    # ── jobs ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def _job(self, request: Mapping[str, Any], seconds: float, channel: socket.socket | None = None) -> Iterator[_Job]:
        """A job under way. When the block ends, so does its cell: waits until it is gone."""
        ours, theirs = socket.socketpair()
        limits = self.limits if request["kind"] == "run" else replace(self.limits, time_s=seconds)
        if request["kind"] == "judge":
            limits = replace(limits, output_kb=limits.output_kb + VERDICT_KB * len(request["asserts"]))
        whole = {
            "inputs": [""],
            "command": (),
            "packages": self._packages,
            "source": SOURCE,
            "limits": asdict(limits),
            **request,
        }
        text = json.dumps(whole).encode()
        with ours:
            with theirs:
                self._hand_over([theirs] if channel is None else [theirs, channel])
            if channel:
                channel.close()
            job = _Job(ours, time.monotonic() + seconds + SET_UP_S)
            job.send(struct.pack("!Q", len(text)) + text)
            yield job
            job.end()

    def _hand_over(self, sockets: Sequence[socket.socket]) -> None:
        with self._lock:
            for again in (True, False):
                try:
                    self._started().hand_over([one.fileno() for one in sockets])
                    return
                except OSError:
                    if not again:
                        raise
                    self._end()  # it was ended from outside: another takes its place

    def _end(self) -> None:
        if self._zygote:
            self._zygote.close()
        self._zygote = None

    def _started(self) -> _Zygote:
        if self._is_closed:
            raise broken("it is closed")
        if self._zygote is None:
            self._zygote = _Zygote(self._settings)
            weakref.finalize(self, self._zygote.close)
        return self._zygote


class _Zygote:
    """The process that forks cells."""

    def __init__(self, settings: str) -> None:
        ours, theirs = socket.socketpair()
        python = getattr(sys, "_base_executable", sys.executable)
        flags = ["-s", "-S", "-P", "-B", "-X", "utf8"]
        with theirs:
            self.process = subprocess.Popen(
                [python, *flags, "-c", _START, SOURCE, _ZYGOTE, str(theirs.fileno()), settings],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()], cwd="/",
                env={"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONHASHSEED": "0"}, start_new_session=True,
            )  # fmt: skip
        self._control = ours
        self.ground: Mapping[str, Any] = json.loads(_first_line(ours, self.process))
        if "broken" in self.ground:
            raise broken(self.ground["broken"])

    def hand_over(self, descriptors: Sequence[int]) -> None:
        socket.send_fds(self._control, [b"job\n"], list(descriptors))

    def close(self) -> None:
        """Hang up, and wait until it has cleared up."""
        self._control.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class _Job:
    """Our end of a job's socket."""

    def __init__(self, ours: socket.socket, until: float) -> None:
        self._socket, self._until = ours, until

    def send(self, data: bytes) -> None:
        self._socket.settimeout(SET_UP_S)
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise broken(f"a cell took no job: {error}") from error

    def results(self) -> Iterator[Ran]:
        """Each result as it comes; no more when the cell has ended."""
        while head := self._exactly(8):
            (length,) = struct.unpack("!Q", head)
            result = json.loads(self._exactly(length))
            if "broken" in result:
                raise broken(result["broken"])
            yield Ran(**result)

    def end(self) -> None:
        """Hang up, and wait until the cell is gone."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._until = time.monotonic() + SET_UP_S
        while self._read(1 << 16):
            pass

    def _exactly(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            piece = self._read(count - len(found))
            if not piece:
                return b""
            found += piece
        return found

    def _read(self, count: int) -> bytes:
        self._socket.settimeout(max(0.001, self._until - time.monotonic()))
        try:
            return self._socket.recv(count)
        except (TimeoutError, ConnectionResetError):
            return b""


class _Channel:
    """Our end of the socket over which functions are called. What comes from there is the program's: nothing is believed."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket, self._rest = ours, b""

    def send(self, request: Mapping[str, Any]) -> None:
        self._socket.settimeout(1.0)
        self._socket.sendall(pack(request))

    def reply(self, seconds: float) -> Mapping[str, Any]:
        """The next line. Raises TimeoutError, EOFError where the program ended, NotPlainError where it wrote something else."""
        until = time.monotonic() + seconds
        while b"\n" not in self._rest:
            if len(self._rest) > LONGEST:
                raise NotPlainError("the value is too long")
            self._socket.settimeout(max(0.001, until - time.monotonic()))
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise EOFError
            self._rest += piece
        line, _, self._rest = self._rest.partition(b"\n")
        reply = unpack(line, hashed=False)
        if not isinstance(reply, Pairs):
            raise NotPlainError("not a reply")
        return {key: value for key, value in reply[:3] if isinstance(key, str)}


def broken(reason: str) -> TaskError:
    """The sandbox itself does not work; no answer is at fault."""
    return TaskError(
        f"the sandbox for programs: {reason}", "`redline env check code` says which protections this machine allows"
    )


def _evaluate(channel: _Channel, calls: Sequence[str], time_s: float) -> tuple[list[Called], bool]:
    """The value of each call, and whether the program did not come to an end."""
    found: list[Called] = []
    hangs = False
    try:
        if channel.reply(time_s + SET_UP_S).get("loaded") is not True:
            return [Called(problem="the program did not load")] * len(calls), hangs
        for call in calls:
            channel.send({"eval": call})
            found.append(_called(channel.reply(time_s)))
    except TimeoutError:
        hangs = True
        found.append(Called(problem=f"no result within {time_s:g} s"))
    except (EOFError, OSError):
        found.append(Called(problem="the program ended before it returned"))
    except NotPlainError as error:
        found.append(Called(problem=str(error)))
    not_called = Called(problem="not called: the call before it did not return")
    return [*found, *[not_called] * (len(calls) - len(found))], hangs


def _called(reply: Mapping[str, Any]) -> Called:
    if "value" in reply:
        return Called(reply["value"])
    return Called(problem=str(reply.get("error", "no value"))[:2000])


def _verdicts(ran: Ran, count: int) -> list[str]:
    try:
        found = json.loads(ran.stdout)
    except ValueError:
        found = []
    if len(found) != count:
        return [f"no result within the limits ({ran.limit})" if ran.limit else "the asserts did not end"] * count
    return ["" if verdict is None else str(verdict) for verdict in found]


def _first_line(ours: socket.socket, process: subprocess.Popen[bytes]) -> bytes:
    ours.settimeout(START_S)
    found = b""
    try:
        while not found.endswith(b"\n"):
            piece = ours.recv(1 << 16)
            if not piece:
                raise broken(f"its process ended at once, with status {process.wait()}")
            found += piece
    except TimeoutError as error:
        process.kill()
        raise broken(f"its process did not start within {START_S:g} s") from error
    ours.settimeout(None)
    return found
