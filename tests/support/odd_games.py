"""Games that misbehave on command, by import path: worker processes make them too."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

from redline.types import Reaction, Task

OVER = threading.Event()
"""Set when a test is over: what sleeps in its process wakes up."""


class OddGame:
    """Counts the replies it was given; some of them it does not take well."""

    def __init__(self, seed: int = 0, moves: int = 3, log: str = "") -> None:
        self._moves, self._log = moves, log
        self._taken = 0

    def reset(self, task: Task) -> str:
        self._taken = 0
        self._task = task
        return f"{task.id}: {task.messages[0]['content'] if task.messages else 'play'}"

    def step(self, reply: str) -> Reaction:
        self._taken += 1
        if reply in ODD:
            ODD[reply]()
        if reply.startswith("sleep "):
            OVER.wait(float(reply.split()[1]))
        done = self._taken >= self._moves
        return Reaction(f"{reply} is move {self._taken} in process {os.getpid()}", {"moves": 1.0}, done)

    def snapshot(self) -> bytes:
        return bytes([self._taken, 255])

    def restore(self, state: bytes) -> None:
        self._taken = state[0]

    def close(self) -> None:
        if self._log:
            with Path(self._log).open("a") as log:
                log.write("closed\n")


def bad_move() -> None:
    raise ValueError("no such move")


def hang() -> None:
    time.sleep(3600)


def hang_in_c() -> None:
    """Without letting go of the interpreter."""
    ctypes.PyDLL(None).sleep(3600)


def segfault() -> None:
    ctypes.string_at(0)


def print_much() -> None:
    print("x" * 200_000)
    sys.stderr.write("y" * 200_000)


def fill_the_log() -> None:
    for _ in range(60):
        os.write(2, b"y" * 100_000)


ODD = {
    "raise": bad_move,
    "hang": hang,
    "hang in C": hang_in_c,
    "segfault": segfault,
    "exit": lambda: os._exit(3),
    "sys.exit": lambda: sys.exit(3),
    "kill": lambda: os.kill(os.getpid(), 9),
    "print": print_much,
    "fill": fill_the_log,
}


class CrashingGame:
    """Ends its process at the first move, and says why on stderr."""

    def __init__(self, seed: int = 0) -> None:
        pass

    def reset(self, task: Task) -> str:
        return "go"

    def step(self, reply: str) -> Reaction:
        os.write(2, b"no coal left\n")
        os._exit(3)
