"""Finds out what files are, and reads them into one timeline."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from redline.errors import TraceError
from redline.lab.traces import kineto, nsys
from redline.lab.traces.builder import Builder
from redline.lab.traces.clocks import clocks_apart
from redline.lab.traces.json_stream import not_a_trace, opened
from redline.lab.traces.names import is_graph_launch
from redline.lab.traces.timeline import Kind, Timeline

SUFFIXES = (".json", ".json.gz", ".sqlite", ".sqlite3", ".db")
SQLITE = b"SQLite format 3\x00"
REPORTS = (".nsys-rep", ".qdrep")
MOST_NAMED = 32
"""Missing ranks that are named one by one."""


def is_trace(path: Path) -> bool:
    """Whether a path is for the reader of traces: a file, or a folder that holds some and is no run's."""
    if path.is_dir():
        return not (path / "config.json").exists() and bool(_inside(path))
    return path.is_file()


def read(paths: Sequence[Path], most_ranges: int | None = None) -> Timeline:
    """Read files, and folders of files, into one timeline. Blocks for about a minute per GB of JSON.

    Raises `TraceError` where one is missing, or is neither a Chrome trace nor an export of nsys.
    """
    into = Builder(most_ranges) if most_ranges else Builder()
    files = [file for path in paths for file in (_inside(path) if path.is_dir() else [path])]
    damaged = [file.name for path in paths if path.is_dir() for file in _candidates(path) if _begins(file) is None]
    if not files:
        why = f": {', '.join(damaged)} cannot be read" if damaged else ""
        raise TraceError(f"{paths[0]}: no traces in this folder{why}", f"traces end in {', '.join(SUFFIXES[:3])}")
    into.lacks.extend(f"{name}: it is empty or damaged, and was left out." for name in dict.fromkeys(damaged))
    given = {path.resolve() for path in paths}
    for place, file in {file.resolve(): file for file in files}.items():
        before = len(into.processes)
        try:
            _reader(file)(file, into)
        except TraceError as error:
            if place in given or len(into.processes) > before:  # somebody asks for it, or a part of it is in there
                raise
            into.lacks.append(f"{file.name}: it was left out: {error.message.rpartition(': ')[2]}.")
    timeline = into.build()
    if not len(timeline.ranges) and not len(timeline.work):
        raise not_a_trace(files[0], "it holds no events with a length")
    timeline.lacks.extend(shortcomings(timeline))
    return timeline


def _candidates(folder: Path) -> list[Path]:
    """Return the files of a folder that end as traces do."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIXES) and path.is_file())


def _inside(folder: Path) -> list[Path]:
    """Return the traces in a folder; other files in it are left alone."""
    return [path for path in _candidates(folder) if _begins(path)]


def _begins(path: Path) -> bool | None:
    """Whether a file begins like a trace; None where it is empty, cannot be read, or is neither JSON nor SQLite."""
    try:
        with opened(path) as file:
            head = file.read(1 << 14)
    except (OSError, EOFError, zlib.error):
        return None
    if not head.startswith(SQLITE) and head.lstrip()[:1] not in (b"{", b"["):
        return None
    return head.startswith(SQLITE) or b'"traceEvents"' in head or b'"schemaVersion"' in head or b'"ph"' in head


def _reader(path: Path) -> Callable[[Path, Builder], None]:
    """Return what reads a file, by its first bytes."""
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder", "give a run folder, or traces of torch.profiler or nsys")
    if path.name.endswith(REPORTS):
        raise TraceError(
            f"{path}: a report of nsys, which only nsys reads",
            f"export it: nsys export --type sqlite -o {path.stem}.sqlite {path}",
        )
    try:
        with opened(path) as file:
            head = file.read(64)
    except (OSError, EOFError, zlib.error) as error:
        raise not_a_trace(path, "it cannot be read, or is a damaged gzip file") from error
    if head.startswith(SQLITE):
        return nsys.read
    if head.lstrip()[:1] in (b"{", b"["):
        return kineto.read
    raise not_a_trace(path, "it is empty" if not head else "it is neither JSON nor SQLite")


def shortcomings(timeline: Timeline) -> list[str]:
    """Say what a capture lacks as a whole: sides, ranks, replays."""
    return [*_sides(timeline), *_clocks(timeline), *_ranks(timeline), *_replays(timeline)]


def _sides(timeline: Timeline) -> list[str]:
    ranges, work = timeline.ranges, timeline.work
    if not len(work):
        return ["There is no device work: what is counted as lost is time in which a rank waited in a collective for another."]
    found = []
    calls = int((ranges.kind == Kind.RUNTIME).sum())
    if not calls:
        found.append("There are no calls into CUDA: which thread launched late, and what it did meanwhile, cannot be told.")
    elif calls == len(ranges):
        found.append("Threads recorded calls into CUDA and nothing else: what they did in between cannot be told.")
    silent = [p.label for i, p in enumerate(timeline.processes) if not (timeline.work_process == i).any()]
    busy = len(timeline.processes) - len(silent)
    if silent and any(timeline.processes[i].rank is not None for i in range(len(timeline.processes))):
        found.append(f"{', '.join(silent)} recorded no device work, unlike {busy} others.")
    return found


def _clocks(timeline: Timeline) -> list[str]:
    """Name processes whose devices have other clocks than their threads; their launches are not looked at then."""
    timeline.clocks_apart = clocks_apart(timeline)
    return [
        f"{timeline.processes[process].label}: device work begins {abs(by) / 1e6:,.1f} ms"
        f" {'before' if by < 0 else 'after'} the calls that launched it: devices and threads have different clocks or"
        " units, and what held up a launch cannot be told."
        for process, by in timeline.clocks_apart.items()
    ]


def _ranks(timeline: Timeline) -> list[str]:
    """Name ranks that the job has and the capture has not, and files that are the same rank twice."""
    worlds = [p.world for p in timeline.processes if p.world]
    have = [p.rank for p in timeline.processes if p.rank is not None]
    found = []
    twice = sorted({rank for rank in have if have.count(rank) > 1})
    engines = max((have.count(rank) for rank in have), default=1)
    if twice and worlds and engines * max(worlds) > len(have):
        found.append(f"Rank {', '.join(map(str, twice))} is there more than once: of several engines, or one file twice.")
    most = max([*worlds, *timeline.has_groups.values()], default=0)
    known = set(have)
    missing = list(islice((rank for rank in range(most) if rank not in known), MOST_NAMED + 1))
    if missing and len(timeline.processes) < most:
        names = ", ".join(map(str, missing[:MOST_NAMED])) if have else f"{most - len(timeline.processes):,} of {most:,}"
        names += " and more" if have and len(missing) > MOST_NAMED else ""
        found.append(f"Ranks are missing: {names}. What they did, and whether they were late, cannot be told.")
    return found


def _replays(timeline: Timeline) -> list[str]:
    """Count launches of CUDA graphs whose replay is not in the capture."""
    ranges, work = timeline.ranges, timeline.work
    if not len(work) or not len(ranges):
        return []
    rows = timeline.named(is_graph_launch)[ranges.name]
    launched = set(zip(timeline.range_process[rows].tolist(), ranges.correlation[rows].tolist(), strict=True))
    seen = set(zip(timeline.work_process.tolist(), work.correlation.tolist(), strict=True)) if launched else set()
    if gone := len(launched - seen):
        return [f"{gone:,} of {len(launched):,} launches of CUDA graphs have no device work: some idle time may be replays."]
    return []
