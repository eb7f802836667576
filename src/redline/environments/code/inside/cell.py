"""A cell: where one answer is run, and the two processes of ours that watch it.

    zygote ── warden            outside: makes the namespaces, ends the cell when redline hangs up or the time is over
                └─ keeper       first process inside: starts the program once per test, feeds and reads it, clears up after it
                     └─ program and whatever it starts

A process that ends takes all below it along, however it ends.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from typing import Any, NoReturn, cast

from redline.environments.code.inside import guest, kernel, landlock, rooms, seccomp
from redline.environments.code.inside.ground import Ground, become

PATH = "/usr/local/bin:/usr/bin:/bin"
_SILENT = [(os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)]


@dataclass(slots=True, frozen=True)
class Limits:
    """What one run of a program may use."""

    time_s: float
    """Seconds, by the clock and of processor time."""
    memory_mb: int
    """Memory of each process."""
    files_mb: int
    output_kb: int
    """Kilobytes of the output, and of the errors."""
    processes: int
    """Processes and threads at once."""


def watch(job: socket.socket, channel: int, ground: Ground, serial: int) -> NoReturn:
    """The warden's life. `channel` is the descriptor over which functions are called, or -1."""
    kernel.die_with_parent(os.getppid())
    _be_first_to_go()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    gone, keeper_says = os.pipe()
    if ground.namespaces:
        rooms.leave(ground.namespaces, own_network=ground.own_network)
    warden = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        os.close(gone)
        _keep(job, channel, ground, serial, 0 if ground.namespaces else warden)
    os.close(keeper_says)
    if channel >= 0:
        os.close(channel)
    _wait_for_end(job, gone)
    os.kill(keeper, signal.SIGKILL)
    os.waitpid(keeper, 0)
    if not ground.namespaces:
        _kill_leftovers(ground, serial)
        remove_folder(_folder(ground, serial))
    os._exit(0)


def _be_first_to_go() -> None:
    """Where memory runs out, the kernel ends cells before it ends training."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _wait_for_end(job: socket.socket, keeper_gone: int) -> None:
    """Block until redline hangs up or the keeper has ended."""
    poll = select.poll()
    poll.register(job, getattr(select, "POLLRDHUP", 0))
    poll.register(keeper_gone, 0)
    while not poll.poll():
        pass


# ── the keeper ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def _keep(job: socket.socket, channel: int, ground: Ground, serial: int, parent: int) -> NoReturn:
    status = 1
    try:
        kernel.die_with_parent(parent)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the first process of a namespace hears no signal it has no handler for
        request = _read_request(job)
        keeper = Keeper(ground, serial, Limits(**request["limits"]), request, channel)
        keeper.move_in()
        for text in request["inputs"]:
            result = keeper.run(text.encode())
            _send(job, result)
            if result["limit"]:
                break  # the next would most likely take as long
        status = 0
    except (BrokenPipeError, ConnectionResetError):
        pass  # redline does not want it any more
    except BaseException as error:
        _send(job, {"broken": f"{type(error).__name__}: {error}"[:500]})
    finally:
        os._exit(status)


class Keeper:
    """Starts a program, once for each input, and watches it."""

    def __init__(self, ground: Ground, serial: int, limits: Limits, request: dict[str, Any], channel: int) -> None:
        self._ground, self._serial, self._limits, self._request, self._channel = ground, serial, limits, request, channel
        self._uid = ground.uid(serial)
        self._folder = rooms.SCRATCH if ground.namespaces else _folder(ground, serial)
        self._is_used = False

    def move_in(self) -> None:
        """Make the room. Without namespaces, children of the program become ours when it leaves them behind."""
        if self._ground.namespaces:
            rooms.furnish(self._ground.readable, self._limits.files_mb)
        elif sys.platform == "linux":
            kernel.prctl(kernel.SUBREAPER, 1)
        if sys.platform == "linux":
            kernel.prctl(kernel.DUMPABLE, 0)  # nobody looks into our memory

    def run(self, given: bytes) -> dict[str, Any]:
        """One run: what came out of it, how it ended, and which limit it met, if any. Blocks."""
        self._clear()
        pipes = [os.pipe() for _ in range(3)]
        began = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._start(pipes)
        (stdin_end, stdin), (stdout, stdout_end), (stderr, stderr_end) = pipes
        for end in (stdin_end, stdout_end, stderr_end):
            os.close(end)
        flow = Flow(stdin, given, stdout, stderr, self._limits.output_kb * 1024)
        status, limit = self._watch(pid, flow, began + self._limits.time_s)
        taken = time.monotonic() - began
        if status is None:
            status = self._end(pid)
        self._kill_all()
        flow.close()
        if status == -signal.SIGXCPU:
            limit = "time"
        return {"stdout": flow.text(0), "stderr": flow.text(1), "status": status, "limit": limit, "seconds": taken}

    def _watch(self, pid: int, flow: Flow, until: float) -> tuple[int | None, str]:
        """Serve the pipes until the program ends or meets a limit. Returns its exit status, None while it
        lives, and the limit."""
        ends = os.pidfd_open(pid) if sys.platform == "linux" else -1
        while (left := until - time.monotonic()) > 0:
            flow.serve(min(left, 0.2 if ends >= 0 else 0.02), ends)
            if flow.is_over_limit():
                return None, "output"
            if not self._ground.namespaces and _holds_too_much(self._folder, self._limits.files_mb):
                return None, "files"
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                flow.serve(0.0, -1)
                return os.waitstatus_to_exitcode(status), "output" if flow.is_over_limit() else ""
        return None, "time"

    def _end(self, pid: int) -> int:
        os.kill(pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def _kill_all(self) -> None:
        """Nothing that the program started lives on."""
        if self._ground.namespaces:
            rooms.empty_room()
        else:
            _kill_leftovers(self._ground, self._serial)

    def _clear(self) -> None:
        """An empty scratch folder for the next run."""
        if self._ground.namespaces:
            if self._is_used:
                rooms.clear_scratch(self._limits.files_mb)
        else:
            remove_folder(self._folder)
            os.mkdir(self._folder, 0o700)
            if self._uid:
                os.chown(self._folder, self._uid, self._uid)
        self._is_used = True

    # ── in the program's process ───────────────────────────────────────────────────────────────────────────────────────

    def _start(self, pipes: list[tuple[int, int]]) -> NoReturn:
        status = 1
        try:
            _connect(pipes, self._channel)
            os.chdir(self._folder)
            os.environ.clear()
            os.environ.update({"PATH": PATH, "HOME": self._folder, "TMPDIR": self._folder, "LANG": "C.UTF-8"})
            self._lock_in()
            gc.enable()
            status = self._program()
        except BaseException as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode()[:2000])
        finally:
            for stream in (sys.stdout, sys.stderr):
                try:
                    stream.flush()
                except BaseException:
                    status = status or 1
            os._exit(status & 255)

    def _lock_in(self) -> None:
        """Give up everything that the program may not have. What comes first is needed for what comes later."""
        ground, parent = self._ground, os.getppid()
        os.setsid()
        _set_limits(self._limits, count_processes=ground.may_fork, ours=2 if ground.namespaces == "user" else 0)
        if self._uid:
            become(self._uid)
        if sys.platform != "linux":
            return
        if kernel.MACHINE in ("x86_64", "aarch64"):
            kernel.drop_capabilities()
        kernel.die_with_parent(parent)
        kernel.prctl(kernel.DUMPABLE, 0)
        kernel.prctl(kernel.NO_NEW_PRIVILEGES, 1)
        if ground.landlock:
            landlock.restrict([*ground.readable, *rooms.DEVICES], [self._folder, os.devnull])
        if ground.seccomp:
            seccomp.install(may_fork=ground.may_fork, alone=bool(ground.namespaces), own_pid=os.getpid())

    def _program(self) -> int:
        request = self._request
        sys.path[:] = [*request["packages"], *(path for path in sys.path if path != request["source"])]
        if request["kind"] == "serve":
            return guest.serve(request["program"])
        if request["kind"] == "judge":
            return guest.judge(request["asserts"])
        if not request["command"]:
            return guest.run(request["program"])
        with open(request["file"], "w", encoding="utf-8") as file:
            file.write(request["program"])
        os.execvp(request["command"][0], request["command"])
        raise AssertionError("another program runs here")


class Flow:
    """What goes into a program and what comes out of it, no more than the limit."""

    def __init__(self, stdin: int, given: bytes, stdout: int, stderr: int, limit: int) -> None:
        self._stdin, self._given, self._limit = stdin, memoryview(given), limit
        self._out = {stdout: bytearray(), stderr: bytearray()}
        self._open = {stdout, stderr}
        self._texts = list(self._out.values())
        os.set_blocking(stdin, False)
        if not given:
            self._close_stdin()

    def is_over_limit(self) -> bool:
        return any(len(text) > self._limit for text in self._texts)

    def text(self, which: int) -> str:
        """0: the output, 1: the errors."""
        return bytes(self._texts[which][: self._limit]).decode(errors="replace")

    def serve(self, patience_s: float, ends: int) -> None:
        """Move what can be moved, waiting for it at most so long, or until `ends` becomes readable. With no patience, take all
        that lies ready."""
        while True:
            wants = [self._stdin] if self._stdin >= 0 else []
            reads = [*self._open, *([ends] if ends >= 0 else [])]
            ready, writable, _ = select.select(reads, wants, [], patience_s)
            if writable:
                self._feed()
            moved = [self._take(one) for one in ready if one in self._open]
            if patience_s > 0 or not any(moved) or self.is_over_limit():
                return

    def close(self) -> None:
        self._close_stdin()
        for one in self._out:
            os.close(one)

    def _feed(self) -> None:
        try:
            self._given = self._given[os.write(self._stdin, self._given[:65536]) :]
        except BrokenPipeError:
            self._given = self._given[:0]
        if not self._given:
            self._close_stdin()

    def _take(self, one: int) -> bool:
        piece = os.read(one, 65536)
        if not piece:
            self._open.discard(one)
        self._out[one] += piece
        return bool(piece)

    def _close_stdin(self) -> None:
        if self._stdin >= 0:
            os.close(self._stdin)
            self._stdin = -1


# ── parts ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read_request(job: socket.socket) -> dict[str, Any]:
    (length,) = struct.unpack("!Q", _exactly(job, 8))
    request: dict[str, Any] = json.loads(_exactly(job, length))
    return request


def _exactly(job: socket.socket, count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        piece = job.recv(min(count - len(found), 1 << 20))
        if not piece:
            raise BrokenPipeError
        found += piece
    return bytes(found)


def _send(job: socket.socket, result: dict[str, Any]) -> None:
    text = json.dumps(result).encode()
    job.sendall(struct.pack("!Q", len(text)) + text)


def _connect(pipes: list[tuple[int, int]], channel: int) -> None:
    """The program's descriptors: 0, 1 and 2 are pipes, 3 the channel, and no other is open."""
    wanted = [pipes[0][0], pipes[1][1], pipes[2][1], *([channel] if channel >= 0 else [])]
    high = [os.dup2(one, 100 + place) for place, one in enumerate(wanted)]
    for place, one in enumerate(high):
        os.dup2(one, place)
    os.closerange(len(wanted), 1 << 16)
    sys.stdin = sys.__stdin__ = _stream(0, "r")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, "w")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, "w")  # type: ignore[misc]


def _stream(descriptor: int, mode: str) -> TextIOWrapper:
    stream = open(descriptor, mode, 1 if descriptor == 2 else -1, encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    return cast(TextIOWrapper, stream)


def _set_limits(limits: Limits, *, count_processes: bool, ours: int) -> None:
    """`ours` of the processes that the kernel counts are the keeper and the warden."""
    seconds, memory = int(limits.time_s) + 1, limits.memory_mb << 20
    wanted = {
        "CPU": seconds,
        "AS": memory,
        "FSIZE": limits.files_mb << 20,
        "NOFILE": 128,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }
    if count_processes:
        wanted["NPROC"] = limits.processes + ours
    for name, value in wanted.items():
        if hasattr(resource, f"RLIMIT_{name}"):
            which = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(which)[1]
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(which, (value, value + 1 if name == "CPU" else value))


def _folder(ground: Ground, serial: int) -> str:
    return f"{ground.scratch}/{serial}"


def _holds_too_much(folder: str, files_mb: int) -> bool:
    """Whether more lies in a scratch folder than may: bytes, 4,096 files, or folders too deep to look into."""
    size = count = 0
    for here, _, files in os.walk(folder):
        count += 1 + len(files)
        if count > 4096 or len(here) > 2048:
            return True
        for name in files:
            try:
                size += os.lstat(os.path.join(here, name)).st_blocks * 512
            except OSError:
                continue
    return size > files_mb << 20


def remove_folder(folder: str) -> None:
    """Remove a folder, whatever a program has made of it: folders without rights, thousands of them in each other."""
    if not os.path.lexists(folder):
        return
    for command in (["chmod", "-R", "u+rwx", folder], ["rm", "-rf", folder]):
        os.waitpid(os.posix_spawnp(command[0], command, {"PATH": PATH}, file_actions=_SILENT), 0)


def _kill_leftovers(ground: Ground, serial: int) -> None:
    """Without namespaces: kill what a program has left. Under a user id of its own that is all of that user's; otherwise its
    orphans, which have become ours."""
    if uid := ground.uid(serial):
        pid = os.fork()
        if pid == 0:
            try:
                become(uid)
                os.kill(-1, signal.SIGKILL)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    for orphan in _children():
        os.kill(orphan, signal.SIGKILL)
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                break
        except ChildProcessError:
            break


def _children() -> list[int]:
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        return []
