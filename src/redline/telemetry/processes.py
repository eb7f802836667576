"""Spans of the other processes of a run: workers of an environment, actors on another machine.

    with recording_process("rewards"):                    in the worker
        with span("reward.score", version=3): ...

A worker writes `spans/rewards-4711.jsonl` in the run folder that its environment names (`REDLINE_SPANS`, which the run sets and
children inherit; a Ray actor gets it by `runtime_env`). At the end the run puts all of them on its own clock, into `trace.json`
and `ledger.json`. The policy version in a span's arguments says what belongs together.

Two processes of one machine share a clock. For others, `measure_offset` asks over whatever connection there is:

    keep_offset(file, measure_offset(lambda: ray.get(actor.clock_ns.remote())))
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.telemetry.files.bounded import Stretch, between, lines_of, rewrite
from redline.telemetry.files.durable import write_json
from redline.telemetry.files.metrics import MetricsLog
from redline.telemetry.ledger import LaneLedger, Ledger, ledger_from_spans
from redline.telemetry.spans import Recorder, recording

SPANS_VARIABLE = "REDLINE_SPANS"
FLUSH_S = 1.0
"""What a worker that is killed may lose."""
MAX_BYTES = 16 << 20
"""The limit of a worker's file, 130,000 spans: its beginning and its newest stretch; the sums in its ledger are of all."""


@dataclass(slots=True, frozen=True)
class Clock:
    """Where the clock of the spans stands, and on which machine."""

    boot: str
    """Names one start of one machine, whose processes share a clock; empty where the system does not say."""
    spans_ns: int
    wall_ns: int

    @classmethod
    def here(cls) -> Clock:
        path = Path("/proc/sys/kernel/random/boot_id")
        boot = path.read_text().strip() if path.exists() else ""
        return cls(boot, time.perf_counter_ns(), time.time_ns())


@dataclass(slots=True, frozen=True)
class ClockOffset:
    """What to subtract from another process's time to have it on ours."""

    offset_ns: int
    uncertainty_ns: int
    how: str


@dataclass(slots=True, frozen=True)
class RecordedSpan:
    """A span that another process wrote down, on the clock of the process that reads it."""

    lane: str
    name: str
    start_ns: int
    end_ns: int
    args: Mapping[str, object]


@dataclass(slots=True, frozen=True)
class ProcessRecord:
    """What one process wrote down."""

    file: str
    name: str
    os_pid: int
    clock: ClockOffset
    spans: Sequence[RecordedSpan]
    ledger: Ledger | None
    """As the process itself had it when it ended, or when it last let go of spans; None if it was killed before."""
    left_out: int = 0
    """Spans that it let go."""

    @property
    def label(self) -> str:
        """The name of its file, which no other process of the run has: `rewards-4711`."""
        return self.file.removesuffix(".jsonl")

    def lanes(self) -> dict[str, LaneLedger]:
        """Under names no other process has: `rewards-4711/main`. Those of a killed process last as long as their spans."""
        ledger = self.ledger or ledger_from_spans(self.spans)
        return {f"{self.label}/{lane}": rows for lane, rows in ledger.lanes.items()}


# ── in the worker ──────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def recording_process(name: str, folder: Path | None = None) -> Iterator[Recorder | None]:
    """Record this process's spans for the run it works for; without a run, do nothing. `folder` is the run's `spans` folder,
    where the environment does not have it."""
    place = folder or (Path(os.environ[SPANS_VARIABLE]) if SPANS_VARIABLE in os.environ else None)
    if place is None:
        yield None
        return
    place.mkdir(parents=True, exist_ok=True)
    file = new_span_file(place, f"{name}-{os.getpid()}")
    with recording(Recorder()) as recorder, _SpanFile(file, name, recorder):
        yield recorder


def new_span_file(folder: Path, label: str) -> Path:
    """Make an empty file of this name and return its path. Where there is one, the name gets a number: on two machines, or in
    two containers, processes may have the same id. A file that cannot be made is left to those who write it."""
    names = itertools.chain([label], (f"{label}-{number}" for number in itertools.count(2)))
    return next(path for name in names if _is_free(path := folder / f"{name}.jsonl"))


def _is_free(path: Path) -> bool:
    """Whether no other process has the file, which is then made."""
    try:
        path.open("xb").close()
    except FileExistsError:
        return not path.is_file()
    except OSError:
        pass
    return True


class _SpanFile:
    """Takes a recorder's spans away once a second, so that a kill loses no more than that. A file that cannot be written is
    said once, on stderr, and then left as it is: the worker goes on."""

    def __init__(self, path: Path, name: str, recorder: Recorder, max_bytes: int = MAX_BYTES) -> None:
        self._path = path
        self._recorder = recorder
        self._max_bytes = max_bytes
        self._left_out = 0
        self._given_up = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep_writing, name="spans", daemon=True)
        self._header = _json_line({"process": name, "os_pid": os.getpid(), **asdict(Clock.here())})
        self._append(self._header)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._stop.set()
        self._thread.join()
        ledger = self._recorder.ledger()
        self._write_spans()
        self._append(_json_line({"ledger": ledger.to_json()}))

    def _keep_writing(self) -> None:
        while not self._stop.wait(FLUSH_S):
            self._write_spans()

    def _write_spans(self) -> None:
        lines = []
        for span in self._recorder.drain():
            args = {"args": span.args} if span.args else {}
            row = {"lane": span.lane, "name": span.name, "start_ns": span.start_ns, "end_ns": span.end_ns, **args}
            lines.append(_json_line(row))
        self._append(b"".join(lines))

    def _append(self, lines: bytes) -> None:
        if not lines or self._given_up:
            return
        try:
            with self._path.open("ab") as file:
                file.write(lines)
                size = file.tell()
            if size > self._max_bytes:
                self._let_go()
        except OSError as error:
            self._given_up = True
            print(f"{self._path.name} is written no longer: {error.strerror or error}", file=sys.stderr)

    def _let_go(self) -> None:
        """Let go of the spans between the first quarter and the newest; the ledger up to now says what all of them took."""
        middle = between(self._path, self._max_bytes // 4, self._max_bytes // 2)
        self._left_out += sum(line.startswith(b'{"lane"') for line in lines_of(self._path, middle))
        told = _json_line({"left_out": self._left_out})
        head, tail = Stretch(len(self._header), middle.start), Stretch(middle.end, self._path.stat().st_size)
        ledger = _json_line({"ledger": self._recorder.ledger().to_json()})
        rewrite(self._path, [self._header, head, told, tail, ledger])


def _json_line(document: Mapping[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), default=str).encode() + b"\n"


# ── in the run ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def expecting_processes(folder: Path) -> Iterator[None]:
    """Processes that are started meanwhile find where to write."""
    before = os.environ.get(SPANS_VARIABLE)
    os.environ[SPANS_VARIABLE] = str(folder.absolute())
    try:
        yield
    finally:
        if before is None:
            del os.environ[SPANS_VARIABLE]
        else:
            os.environ[SPANS_VARIABLE] = before


def measure_offset(ask: Callable[[], int], times: int = 16) -> ClockOffset:
    """`ask` fetches the other process's `time.perf_counter_ns()`. The answer was given at some moment of the round trip; its
    middle is wrong by half the trip at most, so the shortest is the best."""
    best: ClockOffset | None = None
    for _ in range(times):
        before = time.perf_counter_ns()
        theirs = ask()
        after = time.perf_counter_ns()
        uncertainty_ns = (after - before + 1) // 2
        if best is None or uncertainty_ns < best.uncertainty_ns:
            best = ClockOffset(theirs - (before + after) // 2, uncertainty_ns, "shortest of several round trips")
    assert best is not None, "an offset is measured at least once"
    return best


def keep_offset(file: Path, offset: ClockOffset) -> None:
    """Beside the worker's file, for its reader."""
    write_json(file.with_suffix(".clock.json"), asdict(offset))


def span_files(folder: Path) -> list[Path]:
    """One for each worker."""
    return sorted(folder.glob("*.jsonl"))


def read_processes(folder: Path, here: Clock | None = None) -> Iterator[ProcessRecord]:
    """Every worker's spans, on the clock of this process, one worker at a time. A line that a kill has torn is left out."""
    here = here or Clock.here()
    for path in span_files(folder):
        if rows := list(MetricsLog.read(path)):
            yield _read_process(path, rows, here)


def _read_process(path: Path, rows: Sequence[Mapping[str, Any]], here: Clock) -> ProcessRecord:
    header = rows[0]
    clock = _offset(path, Clock(header["boot"], header["spans_ns"], header["wall_ns"]), here)
    shift = clock.offset_ns
    spans = [
        RecordedSpan(row["lane"], row["name"], row["start_ns"] - shift, row["end_ns"] - shift, row.get("args", {}))
        for row in rows
        if "lane" in row
    ]
    ledgers = [row["ledger"] for row in rows if "ledger" in row]
    left_out = max((row["left_out"] for row in rows if "left_out" in row), default=0)
    ledger = Ledger.from_json(ledgers[-1]) if ledgers else None
    return ProcessRecord(path.name, header["process"], header["os_pid"], clock, spans, ledger, left_out)


def _offset(path: Path, theirs: Clock, here: Clock) -> ClockOffset:
    measured = path.with_suffix(".clock.json")
    if measured.exists():
        return ClockOffset(**json.loads(measured.read_text()))
    if theirs.boot and theirs.boot == here.boot:
        return ClockOffset(0, 0, "the same machine, the same clock")
    # Each process's clock against the time of day: as good as the machines agree on that.
    by_wall_ns = (here.wall_ns - here.spans_ns) - (theirs.wall_ns - theirs.spans_ns)
    return ClockOffset(by_wall_ns, 100_000_000, "the time of day on both machines")


def with_processes(ledger: Ledger, processes: Iterable[ProcessRecord]) -> Ledger:
    """The ledger of a run with the lanes of its workers."""
    lanes = dict(ledger.lanes)
    for process in processes:
        lanes |= process.lanes()
    return Ledger(lanes)
