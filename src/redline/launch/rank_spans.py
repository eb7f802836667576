"""Spans of trainer ranks whose machines do not see the run folder, on their way to rank 0 through the store of all ranks.

    rank k    its span file, in a folder of its own machine ──► SpanSender ──► spans/1/0 … 3, and spans/1/sent
    rank 0    take_spans: a thread that reads, four times a second ──► SpanCopies ──► spans/rank-1-4711.jsonl, and spans/1/taken

A sender leaves no more than `AT_ONCE` pieces that were not taken, so that the store stays small; the rest waits in its file. It
answers what rank 0 asks of its clock before the first piece. A store that does not answer ends it; the pulse says whose fault
that is.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import TracebackType

import torch.distributed as dist

from redline.launch.workers.span_copies import SpanCopies, SpanSource
from redline.telemetry import Recorder, RunFolder
from redline.telemetry.processes import measure_offset, recording_process

EVERY_S, SOON_S = 0.25, 0.02
AT_ONCE = 4
"""Pieces of a sender that the store holds, of at most a mebibyte each."""
CLOSE_S = 3.0
"""Seconds for the last pieces, as for the last sample: a process has little time once a rank is lost."""
ASKED = 16
"""Times that a clock is asked for."""
ANSWER = timedelta(seconds=10)
SENDERS = "span senders"


def mark_of(folder: Path) -> str:
    """Tells a run folder from one of the same name on another machine's disk; empty where it does not say when it was begun."""
    try:
        return hashlib.sha256(RunFolder(folder, folder).environment.read_bytes()).hexdigest()
    except OSError:
        return ""


def sees(folder: Path, mark: str) -> bool:
    """Whether this machine sees the run folder of rank 0, which has this mark."""
    return folder.is_dir() and mark_of(folder) == mark


@contextmanager
def recording_rank(rank: int, folder: Path, mark: str, connect: Callable[[], dist.Store]) -> Iterator[Recorder | None]:
    """Inside the block the spans of this rank are recorded: into the run folder where this machine sees the one that has this
    mark, else to rank 0 through the store, of which `connect` gives a connection of its own."""
    name = f"rank-{rank}"
    if sees(folder, mark):
        with recording_process(name, folder / "spans") as recorder:
            yield recorder
        return
    try:
        own = tempfile.TemporaryDirectory(prefix="redline-spans-", ignore_cleanup_errors=True)
    except OSError as error:
        print(f"spans of rank {rank} are not recorded: {error}", file=sys.stderr, flush=True)
        yield None
        return
    with own as here, SpanSender(Path(here), connect), recording_process(name, Path(here)) as recorder:
        yield recorder


class SpanSender:
    """Inside its block, sends what is added to the span files of a folder."""

    def __init__(self, folder: Path, connect: Callable[[], dist.Store]) -> None:
        self._spans, self._connect = SpanSource(folder), connect
        self._closing = threading.Event()
        self._until = float("inf")
        self._thread = threading.Thread(target=self._send_all, name="spans of this rank", daemon=True)

    def __enter__(self) -> SpanSender:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._until = time.monotonic() + CLOSE_S
        self._closing.set()
        self._thread.join(CLOSE_S)

    def _send_all(self) -> None:
        with suppress(dist.DistError, RuntimeError):  # rank 0 is gone: the pulse tells of that
            store = self._connect()
            key = f"spans/{store.add(SENDERS, 1)}"
            if not self._is_asked(store, key):
                return
            _answer(store, key)
            sent, is_last = 0, False
            while not is_last:
                is_last = self._closing.wait(EVERY_S)
                for name, place, data in self._spans.changes():
                    if not self._is_room(store, key, sent):
                        return
                    head = json.dumps({"file": name, "place": place})
                    store.set(_slot(key, sent), f"{head}\n{data.decode()}")
                    sent += 1
                    store.set(f"{key}/sent", str(sent))
            while time.monotonic() < self._until and _count(store, f"{key}/taken") < sent:
                time.sleep(SOON_S)

    def _is_asked(self, store: dist.Store, key: str) -> bool:
        """Block until rank 0 asks for the clock of this process: it asks one rank after the other, and one that stands still
        keeps it for a while. False where this process has to end first."""
        while not store.check([f"{key}/clock/0/asked"]):
            if time.monotonic() > self._until:
                return False
            time.sleep(SOON_S if self._closing.wait(EVERY_S) else 0)
        return True

    def _is_room(self, store: dist.Store, key: str, sent: int) -> bool:
        """Block until rank 0 has taken enough; False where this process has to end first."""
        while sent - _count(store, f"{key}/taken") >= AT_ONCE:
            if time.monotonic() > self._until:
                return False
            time.sleep(SOON_S)
        return True


class SpanReader:
    """Reads what ranks have left. For one thread."""

    def __init__(self, store: dist.Store, folder: Path) -> None:
        """`folder` is the run's `spans`."""
        self._store, self._folder = store, folder
        self._senders: dict[str, tuple[SpanCopies, int] | None] = {}
        """Key of a sender → where its spans are written, and how many pieces were; None where it did not tell its clock."""

    def read(self) -> None:
        """Write what is new. Raises RuntimeError where the store does not answer."""
        for number in range(len(self._senders) + 1, int(self._store.add(SENDERS, 0)) + 1):
            self._senders[f"spans/{number}"] = self._meet(f"spans/{number}")
        for key, met in self._senders.items():
            if met:
                self._senders[key] = met[0], self._take(key, *met)

    def _meet(self, key: str) -> tuple[SpanCopies, int] | None:
        try:
            clock = measure_offset(_Clock(self._store, key), ASKED)
        except dist.DistStoreError:  # it was killed, or stands still: the pulse tells of that
            return None
        return SpanCopies(self._folder, clock), 0

    def _take(self, key: str, copies: SpanCopies, taken: int) -> int:
        """Returns how many pieces are taken now."""
        sent = _count(self._store, f"{key}/sent")
        for index in range(taken, sent):
            head, _, data = self._store.get(_slot(key, index)).partition(b"\n")
            about = json.loads(head)
            copies.write(about["file"], about["place"], data)
            self._store.set(_slot(key, index), "")
            self._store.set(f"{key}/taken", str(index + 1))
        return sent


def take_spans(store: dist.Store, folder: Path, over: threading.Event) -> None:
    """Rank 0: have a thread read what other ranks leave until it is over. `store` is a connection for that alone. `folder` is
    the run's `spans`."""

    def read() -> None:
        reader = SpanReader(store, folder)
        with suppress(dist.DistError, RuntimeError):  # the store is gone, and with it those who would send
            while not over.wait(EVERY_S):
                reader.read()

    threading.Thread(target=read, name="spans of ranks", daemon=True).start()


# ── a clock, through the store ─────────────────────────────────────────────────────────────────────────────────────────


class _Clock:
    """Asks a sender for its clock; each time under another key, since a key that is there is not waited for."""

    def __init__(self, store: dist.Store, key: str) -> None:
        self._store, self._key, self._count = store, key, 0

    def __call__(self) -> int:
        asked = f"{self._key}/clock/{self._count}"
        self._count += 1
        self._store.set(f"{asked}/asked", "")
        self._store.wait([f"{asked}/told"], ANSWER)
        return int(self._store.get(f"{asked}/told"))


def _answer(store: dist.Store, key: str) -> None:
    """Tell this process's clock as often as rank 0 asks."""
    for count in range(ASKED):
        asked = f"{key}/clock/{count}"
        store.wait([f"{asked}/asked"], ANSWER)
        store.set(f"{asked}/told", str(time.perf_counter_ns()))


def _slot(key: str, index: int) -> str:
    return f"{key}/{index % AT_ONCE}"


def _count(store: dist.Store, key: str) -> int:
    return int(store.get(key)) if store.check([key]) else 0
