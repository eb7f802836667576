"""This process among those that torchrun (or anything that sets its variables) started for one run.

    rank 0     join ──► orders.give ──► … ──► dismiss ──► wait_until_left
    the rest   join ──► orders.take ──► … ──► leave

A launcher ends all ranks as soon as one has ended with an error, and rank 0 is the one that writes down why. So where an order
fails on every rank, the others end last:

    rank 0     error ──► closes ──► the run is written ──► closed
    the rest   error ──► wait_for_rank_0 ─────────────────► end

A process is one rank of one run, as it has one `RANK` in its environment, so `join` returns the same `Ranks` each time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from redline.errors import RankLostError
from redline.trainer.parallel.orders import END, Order, Orders
from redline.trainer.parallel.pulse import CLOSING_S, HINT, STOP, Pulse

MEETING = timedelta(minutes=10)
"""How long a process looks for the store of the others at its start."""
LEAVING_S = 20.0
"""How long rank 0 waits for the others to write their files and leave."""
LOOK_AROUND_S = 5.0
"""After a collective failed, how long to look for the rank that is to blame."""
SAME_ERROR_S = 2.0
"""How much later than another rank rank 0 may come to the error that every rank raises. Less than what rank 0 has before it is
ended, where it waits for that other one inside a collective."""
LAST_WORDS_S = 2.0
"""What rank 0 has to print its error, once its files are written."""
CLOSES, CLOSED = "closes", "closed"


def world_size() -> int:
    """Processes that were started together; 1 without torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def own_rank() -> int:
    return int(os.environ.get("RANK", "0"))


class Ranks:
    """The processes of a run, seen from this one."""

    def __init__(self) -> None:
        given, self.rank, self.world = next(dist.rendezvous("env://", timeout=MEETING))
        # A launcher's store outlives its processes: what those before a restart wrote is not ours.
        prefix = f"redline/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._given, self._prefix = given, prefix
        self.store = dist.PrefixStore(prefix, given)
        self.pulse = Pulse(self.connection(), self.rank, self.world)
        self.orders = Orders(self.store, self.pulse, self.world)
        self._dismissed = False
        self.over = threading.Event()
        """In rank 0: nothing more comes from the others."""
        self.pulse.start()

    def connection(self) -> dist.Store:
        """Another connection to the store, for another thread: one that waits keeps the first."""
        return dist.PrefixStore(self._prefix, self._given.clone())

    @contextmanager
    def naming_who_is_lost(self) -> Iterator[None]:
        """Around what ranks do together: an error that comes of another rank's end becomes a `RankLostError` that names it."""
        try:
            yield
        except RuntimeError as error:
            if not self.orders.is_over and (lost := self.pulse.find_lost(LOOK_AROUND_S)):
                raise RankLostError(lost, HINT) from error
            raise

    def ask_to_stop(self) -> None:
        """Have rank 0 end the run after its step, as if it had got the signal itself. Any thread may."""
        self.pulse.say(STOP, str(self.rank))

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether another rank got a signal."""
        return bool(self.store.check([STOP]))

    def dismiss(self) -> None:
        """Rank 0: tell the others that it is over. Does not block; later calls do nothing."""
        if not self._dismissed and not self.pulse.lost:
            with suppress(dist.DistError, RuntimeError):  # without a store nobody is left to be told
                self.orders.give(Order(END))
        self._dismissed = True
        self.pulse.close()

    def wait_until_left(self) -> None:
        """Rank 0: block until the others have written their files and left, some seconds at most."""
        until = time.monotonic() + (0 if self.pulse.lost else LEAVING_S)
        try:
            with suppress(dist.DistError, RuntimeError):  # as above
                while self.store.add("left", 0) < self.world - 1 and time.monotonic() < until:
                    time.sleep(0.02)
        finally:
            self.over.set()

    def closes(self) -> None:
        """Rank 0: say that an order has failed here, and that the run is being closed. Does not block."""
        self.pulse.is_closing = True
        with suppress(dist.DistError, RuntimeError):  # the error that is on its way counts
            self.store.set(CLOSES, "")

    def closed(self) -> None:
        """Rank 0: say that everything about a run that failed is written. Does not block."""
        self.over.set()
        with suppress(dist.DistError, RuntimeError):
            self.store.set(CLOSED, "")

    def wait_for_rank_0(self) -> None:
        """Another rank, which ends with an error: block until rank 0, where it has got one too, has written its files. Returns
        after `SAME_ERROR_S` where it has not."""
        until = time.monotonic() + SAME_ERROR_S
        closes = closed = False
        with suppress(dist.DistError, RuntimeError):  # the store was beside rank 0
            while time.monotonic() < until and not self.pulse.is_gone(0):
                if not closes and self.store.check([CLOSES]):
                    closes, until = True, time.monotonic() + CLOSING_S
                if closes and not closed and self.store.check([CLOSED]):
                    closed, until = True, time.monotonic() + LAST_WORDS_S
                time.sleep(0.02)

    def leave(self) -> None:
        """Another rank: say that nothing more will come from here."""
        self.pulse.close()
        self.store.add("left", 1)


@cache
def join() -> Ranks:
    """Meet the processes that were started with this one. Blocks until their store answers."""
    return Ranks()
