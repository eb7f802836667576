"""Samples of the machines of a run beside rank 0's, which has `samples.jsonl` for itself.

    there   a rank, an engine, a worker ──► sampling_host: one process of each machine ──► what connects it with rank 0
    here    what connects them ──► HostSamples.take ──► samples/node-7-3f0c61d2.jsonl

Of the run's processes on a machine, the one that holds a lock samples it. The kernel lets go of the lock however that process
ends, and another takes it within `LOOK_S` seconds. On rank 0's machine that is rank 0. Each writes itself down, so that the one
that samples does not take it for somebody else's. Rank 0 alone writes samples, so no file system has to be shared.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

from redline.errors import boundary
from redline.telemetry.machine.host import Host, machine_id
from redline.telemetry.machine.nvml import find_all_gpus
from redline.telemetry.machine.samplers import SampleLog, Sampler, Source, read_samples

LOOK_S = 5.0
"""Seconds between two tries to be the one that samples a machine."""
CLOSE_S = 3.0
"""Seconds for the last sample. A connection may be what hangs: then the thread is left behind, and ends with the process, which
has little time once a rank is lost (`trainer/parallel/pulse.py`)."""
LOCK = "lock"
CLOCK_SET_S = 60.0
"""When a process was created is told by the time of day, which may be set meanwhile."""
_MACHINE = re.compile(r"[\w-]{1,120}")
Tell = Callable[[str], None]
Send = Callable[[str, Mapping[str, Any]], None]
"""Brings a sample to rank 0: the id of the machine, and the row. May raise where rank 0 cannot be reached."""


@dataclass(slots=True, frozen=True)
class HostSampling:
    """How the processes of a run sample the machines that they are on. All of it is JSON."""

    every_s: float
    """Seconds between two samples."""
    run: str
    """Names the run, alike in all of its processes."""
    home: str
    """The machine of rank 0, which samples that itself."""
    has_gpus: bool = False
    """Whether the run's device is a GPU."""


# ── on the other machines ──────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def sampling_host(
    sampling: HostSampling | None, process: str, send: Send, tell: Tell = lambda text: None, look_s: float = LOOK_S
) -> Iterator[None]:
    """Inside the block this process samples its machine, unless that is rank 0's or another process of the run does. `process`
    is what the samples call this one. `send` is called from a thread."""
    if sampling is None:
        yield
        return
    if machine_id() == sampling.home:
        with _written_down(sampling, process, tell):
            yield
        return
    closing = threading.Event()
    work = _Work(sampling, process, send, tell, look_s, closing)
    thread = threading.Thread(target=work.run, name="host sampler", daemon=True)
    thread.start()
    try:
        yield
    finally:
        closing.set()
        thread.join(CLOSE_S)


@contextmanager
def _written_down(sampling: HostSampling, process: str, tell: Tell) -> Iterator[None]:
    """Inside the block rank 0, which samples this machine, counts this process as one of the run's."""
    with ExitStack() as stack:
        with boundary() as caught:
            stack.enter_context(Roll(sampling))
        if caught.error is not None:
            tell(f"samples take {process} for another program's: {type(caught.error).__name__}: {caught.error}")
        yield


@dataclass(slots=True, frozen=True)
class _Work:
    """What the thread of a process does."""

    sampling: HostSampling
    process: str
    send: Send
    tell: Tell
    look_s: float
    closing: threading.Event

    def run(self) -> None:
        with boundary() as caught, Roll(self.sampling) as roll:
            self._sample_in_turn(roll)
        if caught.error is not None:
            self.tell(f"{self.process} does not sample its machine: {type(caught.error).__name__}: {caught.error}")

    def _sample_in_turn(self, roll: Roll) -> None:
        """Wait for the lock, and sample for as long as this process works."""
        while not roll.lock():
            if self.closing.wait(self.look_s):
                return
        gpus = find_all_gpus() if self.sampling.has_gpus else None
        sources: list[Source] = [lambda: {"process": self.process}, Host(roll.others), *([gpus] if gpus else [])]
        with Sampler(_Sent(self.send), self.sampling.every_s, sources, tell=self.tell):
            self.closing.wait()


@dataclass(slots=True, frozen=True)
class _Sent:
    """Sends samples to rank 0. Implements `Samples`."""

    send: Send

    def write(self, sample: Mapping[str, Any]) -> None:
        self.send(machine_id(), sample)

    def close(self) -> None:
        pass


class Roll:
    """The run's processes on this machine, as they have written themselves down, and the lock that one of them holds. It is a
    folder of this machine, whatever else is shared, and gone with the last of them."""

    def __init__(self, sampling: HostSampling) -> None:
        told = hashlib.sha256(f"{sampling.home} {sampling.run} {machine_id()}".encode()).hexdigest()[:16]
        self._folder = Path(tempfile.gettempdir()) / f"redline-samples-{os.getuid()}-{told}"
        self._own = self._folder / str(os.getpid())
        self._lock: int | None = None

    def __enter__(self) -> Roll:
        """Write this process down. Raises OSError where that cannot be."""
        for is_last in (False, False, True):
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if self._folder.lstat().st_uid != os.getuid():
                raise PermissionError(f"{self._folder} belongs to another user")
            try:
                self._own.write_text(str(psutil.Process().create_time()))
                break
            except FileNotFoundError:  # the last of those before has just removed it
                if is_last:
                    raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._own.unlink(missing_ok=True)
        if self._lock is not None:
            (self._folder / LOCK).unlink(missing_ok=True)
            os.close(self._lock)
        with suppress(OSError):  # others are here
            self._folder.rmdir()

    def lock(self) -> bool:
        """Take the lock, where no other process has it. The kernel frees it however this one ends."""
        path = self._folder / LOCK
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file), path.stat()):  # else who had it has just removed it
                self._lock = file
                return True
        except BlockingIOError:
            pass
        os.close(file)
        return False

    def others(self) -> list[psutil.Process]:
        """Those that live, but for this one. One that was killed is struck off."""
        found = []
        for path in self._folder.glob("[0-9]*"):
            with suppress(OSError, ValueError):
                if path == self._own:
                    continue
                if (process := _process_since(int(path.name), float(path.read_text()))) is not None:
                    found.append(process)
                else:
                    path.unlink(missing_ok=True)
        return found


def _process_since(pid: int, created: float) -> psutil.Process | None:
    """The process with this id that was created then; None where it is gone, whoever has its id now."""
    try:
        process = psutil.Process(pid)
        return process if abs(process.create_time() - created) < CLOCK_SET_S else None
    except psutil.Error:
        return None


# ── in rank 0 ──────────────────────────────────────────────────────────────────────────────────────────────────────────


class HostSamples:
    """Inside its block, writes what other machines send, a file for each. Any thread may hand over samples."""

    def __init__(self, folder: Path, sampling: HostSampling, tell: Tell) -> None:
        """`folder` is made with the first sample. What cannot be written is told once, and then let go."""
        self.sampling = sampling
        self._folder, self._tell = folder, tell
        self._lock = threading.Lock()
        self._logs: dict[str, SampleLog] = {}
        self._is_open = False
        self._closed = threading.Event()

    def __enter__(self) -> HostSamples:
        self._is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        with self._lock:
            self._is_open = False
            self._closed.set()
            for log in self._logs.values():
                log.close()

    def wait_until_closed(self, limit_s: float) -> bool:
        """Block for so many seconds at most. Returns whether the block has ended."""
        return self._closed.wait(limit_s)

    def take(self, machine: str, sample: Mapping[str, Any]) -> None:
        """Append a sample to the file of a machine; let it go outside the block. Raises ValueError for what is no machine's
        name or no sample."""
        if not _MACHINE.fullmatch(machine) or not isinstance(sample.get("time"), float) or "host" not in sample:
            raise ValueError(f"{machine!r} sent what is no sample")
        with self._lock:
            if not self._is_open:
                return
            with boundary() as caught:
                self._log(machine).write(sample)
            if caught.error is not None:
                self._is_open = False
                self._tell(f"no more samples of other machines are written: {type(caught.error).__name__}: {caught.error}")

    def _log(self, machine: str) -> SampleLog:
        if machine not in self._logs:
            self._folder.mkdir(exist_ok=True)
            self._logs[machine] = SampleLog(self._folder / f"{machine}.jsonl")
        return self._logs[machine]


# ── for readers ────────────────────────────────────────────────────────────────────────────────────────────────────────


def sampled_hosts(folder: Path) -> dict[str, Path]:
    """Host name → the file of its samples, for the machines beside rank 0's. Of several with one name, or one that was started
    anew, each has the name of its file."""
    files = sorted(folder.glob("*.jsonl"))
    names = [_host_in(path) or path.stem for path in files]
    return {name if names.count(name) == 1 else path.stem: path for name, path in zip(names, files, strict=True)}


def _host_in(path: Path) -> str | None:
    found = next(read_samples(path), {}).get("host")
    return found if isinstance(found, str) else None
