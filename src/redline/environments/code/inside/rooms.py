"""A room of its own for a program: processes, network, and files, which are the system's libraries and a scratch folder."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import suppress

from redline.environments.code.inside import kernel

SCRATCH = "/scratch"
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
NAMESPACES = kernel.NEW_MOUNTS | kernel.NEW_NAMES | kernel.NEW_IPC | kernel.NEW_PROCESSES
INNER_UID = 1000
"""Who a program is inside a user namespace. Not 0: a root user would get capabilities back when it starts another program."""
_FOUNDATIONS = ("/mnt", "/media", "/srv", "/tmp", "/var/tmp")


def leave(kind: str, *, own_network: bool = True) -> None:
    """Have new namespaces; the next child is the first process in them."""
    uid, gid = os.geteuid(), os.getegid()
    kernel.unshare(NAMESPACES | own_network * kernel.NEW_NETWORK | (kind == "user") * kernel.NEW_USERS)
    if kind == "user":
        for name, text in (("setgroups", "deny"), ("uid_map", f"{INNER_UID} {uid} 1"), ("gid_map", f"{INNER_UID} {gid} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


def furnish(readable: list[str], files_mb: int) -> None:
    """Build the file system and move in: what is readable, some devices, and an empty scratch folder. There is no /proc."""
    kernel.mount("none", "/", None, kernel.RECURSIVE | kernel.PRIVATE)
    room = _foundation(readable)
    kernel.mount("room", room, "tmpfs", kernel.NO_SETUID, "size=1m,mode=755")
    for path in readable:
        if os.path.islink(path):
            os.makedirs(os.path.dirname(room + path), exist_ok=True)
            os.symlink(os.readlink(path), room + path)
        else:
            _bind(path, room + path)
            kernel.make_read_only(room + path)
    for path in DEVICES:
        _bind(path, room + path)
    os.mkdir(room + SCRATCH, 0o755)
    os.symlink(SCRATCH, f"{room}/tmp")
    os.symlink(SCRATCH, f"{room}/dev/shm")  # locks of multiprocessing are files there
    kernel.enter_root(room)
    kernel.mount("", "/", None, kernel.REMOUNT | kernel.BIND | kernel.READ_ONLY | kernel.NO_SETUID)
    lay_scratch(files_mb)
    socket.sethostname("sandbox")


def lay_scratch(files_mb: int) -> None:
    """An empty scratch folder, in memory, with no more room than the limit."""
    kernel.mount("scratch", SCRATCH, "tmpfs", kernel.NO_SETUID | kernel.NO_DEVICES, f"size={files_mb}m,nr_inodes=4096,mode=777")


def clear_scratch(files_mb: int) -> None:
    """Put a new, empty scratch folder in the place of the old one, whatever is in that."""
    os.chdir("/")
    kernel.unmount(SCRATCH)
    lay_scratch(files_mb)


def try_namespaces(kind: str, readable: list[str]) -> None:
    """Build a room and leave it again. Raises OSError where the kernel does not allow that."""
    reads, writes = os.pipe()
    leave(kind)
    pid = os.fork()
    if pid == 0:
        try:
            furnish(readable, 1)
            clear_scratch(1)
            os.write(writes, b"ok")
        except BaseException as error:
            os.write(writes, f"{error}"[:200].encode())
        finally:
            os._exit(0)
    os.close(writes)
    with open(reads, "rb") as pipe:
        words = pipe.read().decode(errors="replace")
    os.waitpid(pid, 0)
    if words != "ok":
        raise OSError(words or "the first process in the namespaces ended at once")


def empty_room() -> None:
    """Kill every process in the namespace but this one, the first, and wait until all of them are gone."""
    while True:
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _foundation(readable: list[str]) -> str:
    """A folder to build upon: one that hides nothing we need."""
    for folder in _FOUNDATIONS:
        if os.path.isdir(folder) and not any(f"{path}/".startswith(f"{folder}/") for path in readable):
            return folder
    raise OSError(f"none of {', '.join(_FOUNDATIONS)} is a folder to mount upon")


def _bind(path: str, target: str) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(path, target, None, kernel.BIND | kernel.RECURSIVE)
