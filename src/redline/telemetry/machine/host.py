"""What the machine says of this process, its children, and what is left for them."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

CHILDREN_EVERY_S = 10.0
"""How often to look for new children: that means to read every process of the machine."""
CGROUP = Path("/sys/fs/cgroup")
THREADS = Path("/proc/self/task")
LOOPBACK = ("lo", "lo0")
"""As Linux calls it, and macOS."""
HOST_VARIABLE = "REDLINE_HOST"
BOOT = Path("/proc/sys/kernel/random/boot_id")


def host_name() -> str:
    """What samples call this machine: the name that `REDLINE_HOST` gives it, else its host name."""
    return os.environ.get(HOST_VARIABLE) or socket.gethostname()


def machine_id() -> str:
    """Names this machine, since it was started, among those of a run, where two may have one host name: `node-7-3f0c61d2`. Can
    be the name of a file."""
    name = re.sub(r"[^\w-]+", "_", host_name())[:100]
    return f"{name}-{BOOT.read_text()[:8]}" if BOOT.exists() else name


class Host:
    """A source of samples: `host/…`, and `process/PID/…` of every child. Rates are those since the last call."""

    def __init__(self, others: Callable[[], Iterable[psutil.Process]] = tuple) -> None:
        """`others` gives processes that count as children of this one, with their own."""
        self._others = others
        self._me = _Watched(psutil.Process())
        self._children: dict[int, _Watched] = {}
        self._children_known_until = 0.0
        self._network = _network_bytes()
        self._waited_ns = waits_for_cores()
        self._at = time.monotonic()
        self._machine, self._machine_percent = _Ticks.now(), 0.0
        self._find_children()

    def __call__(self) -> dict[str, float]:
        now = time.monotonic()
        seconds, self._at = max(1e-9, now - self._at), now
        me = self._me.use()
        assert me is not None, "this process lives"
        if now > self._children_known_until:
            self._find_children()
        children = {pid: use for pid, child in self._children.items() if (use := child.use())}
        self._children = {pid: self._children[pid] for pid in children}
        everyone = [me, *children.values()]
        before, self._network = self._network, _network_bytes()
        memory = memory_limits()
        ticks = _Ticks.now()
        if ticks.total > self._machine.total:  # else nothing was counted since: it is counted in hundredths of a second
            self._machine_percent, self._machine = ticks.busy_percent_since(self._machine), ticks
        waited_before, self._waited_ns = self._waited_ns, waits_for_cores()
        waited = [ns - waited_before.get(thread, 0) for thread, ns in self._waited_ns.items()]
        return {
            "host/cpu_percent": me.cpu_percent,
            "host/children_cpu_percent": sum(use.cpu_percent for use in children.values()),
            "host/machine_cpu_percent": self._machine_percent,
            "host/cores": usable_cores(),
            **({"host/core_wait_percent": 100 * max(waited) / 1e9 / seconds} if waited else {}),
            "host/processes": len(everyone),
            "host/threads": sum(use.threads for use in everyone),
            "host/open_files": self._me.num_open_files(),
            "host/rss_bytes": me.rss,
            "host/children_rss_bytes": sum(use.rss for use in children.values()),
            "host/available_bytes": memory.available,
            "host/total_bytes": memory.total,
            **_disk_rates(everyone, seconds),
            "host/network_received_bytes_per_s": (self._network.received - before.received) / seconds,
            "host/network_sent_bytes_per_s": (self._network.sent - before.sent) / seconds,
            **{f"process/{pid}/cpu_percent": use.cpu_percent for pid, use in children.items()},
            **{f"process/{pid}/rss_bytes": use.rss for pid, use in children.items()},
        }

    def _find_children(self) -> None:
        self._children_known_until = time.monotonic() + CHILDREN_EVERY_S
        me, others = psutil.Process(), list(self._others())
        for child in [*me.children(recursive=True), *others, *(each for other in others for each in _children_of(other))]:
            if child.pid not in self._children and child.pid != me.pid:
                with contextlib.suppress(psutil.Error):
                    self._children[child.pid] = _Watched(child)


def _children_of(process: psutil.Process) -> list[psutil.Process]:
    """Its children, and theirs; none where it has ended."""
    try:
        return list(process.children(recursive=True))
    except psutil.Error:
        return []


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class _Ticks(NamedTuple):
    """What the cores of the machine have done so far, in seconds. `psutil.cpu_percent` remembers the last look of each thread
    by itself: in the thread that samples its first answer is 0, whatever the machine does."""

    busy: float
    total: float

    @classmethod
    def now(cls) -> _Ticks:
        times = psutil.cpu_times()._asdict()
        total = sum(times.values()) - times.get("guest", 0.0) - times.get("guest_nice", 0.0)  # counted as user time too
        return cls(total - times["idle"] - times.get("iowait", 0.0), total)

    def busy_percent_since(self, before: _Ticks) -> float:
        return min(100.0, max(0.0, 100 * (self.busy - before.busy) / (self.total - before.total)))


class _Use(NamedTuple):
    """What one process has used since the last look."""

    cpu_percent: float
    """User and system; 100 is one core."""
    rss: int
    threads: int
    read_bytes: int | None
    written_bytes: int | None
    """None for both where the system does not count them for each process (macOS)."""


def _disk_rates(everyone: Sequence[_Use], seconds: float) -> dict[str, float]:
    """What these processes read and wrote in so many seconds, together; nothing where the system does not count it."""
    read, written = [use.read_bytes for use in everyone], [use.written_bytes for use in everyone]
    if None in read or None in written:
        return {}
    return {
        "host/disk_read_bytes_per_s": sum(size or 0 for size in read) / seconds,
        "host/disk_written_bytes_per_s": sum(size or 0 for size in written) / seconds,
    }


class _Watched:
    """A process, and where its counters stood."""

    def __init__(self, process: psutil.Process) -> None:
        self._process = process
        self._disk: tuple[int, int] | None = None
        self.use()

    def use(self) -> _Use | None:
        """None once it has ended."""
        try:
            with self._process.oneshot():
                before, self._disk = self._disk or (0, 0), self._disk_bytes()
                return _Use(
                    cpu_percent=self._process.cpu_percent(),
                    rss=self._process.memory_info().rss,
                    threads=self._process.num_threads(),
                    read_bytes=None if self._disk is None else self._disk[0] - before[0],
                    written_bytes=None if self._disk is None else self._disk[1] - before[1],
                )
        except (psutil.Error, OSError):
            return None

    def _disk_bytes(self) -> tuple[int, int] | None:
        """Read and written so far."""
        if not hasattr(self._process, "io_counters"):
            return None
        disk = self._process.io_counters()
        return disk.read_bytes, disk.write_bytes

    def num_open_files(self) -> int:
        """Counted by listing a directory, since the kernel keeps no count: for this process only, not for every child."""
        return int(self._process.num_fds())


def waits_for_cores(threads: Path = THREADS) -> dict[str, int]:
    """Thread of this process → ns in which it could have run and had no core. Empty where the kernel does not count that."""
    waited = {}
    for thread in threads.glob("*/schedstat"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # it has ended meanwhile
            waited[thread.parent.name] = int(thread.read_text().split()[1])
    return waited


class _Network(NamedTuple):
    received: int
    sent: int


def _network_bytes() -> _Network:
    """Bytes of the machine, over every interface but loopback."""
    interfaces = [use for name, use in psutil.net_io_counters(pernic=True).items() if name not in LOOPBACK]
    return _Network(sum(use.bytes_recv for use in interfaces), sum(use.bytes_sent for use in interfaces))


class MemoryLimits(NamedTuple):
    """Bytes."""

    total: int
    available: int


def memory_limits(cgroup: Path = CGROUP) -> MemoryLimits:
    """The limits of the machine, or of the container where that allows less."""
    machine = psutil.virtual_memory()
    limit = _number(cgroup / "memory.max")
    if limit is None or limit >= machine.total:
        return MemoryLimits(machine.total, machine.available)
    # Files that were read and not touched since are dropped before anybody is refused memory.
    used = (_number(cgroup / "memory.current") or 0) - _inactive_file(cgroup)
    return MemoryLimits(limit, min(machine.available, max(0, limit - used)))


def _number(path: Path) -> int | None:
    """None where there is no such file, or no limit in it ("max")."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _inactive_file(cgroup: Path) -> int:
    with contextlib.suppress(OSError):
        for line in (cgroup / "memory.stat").read_text().splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                return int(value)
    return 0
