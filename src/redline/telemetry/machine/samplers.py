"""`samples.jsonl`: what host and devices were doing, once a second, from a thread beside the run.

    Host ─┐
    Gpus ─┼─► Sampler ──► {"time": 1731672000.25, "step": 12, "host/cpu_percent": 187.0, "gpu/0/power_w": 412.5, …} ─► SampleLog
    memory┘

A source gives a part of each sample when it is called. Nothing here can stop a run: a source that fails is named once and no
longer asked, and so is a file that cannot be written. Machines beside that of rank 0 have files of their own (`hosts.py`).

A file that has become large is thinned: its newest quarter stays as it is, and of all before it half of the samples, evenly in
time. It covers the whole run, the older part the more coarsely the longer the run; `telemetry/samples_left_out` counts what
went.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from redline.errors import boundary
from redline.telemetry.files.bounded import Stretch, between, last_lines, lines_of, rewrite
from redline.telemetry.files.durable import drop_torn_line
from redline.telemetry.files.metrics import MetricsLog
from redline.telemetry.files.tail import parse_row
from redline.telemetry.machine.host import host_name
from redline.telemetry.spans import idle_as, span

Source = Callable[[], Mapping[str, Any]]
"""A part of a sample, by `section/name_unit`. Called from the sampler's thread."""
PATIENCE_S = 5.0
"""For the sample under way, when all is to end: a driver may be what hangs."""
MAX_BYTES = 64 << 20
"""The limit of `samples.jsonl`: at one sample a second, 8 to 24 hours pass before the first samples are thinned."""
LEFT_OUT = "telemetry/samples_left_out"


class SampleLog:
    """A file of samples, which is thinned when it has become large."""

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES) -> None:
        """Goes on with a file that is there. Raises OSError where it cannot be opened."""
        drop_torn_line(path)
        self._path, self._max_bytes = path, max_bytes
        self._left_out = samples_left_out(path)
        self._file = path.open("ab", buffering=0)  # of a write that fails nothing is left for `close` to fail on

    def write(self, sample: Mapping[str, Any]) -> None:
        """Append a sample, which is in the file when this returns. Raises OSError where it cannot be."""
        if self._file.tell() > self._max_bytes:
            self._thin()
        left_out = {LEFT_OUT: self._left_out} if self._left_out else {}
        self._file.write(json.dumps({**sample, **left_out}).encode() + b"\n")

    def close(self) -> None:
        self._file.close()

    def _thin(self) -> None:
        older = between(self._path, 0, self._max_bytes // 4)
        lines = list(lines_of(self._path, older))
        kept = _spread(lines, len(lines) // 2)
        rewrite(self._path, [*kept, Stretch(older.end, self._path.stat().st_size)])
        self._left_out += len(lines) - len(kept)
        self._file.close()
        self._file = self._path.open("ab", buffering=0)


class Samples(Protocol):
    """Where samples go: into a file of this machine, or to rank 0 on another."""

    def write(self, sample: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class Sampler:
    """Samples while it is open, and once more when it closes, so that the shortest run has one."""

    def __init__(
        self,
        samples: Samples,
        every_s: float,
        sources: Sequence[Source],
        *,
        step: Callable[[], int] | None = None,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`step` gives the number of steps taken, where that is known here; `tell` shows a line to a person. Both are called
        from the thread. `samples` is closed with the sampler."""
        self._samples = samples
        self._every_s = every_s
        self._sources = list(sources)
        self._step = step
        self._tell = tell
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="sampler", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(PATIENCE_S)
        if not self._thread.is_alive():  # else it is left behind with its file, and ends with the process
            self._samples.close()
            for source in self._sources:
                getattr(source, "close", lambda: None)()

    def __enter__(self) -> Sampler:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    # ── the thread ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _work(self) -> None:
        idle_as("wait.for_next_sample")
        due = time.monotonic() + self._every_s
        while not self._closing.wait(max(0.0, due - time.monotonic())):
            if not self._take():
                return
            due = max(due, time.monotonic()) + self._every_s
        self._take()

    def _take(self) -> bool:
        """Whether it was written."""
        with span("telemetry.sample"):
            started = time.perf_counter()
            sample: dict[str, Any] = {"time": time.time()}
            sample |= {"step": self._step()} if self._step else {}
            sample["host"] = host_name()
            for source in list(self._sources):
                with boundary() as caught:
                    sample |= source()
                if caught.error is not None:
                    self._sources.remove(source)
                    self._say(f"{_name_of(source)} is sampled no longer", caught.error)
            sample["telemetry/sample_s"] = time.perf_counter() - started
            with boundary() as caught:
                self._samples.write(sample)
        if caught.error is not None:
            self._say("no more samples are taken", caught.error)
        return caught.error is None

    def _say(self, what: str, error: Exception) -> None:
        self._tell(f"{what}: {type(error).__name__}: {error}")


def read_samples(path: Path) -> Iterator[dict[str, Any]]:
    """The samples of a run, finished, killed or still running; empty where it took none."""
    return MetricsLog.read(path) if path.exists() else iter(())


def _spread(lines: Sequence[bytes], most: int) -> list[bytes]:
    """At most so many of them, the first of each of as many equal stretches of time."""
    times = [float(json.loads(line)["time"]) for line in lines]
    begin, length = times[0], max(1e-9, times[-1] - times[0])
    stretches = [min(most - 1, int((time - begin) / length * most)) for time in times]
    return [line for line, own, before in zip(lines, stretches, [-1, *stretches], strict=False) if own > before]


def samples_left_out(path: Path) -> int:
    """Return how many samples the log of a run has let go, as its last sample has it; 0 where it has none."""
    lines = last_lines(path, 1 << 16).splitlines() if path.exists() else []
    newest = next((row for line in reversed(lines) if (row := parse_row(line)) is not None), {})
    return int(newest.get(LEFT_OUT) or 0)


def _name_of(source: Source) -> str:
    return getattr(source, "__name__", type(source).__name__)
