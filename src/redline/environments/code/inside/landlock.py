"""Landlock: the kernel lets a process give up files, without privileges and without namespaces (Linux 5.13 and later)."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from redline.environments.code.inside.kernel import NO_NEW_PRIVILEGES, prctl, syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_FOLDER = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Interface version → rights over files that it knows; 16 from version 5 on."""


def version() -> int:
    """The kernel's interface version; 0 where it has none, or may not be used."""
    try:
        return syscall(_CREATE, None, 0, 1)
    except OSError:
        return 0


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Give up every file that is not below these, every TCP port, and signals to processes outside, as far as this kernel
    knows how to; for good, and for all that this process starts."""
    known = version()
    rights = (1 << _NUM_RIGHTS.get(known, 16)) - 1
    network, scopes = (3 if known >= 4 else 0), (3 if known >= 6 else 0)
    rules = struct.pack("QQQ", rights, network, scopes)[: 24 if known >= 6 else 16 if known >= 4 else 8]
    buffer = ctypes.create_string_buffer(rules, len(rules))
    ruleset = syscall(_CREATE, buffer, len(rules), 0)
    for path in readable:
        _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_FOLDER)
    for path in writable:
        _allow(ruleset, path, rights)
    prctl(NO_NEW_PRIVILEGES, 1)
    syscall(_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # what cannot be opened needs no right
    if not os.path.isdir(path):
        rights &= _EXECUTE | _WRITE_FILE | _READ_FILE
    rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, place))
    syscall(_ADD, ruleset, 1, rule, 0)
    os.close(place)
