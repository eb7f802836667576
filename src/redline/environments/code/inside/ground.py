"""What a cell stands on: which protections this machine allows, found out once by trying each of them."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from redline.environments.code.inside import landlock, rooms, seccomp

FIRST_UID, NUM_UIDS = 1 << 30, 1 << 12
"""User ids from here on belong to jobs: so many to each zygote."""
FIRST_SMALL_UID, NUM_SMALL_UIDS = 61_000, 4_000
"""Where a container has no large user ids."""
UNKNOWN_MACHINE = f"system calls of {os.uname().machine} are not known by number"
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc/ld.so.cache", "/etc/alternatives")


@dataclass(slots=True)
class Ground:
    """The protections that are on."""

    readable: list[str]
    """Folders and files that a program may read: the system's programs and libraries, and Python's."""
    scratch: str
    """Folder for scratch folders, where there are no namespaces."""
    namespaces: str = ""
    """`root` (made with a root user's rights), `user` (within a user namespace), or none."""
    first_uid: int = 0
    """Each job runs under a user id of its own, from here on; 0 where it runs under ours."""
    num_uids: int = 1
    seccomp: bool = False
    landlock: int = 0
    """Version of the kernel's interface; used where there are no namespaces."""
    own_network: bool = True
    """Each cell has a network of its own, without any connection; otherwise all share one such, and can open no socket."""
    missing: dict[str, str] = field(default_factory=dict)
    """Protection that is off → why."""

    @property
    def may_fork(self) -> bool:
        """Whether a program may have several processes: where the kernel counts them (not for root, and per user id or user
        namespace), or where nothing can keep it from that."""
        return bool(self.first_uid) or (self.namespaces == "user" and os.geteuid() != 0) or not self.seccomp

    def uid(self, serial: int) -> int:
        """The user id of a job; 0 where jobs have none of their own."""
        return self.first_uid and self.first_uid + serial % self.num_uids


def survey(readable: list[str], scratch: str, without: list[str]) -> Ground:
    """Try every protection in a child process, and keep those that work. `without` names those to leave off, for tests."""
    ground = Ground(_readable(readable), scratch)
    if sys.platform != "linux":
        reason = f"{sys.platform} does not have it"
        ground.missing = dict.fromkeys(("namespaces", "own_uid", "seccomp", "landlock"), reason)
        return ground
    for name, attempt in (("namespaces", _namespaces), ("own_uid", _own_uid), ("seccomp", _seccomp), ("landlock", _landlock)):
        why = "switched off" if name in without else attempt(ground)
        if why:
            ground.missing[name] = why
    return ground


def become(uid: int) -> None:
    """Run under a user id and group of its own from now on, for good; capabilities go with root."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)


# ── one function per protection: switches it on, or returns why it cannot be had ───────────────────────────────────────


def _namespaces(ground: Ground) -> str:
    why = UNKNOWN_MACHINE
    if not seccomp.is_known():
        return why
    for kind in ("root", "user") if os.geteuid() == 0 else ("user",):
        why = _tried(lambda kind=kind: rooms.try_namespaces(kind, ground.readable))  # type: ignore[misc]
        if not why:
            ground.namespaces = kind
            break
    return why


def _own_uid(ground: Ground) -> str:
    if os.geteuid() != 0:
        return "only root can give programs a user id of their own"
    if ground.namespaces == "user":
        return "a user namespace has one user"
    mine = FIRST_UID + os.getpid() % (1 << 17) * NUM_UIDS
    why = ""
    for first, count in ((mine, NUM_UIDS), (FIRST_SMALL_UID, NUM_SMALL_UIDS)):
        why = _tried(lambda first=first: _read_python_as(first, ground))  # type: ignore[misc]
        if not why:
            ground.first_uid, ground.num_uids = first, count
            break
    return why


def _seccomp(ground: Ground) -> str:
    if not seccomp.is_known():
        return UNKNOWN_MACHINE
    ground.seccomp = not (why := _tried(_refuse_a_socket))
    return why


def _landlock(ground: Ground) -> str:
    if ground.namespaces:
        return ""  # what it would refuse is not there
    ground.landlock = landlock.version()
    return "" if ground.landlock else "the kernel has no Landlock, or it is switched off"


def _read_python_as(uid: int, ground: Ground) -> None:
    become(uid)
    if not ground.namespaces:  # in a room, the folders on the way to Python are made anew
        with open(os.__file__, "rb") as library:
            library.read(1)


def _refuse_a_socket() -> None:
    seccomp.install(may_fork=False, alone=False, own_pid=os.getpid())
    try:
        socket.socket().close()
    except PermissionError:
        return
    raise OSError("the filter lets sockets through")


def _tried(attempt: Callable[[], None]) -> str:
    """Why `attempt` failed in a child process; empty where it did not."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            attempt()
            os.write(writes, b"ok")
        except BaseException as error:
            os.write(writes, f"{type(error).__name__}: {error}"[:200].encode())
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        words = pipe.read().decode(errors="replace")
    os.waitpid(pid, 0)
    return "" if words == "ok" else words or "the kernel ended the process that tried"


def _readable(extra: list[str]) -> list[str]:
    found: list[str] = []
    for path in (*_SYSTEM, sys.base_prefix, sys.base_exec_prefix, os.path.dirname(os.__file__), *extra):
        covered = any(f"{path}/".startswith(f"{other}/") for other in found if not os.path.islink(other))
        if os.path.lexists(path) and not covered:
            found.append(path)
    return found
