"""Samples of the machines of trainer ranks, on their way to rank 0 through the store that all ranks have.

    rank k    RankSamples.send ──► samples/1/0 … 63, a ring, and samples/1: how many there were
    rank 0    take_samples: a thread that reads, once a second, what is new ──► HostSamples

Senders count themselves: there is one on each machine, however many ranks it has. A ring keeps the store small where rank 0
takes nothing. A store that does not answer ends the samples; the pulse says whose fault it is.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from redline.telemetry.machine.hosts import HostSamples

EVERY_S = 1.0
KEPT = 64
"""Samples of a machine that wait for rank 0; the oldest give way."""
SENDERS = "samplers"


class RankSamples:
    """Sends the samples of a machine. For one thread."""

    def __init__(self, connect: Callable[[], dist.Store]) -> None:
        """`connect` gives a connection to the store of its own, and is called with the first sample."""
        self._connect = connect
        self._store: dist.Store | None = None
        self._number, self._count = 0, 0

    def send(self, machine: str, sample: Mapping[str, Any]) -> None:
        """Leave a sample for rank 0. Raises RuntimeError where the store does not answer."""
        if self._store is None:
            self._store = self._connect()
            self._number = int(self._store.add(SENDERS, 1))
        document = {"index": self._count, "machine": machine, "sample": dict(sample)}
        self._store.set(_slot(self._number, self._count), json.dumps(document))
        self._count += 1
        self._store.set(_counter(self._number), str(self._count))


class RankSampleReader:
    """Reads what ranks have left. For one thread."""

    def __init__(self, store: dist.Store, hosts: HostSamples) -> None:
        self._store, self._hosts = store, hosts
        self._taken: dict[int, int] = {}
        """Sender → samples that were read, or had given way."""

    def read(self) -> None:
        """Hand over what is new. Raises RuntimeError where the store does not answer."""
        for sender in range(1, int(self._store.add(SENDERS, 0)) + 1):
            if not self._store.check([_counter(sender)]):
                continue
            count = int(self._store.get(_counter(sender)))
            for index in range(max(self._taken.get(sender, 0), count - KEPT), count):
                document = json.loads(self._store.get(_slot(sender, index)))
                if document["index"] == index:  # else a newer one has taken its place, and is read in its turn
                    self._hosts.take(document["machine"], document["sample"])
            self._taken[sender] = count


def take_samples(store: dist.Store, hosts: HostSamples) -> None:
    """Rank 0: have a thread read what other ranks leave until `hosts` is closed. `store` is a connection for that alone."""

    def read() -> None:
        reader = RankSampleReader(store, hosts)
        with suppress(dist.DistError, RuntimeError):  # the store is gone: the pulse tells of that
            while not hosts.wait_until_closed(EVERY_S):
                reader.read()

    threading.Thread(target=read, name="samples of ranks", daemon=True).start()


def _counter(sender: int) -> str:
    return f"samples/{sender}"


def _slot(sender: int, index: int) -> str:
    return f"samples/{sender}/{index % KEPT}"
