"""A filter of system calls: what a program could use to reach other processes, the network, or memory that no limit counts.

It is a list of what is refused, with EPERM; system calls that are newer than the list do not exist for the program. It needs no
privileges, and works in containers that refuse namespaces.
"""

from __future__ import annotations

import ctypes
import errno
import struct

from redline.environments.code.inside.kernel import MACHINE, NO_NEW_PRIVILEGES, SECCOMP, prctl

_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NEWEST = 450
"""The last number that is known here; libraries fall back from newer ones."""

REFUSED: dict[str, tuple[int | None, int | None]] = {
    # the network, and sockets between processes: a connected pair within one program stays allowed
    "socket": (41, 198), "bind": (49, 200), "connect": (42, 203), "listen": (50, 201),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "process_mrelease": (448, 448),
    "migrate_pages": (256, 238), "move_pages": (279, 239),
    # memory that counts against no limit of a process
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219),
    # namespaces and mounts
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "mount_setattr": (442, 442), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    # large doors into the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "fanotify_init": (300, 262), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "modify_ldt": (154, None), "iopl": (172, None), "ioperm": (173, None), "personality": (135, 92),
    # the machine's own affairs
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266),
    "quotactl": (179, 60), "quotactl_fd": (443, 443), "sethostname": (170, 161), "setdomainname": (171, 162),
    "vhangup": (153, 58),
}  # fmt: skip
"""System call → its number on x86_64 and on aarch64."""

REFUSED_BESIDE_OTHERS: dict[str, tuple[int | None, int | None]] = {
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_send_signal": (424, 424), "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    # what Landlock does not refuse: the rights, owners, times and attributes of other people's files
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16), "truncate": (76, 45), "inotify_add_watch": (254, 27),
}  # fmt: skip
"""Refused as well where the program sees processes and files that are not its own."""

_CLONE, _CLONE3, _FORK, _VFORK = (56, 220), (435, 435), (57, None), (58, None)
_KILL, _TGKILL, _PRLIMIT, _FCNTL, _IOCTL, _PRCTL = (62, 129), (234, 131), (302, 261), (72, 25), (16, 29), (157, 167)
_SOCKETPAIR = (53, 199)
_NAMESPACES = 0x7E020000
_THREAD = 0x00010000
_SIGNAL_OWNERS = (8, 10, 15)  # fcntl: F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to others when a file is ready
_SOCKET_OWNERS = (0x8901, 0x8902, 0x5412)  # ioctl: FIOSETOWN, SIOCSPGRP, TIOCSTI
_PDEATHSIG, _DUMPABLE = 1, 4

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN, _AND = 0x20, 0x15, 0x25, 0x45, 0x06, 0x54
_ALLOW, _KILL_PROCESS = 0x7FFF0000, 0x80000000
_REFUSE, _UNKNOWN = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_NUMBER, _ARCH, _FIRST, _SECOND = 0, 4, 16, 24  # where struct seccomp_data has them; both machines are little-endian

Instruction = tuple[int, int, int, int]


def is_known() -> bool:
    """Whether this machine's system calls are known by number."""
    return MACHINE in _ARCHITECTURE


def install(*, may_fork: bool, alone: bool, own_pid: int) -> None:
    """Filter this process and all that it starts, for good. `alone`: it sees no processes but its own; otherwise it may signal
    only itself."""
    prctl(NO_NEW_PRIVILEGES, 1)
    instructions = _filter(may_fork=may_fork, alone=alone, own_pid=own_pid)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in instructions))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(instructions), ctypes.addressof(code)))
    prctl(SECCOMP, 2, ctypes.addressof(program))


def _filter(*, may_fork: bool, alone: bool, own_pid: int) -> list[Instruction]:
    refused = REFUSED if alone else {**REFUSED, **REFUSED_BESIDE_OTHERS}
    found: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH), (_EQUAL, 1, 0, _ARCHITECTURE[MACHINE]), (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER), (_GREATER, 0, 1, _NEWEST), (_RETURN, 0, 0, _UNKNOWN),
    ]  # fmt: skip
    found += _when(_CLONE3, [(_RETURN, 0, 0, _UNKNOWN)])  # its flags lie in memory; libraries fall back to clone
    found += _when(_CLONE, _clone(may_fork))
    if not may_fork:
        found += [*_when(_FORK, [(_RETURN, 0, 0, _REFUSE)]), *_when(_VFORK, [(_RETURN, 0, 0, _REFUSE)])]
    found += _when(_PRLIMIT, _only(_FIRST, (0,)))
    found += _when(_SOCKETPAIR, _stream_pair())
    if not alone:
        found += _when(_KILL, _only(_FIRST, (0, own_pid)))
        found += _when(_TGKILL, _only(_FIRST, (own_pid,)))
        found += _when(_FCNTL, _never(_SECOND, _SIGNAL_OWNERS))
        found += _when(_PRCTL, _never(_FIRST, (_PDEATHSIG, _DUMPABLE)))
    found += _when(_IOCTL, _never(_SECOND, _SOCKET_OWNERS))
    for numbers in refused.values():
        found += _when(numbers, [(_RETURN, 0, 0, _REFUSE)])
    return [*found, (_RETURN, 0, 0, _ALLOW)]


def _when(numbers: tuple[int | None, int | None], then: list[Instruction]) -> list[Instruction]:
    """Instructions for one system call, which end in a return; nothing where the machine does not have it."""
    number = numbers[list(_ARCHITECTURE).index(MACHINE)]
    return [] if number is None else [(_EQUAL, 0, len(then), number), *then]


def _clone(may_fork: bool) -> list[Instruction]:
    found = [(_LOAD, 0, 0, _FIRST), (_ANY_BIT, 0, 1, _NAMESPACES), (_RETURN, 0, 0, _REFUSE)]
    if not may_fork:
        found += [(_ANY_BIT, 1, 0, _THREAD), (_RETURN, 0, 0, _REFUSE)]
    return [*found, (_RETURN, 0, 0, _ALLOW)]


def _stream_pair() -> list[Instruction]:
    """A pair of connected streams. Datagrams could be sent from a pair to any address."""
    kind = [(_LOAD, 0, 0, _SECOND), (_AND, 0, 0, 0xF), (_EQUAL, 0, 1, 1), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return [(_LOAD, 0, 0, _FIRST), (_EQUAL, 1, 0, 1), (_RETURN, 0, 0, _REFUSE), *kind]


def _only(place: int, values: tuple[int, ...]) -> list[Instruction]:
    found: list[Instruction] = [(_LOAD, 0, 0, place)]
    for value in values:
        found += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*found, (_RETURN, 0, 0, _REFUSE)]


def _never(place: int, values: tuple[int, ...]) -> list[Instruction]:
    found: list[Instruction] = [(_LOAD, 0, 0, place)]
    for value in values:
        found += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _REFUSE)]
    return [*found, (_RETURN, 0, 0, _ALLOW)]
