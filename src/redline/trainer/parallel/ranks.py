"""This process among those that torchrun (or anything that sets its variables) started for one run.

    rank 0     join ──► orders.give ──► … ──► dismiss ──► wait_until_left
    the rest   join ──► orders.take ──► … ──► leave

A process is one rank of one run, as it has one `RANK` in its environment, so `join` returns the same `Ranks` each time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from redline.errors import RankLostError
from redline.trainer.parallel.orders import END, Order, Orders
from redline.trainer.parallel.pulse import HINT, STOP, Pulse

MEETING = timedelta(minutes=10)
"""How long a process looks for the store of the others at its start."""
LEAVING_S = 20.0
"""How long rank 0 waits for the others to write their files and leave."""
LOOK_AROUND_S = 5.0
"""After a collective failed, how long to look for the rank that is to blame."""


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
            self.orders.give(Order(END))
        self._dismissed = True
        self.pulse.close()

    def wait_until_left(self) -> None:
        """Rank 0: block until the others have written their files and left, some seconds at most."""
        until = time.monotonic() + (0 if self.pulse.lost else LEAVING_S)
        while self.store.add("left", 0) < self.world - 1 and time.monotonic() < until:
            time.sleep(0.02)

    def leave(self) -> None:
        """Another rank: say that nothing more will come from here."""
        self.pulse.close()
        self.store.add("left", 1)


@cache
def join() -> Ranks:
    """Meet the processes that were started with this one. Blocks until their store answers."""
    return Ranks()
