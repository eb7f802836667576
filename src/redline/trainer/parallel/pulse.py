"""Who of a run's processes is alive, as each tells the others once a second through the store of torch.distributed.

    rank k   beat ──► store ──► rank 0 watches all of them
    rank 0   beat ──► store ──► every other watches rank 0, and the name that rank 0 writes when it misses one

A process that says nothing for `patience_s` is lost: it was killed, its machine is gone, or it stands still. A main thread that
calls `Pulse.check` gets an error. A process whose main thread waits inside a collective, which nothing can interrupt, ends
after `GRACE_S` with the message on stderr, or once the checkpoint that it is writing is on the disk; one whose main thread has
got an error and closes its run has `CLOSING_S`. So no process outlives another by more than patience_s + CLOSING_S + WRITING_S
and some seconds.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from redline.errors import RankLostError
from redline.telemetry.stalls.stacks import current_frames

EVERY_S = 1.0
GRACE_S = 5.0
"""Seconds that the main thread has to end by itself once a rank is lost."""
CLOSING_S = 60.0
"""Seconds that it has to close its run, where it has got an error by then."""
WRITING_S = 20.0
"""Seconds more that a checkpoint has to come to the disk; torchrun kills what is left of a run after 30."""
PATIENCE_S = 60.0
"""How long a process may be silent before the recipe's `trainer.rank_timeout_s` is known."""
EXIT_CODE = 1
MOST_SHOWN = 16
"""Ranks that a stall file names."""
STOOD_S = 5.0
"""From so many seconds at one line on, a rank that waits for no other is named."""
WAITING = ("torch/distributed/", "trainer/parallel/orders.py")
"""Files in which a rank waits for others."""
LOST, STOP = "lost", "stop"
HINT = "continue with --resume; under torchrun --max-restarts N the run resumes by itself"


class Pulse:
    """The thread that beats and listens. `start` it once; `close` it before the process leaves the others."""

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        """`store` is a connection of its own: the main thread may wait in another."""
        self._store = store
        self._rank, self._watched = rank, [0] if rank else list(range(1, world))
        self.patience_s = PATIENCE_S
        self.at_loss: Callable[[str], None] = lambda message: None
        """Called with the message before a process that cannot raise it ends."""
        self.doing: Callable[[], str] = lambda: ""
        """Says what this process is at, in a word."""
        self.is_closing = False
        """Whether the main thread has got an error and closes the run: it ends by itself."""
        self.lost: str = ""
        """The message about a rank that is lost; empty while all are there."""
        self.lost_rank: int | None = None
        """Which it is, where this rank found it itself."""
        self.is_writing: Callable[[], bool] = lambda: False
        """Says whether files are on their way to the disk that had better come to their end."""
        self._heard: dict[int, tuple[str, float]] = {}
        """Rank → its last beat, and when it came."""
        self._stood = "", time.monotonic()
        """Where the main thread was at the last beat, and since when."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="pulse", daemon=True)

    def start(self) -> None:
        self._beat(0)
        self._thread.start()

    def close(self) -> None:
        """Stop listening: the others may leave from now on."""
        self._closing.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * EVERY_S)

    def check(self) -> None:
        """Raise `RankLostError` where a rank is lost."""
        if self.lost:
            raise RankLostError(self.lost, HINT)

    def silences(self) -> dict[str, float]:
        """Rank 0: how long each of the others has given no sign of life, those first that have not for longest. Does not
        block."""
        now = time.monotonic()
        heard = sorted(dict(self._heard).items(), key=lambda item: item[1][1])[:MOST_SHOWN]
        return {
            f"trainer: seconds since rank {rank}, in {json.loads(beat)['at'] or 'its setup'}, gave a sign of life": now - at
            for rank, (beat, at) in heard
        }

    def stuck(self) -> dict[str, float]:
        """Rank 0: how long each of the others that wait for nobody has stood at one line, though it gives signs of life: the
        others wait for such a one. Does not block."""
        told = {rank: json.loads(beat) for rank, (beat, _) in sorted(dict(self._heard).items())}
        standing = {rank: beat for rank, beat in told.items() if beat.get("stood_s", 0.0) > STOOD_S and not beat["waits"]}
        return {
            f"trainer: seconds that rank {rank} has stood at {beat['where']}, waiting for no other": beat["stood_s"]
            for rank, beat in list(standing.items())[:MOST_SHOWN]
        }

    def say(self, key: str, value: str) -> None:
        """Write a word into the store that all ranks see."""
        self._store.set(key, value)

    def ended(self, why: str) -> None:
        """Tell the others that this process ends with an error, and which."""
        self._closing.set()
        self._store.set(f"ended/{self._rank}", why[:2000])

    def find_lost(self, within_s: float) -> str:
        """Look for a rank that has ended or is silent, for so many seconds; returns the message, empty where all are there."""
        until = time.monotonic() + within_s
        while not self.lost and time.monotonic() < until and not self._closing.wait(EVERY_S / 10):
            with self._without_store():
                self._listen()
        return self.lost

    @contextmanager
    def _without_store(self) -> Iterator[None]:
        """A store that does not answer in the block is a loss: it is beside rank 0, or beside who launched it."""
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            self.lost = f"the store of the ranks, beside rank 0, does not answer any more: {str(error).splitlines()[0]}"

    def _work(self) -> None:
        count = 0
        while not self._closing.wait(EVERY_S):
            count += 1
            with self._without_store():
                self._beat(count)
                self._listen()
            if self.lost:
                self._end()
                return

    def _beat(self, count: int) -> None:
        where, waits = _place_of_main_thread()
        if where != self._stood[0]:
            self._stood = where, time.monotonic()
        document = {
            "count": count,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "sight": _sight(),
            "at": self.doing(),
            "where": where,
            "waits": waits,
            "stood_s": time.monotonic() - self._stood[1],
        }
        self._store.set(f"beat/{self._rank}", json.dumps(document))

    def _listen(self) -> None:
        if self._rank and self._store.check([LOST]):
            self.lost = self._store.get(LOST).decode()
            return
        for rank in self._watched:
            if why := self._missing(rank):
                self.lost_rank, self.lost = rank, why
                if not self._rank:
                    self._store.set(LOST, why)
                return

    def _missing(self, rank: int) -> str:
        if not self._store.check([f"beat/{rank}"]):
            return ""  # it has not begun: its launcher watches that
        beat, now = self._store.get(f"beat/{rank}").decode(), time.monotonic()
        if self._heard.get(rank, ("", 0.0))[0] != beat:
            self._heard[rank] = beat, now
        told = json.loads(beat)
        name = f"rank {rank} of the trainer (process {told['pid']} on {told['host']})"
        if self._store.check([f"ended/{rank}"]):
            return f"{name} ended: {self._store.get(f'ended/{rank}').decode()}"
        if self.is_gone(rank):
            return f"{name} is gone"
        silent_s = now - self._heard[rank][1]
        return f"{name} has given no sign of life for {silent_s:.0f} s" if silent_s > self.patience_s else ""

    def is_gone(self, rank: int) -> bool:
        """Whether a rank is seen to have ended: not where it is out of sight, or has not begun. Any thread may ask."""
        if not self._store.check([f"beat/{rank}"]):
            return False
        told = json.loads(self._store.get(f"beat/{rank}"))
        return bool(told["sight"]) and told["sight"] == _sight() and _is_gone(told["pid"])

    def _end(self) -> None:
        """Give the main thread the time to raise and to close its run. Where it waits in a collective, end the process."""
        since = time.monotonic()
        while time.monotonic() - since < (CLOSING_S if self.is_closing else GRACE_S):
            if self._closing.wait(EVERY_S / 100):
                return
        self.at_loss(self.lost)
        until = time.monotonic() + WRITING_S
        while self.is_writing() and time.monotonic() < until:
            if self._closing.wait(EVERY_S / 10):
                return
        print(f"error: {self.lost}; rank {self._rank} waited for it and ends\n\nhint: {HINT}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def _place_of_main_thread() -> tuple[str, bool]:
    """File, line and function of the innermost call in the main thread, and whether it waits there for another rank."""
    frame = current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "", False
    place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
    files = [each.f_code.co_filename for each, _ in traceback.walk_stack(frame)]
    return place, any(part in file for file in files for part in WAITING)


def _is_gone(pid: int) -> bool:
    """Whether a process of this machine has ended, its parent having heard of it or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _sight() -> str:
    """Names the processes that this one can see; empty where the system does not say."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
