"""Calls of the Linux kernel that Python 3.11 has no name for."""

from __future__ import annotations

import ctypes
import os
import sys

NEW_MOUNTS, NEW_NAMES, NEW_IPC, NEW_USERS = 0x00020000, 0x04000000, 0x08000000, 0x10000000
NEW_PROCESSES, NEW_NETWORK = 0x20000000, 0x40000000
READ_ONLY, NO_SETUID, NO_DEVICES, REMOUNT, BIND, RECURSIVE, PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
DETACH = 2
PARENT_DEATH_SIGNAL, DUMPABLE, SECCOMP, SUBREAPER, NO_NEW_PRIVILEGES = 1, 4, 22, 36, 38
_MOUNT_SETATTR, _PIVOT_ROOT, _CAPSET = 442, {"x86_64": 155, "aarch64": 41}, {"x86_64": 126, "aarch64": 91}
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000

MACHINE = os.uname().machine if sys.platform == "linux" else ""
"""x86_64 or aarch64 where system calls are known by number; others go without what needs that."""

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = (("set", ctypes.c_uint64), ("clear", ctypes.c_uint64), ("spread", ctypes.c_uint64), ("users", ctypes.c_uint64))


def _checked(result: int, what: str) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{what}: {os.strerror(error)}")
    return result


def syscall(number: int, *arguments: object) -> int:
    """The system call's result. Raises OSError where it has none."""
    wide = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    return _checked(_libc.syscall(ctypes.c_long(number), *wide), f"system call {number}")


def prctl(option: int, value: int, more: int = 0) -> None:
    _checked(_libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(more), 0, 0), f"prctl({option})")


def unshare(flags: int) -> None:
    _checked(_libc.unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """mount(2); a None as kind is for binds and remounts."""
    names = [source.encode(), target.encode(), kind.encode() if kind else None]
    _checked(_libc.mount(*names, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def unmount(target: str) -> None:
    _checked(_libc.umount2(target.encode(), DETACH), f"umount {target}")


def make_read_only(target: str, *, devices: bool = False) -> None:
    """A mount and all that is mounted below it: nothing can be written, no set-uid bit counts."""
    flags = READ_ONLY | NO_SETUID | (0 if devices else NO_DEVICES)  # the same bits in both interfaces
    attributes = _MountAttributes(flags, 0, 0, 0)
    try:
        at, size = ctypes.c_char_p(target.encode()), ctypes.sizeof(attributes)
        syscall(_MOUNT_SETATTR, _AT_FDCWD, at, _AT_RECURSIVE, ctypes.byref(attributes), size)
    except OSError:  # before Linux 5.12
        mount("", target, None, REMOUNT | BIND | flags)


def enter_root(folder: str) -> None:
    """Make a mounted folder the root of everything, and let go of the old one."""
    os.chdir(folder)
    here = ctypes.c_char_p(b".")
    syscall(_PIVOT_ROOT[MACHINE], here, here)
    unmount(".")
    os.chdir("/")


def drop_capabilities() -> None:
    """Have none from now on, whatever the user id is."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    syscall(_CAPSET[MACHINE], ctypes.byref(header), ctypes.byref(nothing))


def die_with_parent(parent: int) -> None:
    """Be killed when the process `parent`, which forked this one, ends. `parent` is 0 where it lives outside our namespace."""
    if sys.platform == "linux":
        prctl(PARENT_DEATH_SIGNAL, 9)
    if os.getppid() != parent:
        os._exit(1)
