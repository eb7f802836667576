"""Diagnoses a capture: what engines lost, whose launch was late, and which CPU work held it up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from redline.lab.traces.blame import Walker
from redline.lab.traces.causes import ON_DEVICE, UNRECORDED, Cause, causes
from redline.lab.traces.engines import engines
from redline.lab.traces.names import HOST_WORK, short
from redline.lab.traces.read import read
from redline.lab.traces.stalls import Launches, Lost, RankTime, lost
from redline.lab.traces.timeline import Timeline

WORTH = 0.01
"""Share of an engine's time from which on a cause is listed."""
MANY_PAUSES = 0.05
"""Share of an engine's time in short pauses from which on they are worth a word."""
ADVICE = {
    "serialisation": "Send less: leave out what the receiver can compute, or share arrays in memory and send where they are.",
    "tokenisation": "Tokenise in a process of its own, or before the step that needs it.",
    "gil": "Move the other thread's Python work into a process of its own.",
    "copy": "Copy from pinned memory without waiting (non_blocking), or keep the data on the device.",
    "synchronisation": "Do not wait for the device between launches: read results a step later, or keep them on the device.",
    "ipc": "Have the sender ready earlier, or launch without waiting for the message.",
    "scheduling": "Prepare the next step while the device computes this one.",
    HOST_WORK: "Do this work while the device computes, or not at every step.",
    UNRECORDED: "Record more of the CPU side: torch.profiler with record_function or with_stack, nsys with NVTX and osrt.",
    ON_DEVICE: "It was launched in time; look at streams that wait for each other, and at copies.",
}
"""Class → what to do about it."""


@dataclass(slots=True, frozen=True)
class EngineFindings:
    """One engine: its time, and what its stalls are due to."""

    lost: Lost
    causes: tuple[Cause, ...]
    """Those worth a change, the most time first."""
    rest: int
    """Nanoseconds of stalls in causes too small to list."""


@dataclass(slots=True, frozen=True)
class Diagnosis:
    """What the doctor says of a capture."""

    sources: tuple[str, ...]
    timeline: Timeline
    engines: tuple[EngineFindings, ...]

    @property
    def lacks(self) -> tuple[str, ...]:
        """What the capture lacks, each as a sentence."""
        return tuple(dict.fromkeys(self.timeline.lacks))

    @property
    def verdict(self) -> str:
        """One sentence: who waited for what, or that nothing worth fixing was found."""
        if not self.engines:
            return "Nothing can be said: there is neither device work nor a collective by which processes belong together."
        worst = max(self.engines, key=lambda found: found.lost.total)
        share = worst.lost.total / max(1, worst.lost.window)
        if share < WORTH or not worst.causes:
            return self._without_stalls()
        kinds: Counter[str] = Counter()
        for cause in worst.causes:
            kinds[cause.kind] += cause.lost
        kind, ns = kinds.most_common(1)[0]
        first = next(cause for cause in worst.causes if cause.kind == kind)
        where = f"`{short(first.call)}` in {self.label(first.process)}" if first.call else self.label(first.process)
        return (
            f"{self.engine_name(worst)} lost {seconds(worst.lost.total)} of {seconds(worst.lost.window)} ({share:.0%}), "
            f"{seconds(ns)} of it to {kind}, most of all {where}."
        )

    def _without_stalls(self) -> str:
        paused = max(self.engines, key=lambda found: found.lost.short / max(1, found.lost.window))
        share = paused.lost.short / max(1, paused.lost.window)
        if share < MANY_PAUSES:
            return "Nothing worth fixing: devices and ranks hardly waited for the CPU."
        return (
            f"{self.engine_name(paused)} paused between launches for {share:.0%} of its time, never for long: the CPU launches "
            "work more slowly than the device does it. CUDA graphs, compiled code or larger batches help."
        )

    def label(self, process: int) -> str:
        """How a person tells a process from the others."""
        found = self.timeline.processes[process]
        devices = {stream.device for stream in self.timeline.streams if stream.process == process}
        if found.rank is None and len(devices) == 1:
            return f"{found.label} on GPU {devices.pop()}"
        same = [p for p in self.timeline.processes if p.label == found.label]
        return found.label if len(same) == 1 else f"{found.label} ({Path(found.source).name})"

    def rank_label(self, rank: RankTime) -> str:
        """How a person tells a device of a rank from the others: with the device where its process has several."""
        devices = {stream.device for stream in self.timeline.streams if stream.process == rank.process}
        return f"{self.label(rank.process)} on GPU {rank.device}" if len(devices) > 1 else self.label(rank.process)

    def engine_name(self, found: EngineFindings) -> str:
        """How a person tells an engine from the others: by its processes."""
        names = [self.label(process) for process in found.lost.engine.processes]
        shown = ", ".join(names) if len(names) <= 2 else f"{names[0]} … {names[-1]}"
        return f"Engine {found.lost.engine.index} ({shown})"

    def as_json(self) -> dict[str, Any]:
        return {
            "traces": list(self.sources),
            "verdict": self.verdict,
            "lacks": list(self.lacks),
            "engines": [self._engine(found) for found in self.engines],
        }

    def _engine(self, found: EngineFindings) -> dict[str, Any]:
        lost = found.lost
        return {
            "name": self.engine_name(found),
            "window_s": lost.window / 1e9,
            "lost_s": lost.total / 1e9,
            "stalls": len(lost.stalls),
            "longest_stall_s": max((stall.length for stall in lost.stalls), default=0) / 1e9,
            "short_pauses_s": lost.short / 1e9,
            "rest_s": found.rest / 1e9,
            "ranks": [
                {
                    "process": self.rank_label(rank),
                    "pid": self.timeline.processes[rank.process].pid,
                    "device": rank.device if rank.device >= 0 else None,
                    "busy_s": rank.busy / 1e9,
                    "waiting_s": rank.waiting / 1e9,
                    "idle_s": rank.idle / 1e9,
                    "graph_launches": rank.replays,
                    "late_launches": rank.late,
                    "late_by_s": rank.late_by / 1e9,
                }
                for rank in lost.ranks
            ],
            "causes": [self._cause(cause, lost) for cause in found.causes],
        }

    def _cause(self, cause: Cause, lost: Lost) -> dict[str, Any]:
        return {
            "class": cause.kind,
            "process": self.label(cause.process),
            "call": cause.call,
            "path": list(cause.path),
            "lost_s": cause.lost / 1e9,
            "share": cause.lost / max(1, lost.window),
            "stalls": len(cause.stalls),
            "late": {self.label(process): count for process, count in cause.late.most_common()},
            "messages": cause.hops,
            "growth": asdict(cause.growth) if cause.growth else None,
            "basis": cause.basis,
            "advice": ADVICE[cause.kind],
        }


def seconds(ns: float) -> str:
    """Return a time in words: `3.2 ms`."""
    for size, unit in ((1e9, "s"), (1e6, "ms")):
        if ns >= size:
            return f"{ns / size:.3g} {unit}"
    return f"{ns / 1e3:.0f} µs"


def diagnose(paths: Sequence[Path]) -> Diagnosis:
    """Read traces and find what engines waited for. Blocks for as long as the files take to read."""
    timeline = read(paths)
    found = engines(timeline)
    launches = Launches(timeline)
    grouped = {process for engine in found for process in engine.processes}
    free = set(range(len(timeline.processes))) - grouped
    results = []
    for engine in found:
        time = lost(timeline, engine, launches)
        every = causes(Walker(timeline, {*engine.processes, *free}), time)
        worth = [cause for cause in every if cause.lost >= WORTH * time.window]
        results.append(EngineFindings(time, tuple(worth), time.total - sum(cause.lost for cause in worth)))
    return Diagnosis(tuple(str(path) for path in paths), timeline, tuple(results))
