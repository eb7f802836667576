"""The zygote: a Python that has loaded what most programs import, and forks a cell for each job.

It reads no program and no input: those go to the cell, over the job's own socket. So a program, which is a copy of the zygote,
finds nothing of other jobs in its memory.
"""

from __future__ import annotations

import dataclasses
import fcntl
import gc
import importlib
import json
import os
import signal
import site
import socket
import stat
import sys
from contextlib import suppress
from typing import NoReturn

from redline.environments.code.inside import cell, kernel
from redline.environments.code.inside.cell import remove_folder
from redline.environments.code.inside.ground import Ground, survey

MESSAGE = b"job\n"
PRELOADED = (
    "array", "base64", "bisect", "cmath", "collections", "copy", "datetime", "decimal", "enum", "fractions", "functools",
    "hashlib", "heapq", "io", "itertools", "json", "math", "operator", "queue", "random", "re", "statistics", "string",
    "textwrap", "time", "typing", "unicodedata",
)  # fmt: skip


def main(control_fd: int, settings: str) -> None:
    """Serve jobs until redline hangs up. `settings` is JSON: readable, scratch, without."""
    wanted = json.loads(settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for redline, which hangs up when it ends
    control = socket.socket(fileno=control_fd)
    for name in PRELOADED:
        importlib.import_module(name)
    site.setquit()  # programs call `exit()`, which Python has only with its packages
    try:
        folder = _claim_scratch(wanted["scratch"])
    except OSError as error:
        control.sendall(json.dumps({"broken": f"no folder for scratch files: {error}"}).encode() + b"\n")
        return
    ground = survey(wanted["readable"], folder, wanted["without"])
    if ground.namespaces == "root" and ground.seccomp:
        kernel.unshare(kernel.NEW_NETWORK)  # one for all cells: making and clearing one takes longer than a run
        ground.own_network = False
    control.sendall(json.dumps(dataclasses.asdict(ground)).encode() + b"\n")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel takes the wardens away
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would copy the memory that cells share with us
    _serve(control, ground)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    remove_folder(folder)


def _serve(control: socket.socket, ground: Ground) -> None:
    serial = 0
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, len(MESSAGE), 2)
        if not message:
            return
        serial += 1
        if os.fork() == 0:
            control.close()
            _become_warden(descriptors, ground, serial)
        for descriptor in descriptors:
            os.close(descriptor)


def _become_warden(descriptors: list[int], ground: Ground, serial: int) -> NoReturn:
    try:
        job = socket.socket(fileno=descriptors[0])
        cell.watch(job, descriptors[1] if len(descriptors) > 1 else -1, ground, serial)
    except BaseException as error:
        print(f"redline code sandbox: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(1)


def _claim_scratch(base: str) -> str:
    """A folder for scratch folders that is this process's while it, or a cell of it, lives. Those of the dead are removed."""
    with suppress(FileExistsError):
        os.mkdir(base, 0o711)
    found = os.lstat(base)  # in a folder where anybody may write, somebody else may have been here first
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise PermissionError(f"{base} is not a folder of this user's alone")
    with open(f"{base}/lock", "w") as turns:
        fcntl.flock(turns, fcntl.LOCK_EX)
        for name in os.listdir(base):
            if name.isdigit() and _is_dead(f"{base}/{name}"):
                remove_folder(f"{base}/{name}")
        mine = f"{base}/{os.getpid()}"
        os.mkdir(mine, 0o711)
        held = os.open(f"{mine}/lock", os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        fcntl.flock(held, fcntl.LOCK_EX)  # open for good: whoever has a copy of it is alive
    return mine


def _is_dead(folder: str) -> bool:
    try:
        with open(f"{folder}/lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False  # held, or none of ours
    return True
