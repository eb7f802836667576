"""`redline bench telemetry`: what it costs to know where the time goes.

A span is timed by itself, in each of the ways it can be used; no span can cost less than reading the clock twice. Then the loop
runs with everything a run records about itself (spans, the row of a step, the trace), and without any of it, in pairs. What a
few pairs can show is coarser than the overhead is; so it is also counted, in a run of `redline train` with all that watches one
by default: spans times the cost of one, and what the ledger has under `telemetry` in every lane, samplers included.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from redline.config import Config, resolve, validate
from redline.errors import TrainingError
from redline.lab.bench.settings import TelemetrySettings
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.measure.pairs import interleave
from redline.lab.measure.scratch_run import StepWatch, scratch_stages
from redline.launch.process import prepare_process
from redline.telemetry import MetricsLog, Recorder, RunFolder, TraceWriter, recording, span
from redline.watch.rows import FinishedStep, step_metrics

BATCH = 1000
"""Spans of one sample."""
BEFORE_THE_LOOP = ("run.startup", "run.setup", "models.load")
"""Spans that are there however long a run is."""


@dataclass(slots=True, frozen=True)
class TimedRun:
    step_s: float
    spans_per_step: float


def measure(settings: TelemetrySettings, console: Console) -> Measured:
    clock_ns = [_clock_ns() for _ in range(settings.samples)]
    costs = {
        "a span": _span_costs(settings.samples, Recorder()),
        "a span, sums only": _span_costs(settings.samples, Recorder(keep_spans=False)),
        "a span in a task": asyncio.run(_task_costs(settings.samples)),
        "a span, nobody records": [_span_ns() for _ in range(settings.samples)],
    }
    results = [_span_result(name, samples, clock_ns) for name, samples in costs.items()]
    for result in results:
        console.print(f"{result.name}: {result.value:,.0f} ns", style="dim")
    rounds = _run_pairs(settings, console)
    span_ns = results[0].value
    whole = _counted_run(run_whole(_recipe(settings, settings.seed, settings.whole_steps)), span_ns, min(clock_ns))
    return Measured(settings, [*results, _counted(rounds, span_ns, min(clock_ns)), whole, _paired(rounds)])


# ── one span ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _clock_ns() -> float:
    """Nanoseconds of one reading, the loop around it included."""
    read = time.perf_counter_ns
    start = read()
    for _ in range(BATCH):
        read()
    return (read() - start) / BATCH


def _span_ns() -> float:
    start = time.perf_counter_ns()
    for _ in range(BATCH):
        with span("engine.decode", version=1):
            pass
    return (time.perf_counter_ns() - start) / BATCH


def _span_costs(samples: int, recorder: Recorder) -> list[float]:
    with recording(recorder):
        return [_then_drain(recorder) for _ in range(samples)]


async def _task_costs(samples: int) -> list[float]:
    with recording(Recorder()) as recorder:
        return [_then_drain(recorder) for _ in range(samples)]


def _then_drain(recorder: Recorder) -> float:
    cost = _span_ns()
    recorder.drain()
    return cost


def _span_result(name: str, samples: Sequence[float], clock_ns: Sequence[float]) -> Result:
    """The median; on a machine that does other things as well, the least is nearer to the truth, and is given too."""
    reading = statistics.median(clock_ns)
    why = f"two readings of the clock, {reading:.0f} ns each"
    details = {"least": min(samples)}
    value = statistics.median(samples)
    return Result(name, value, "ns", list(samples), Bound(2 * reading, why), larger_is_better=False, details=details)


# ── a whole run ────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Records:
    """Writes what `RunWatch` writes at every step."""

    def __init__(self, folder: RunFolder, recorder: Recorder) -> None:
        self._recorder = recorder
        self._metrics, self._trace = MetricsLog(folder.metrics), TraceWriter(folder.trace)
        self.spans = 0

    def finished(self, step: FinishedStep) -> None:
        with span("telemetry.metrics", version=step.update.version):
            self._metrics.append(step.update.version, step_metrics(step))
            spans = self._recorder.drain()
            self._trace.write(spans)
            self.spans += len(spans)

    def close(self) -> None:
        self._metrics.close()
        self._trace.close()


def _run_pairs(settings: TelemetrySettings, console: Console) -> list[dict[str, TimedRun]]:
    def side(recorded: bool) -> Callable[[int], TimedRun]:
        return lambda number: run_loop(_recipe(settings, settings.seed + number), settings, recorded)

    def seen(number: int, row: Mapping[str, TimedRun]) -> None:
        told = ", ".join(f"{name} {run.step_s:.3f} s" for name, run in row.items())
        console.print(f"round {number + 1}/{settings.pairs}: a step takes {told}", style="dim")

    return interleave({"recorded": side(True), "unrecorded": side(False)}, settings.pairs, settings.seed, seen)


def run_loop(config: Config, settings: TelemetrySettings, recorded: bool) -> TimedRun:
    """The loop of `redline train` in a folder that is thrown away, from the same weights over the same tasks on both sides."""
    prepare_process(config)
    with tempfile.TemporaryDirectory(prefix="redline-bench-") as scratch, scratch_stages(config) as stages:
        stages.run(StepWatch(), settings.warmup_steps)
        recorder = Recorder()
        records = _Records(RunFolder.create(Path(scratch), "telemetry"), recorder) if recorded else None
        watch = StepWatch(records.finished, recorder) if records else StepWatch()
        with recording(recorder) if recorded else nullcontext():
            started = time.perf_counter()
            stages.run(watch, settings.warmup_steps + settings.steps)
            seconds = time.perf_counter() - started
        if records:
            records.close()
    return TimedRun(seconds / settings.steps, records.spans / settings.steps if records else 0.0)


@dataclass(slots=True, frozen=True)
class WholeRun:
    """What watching took in a run of `redline train`, from the loop's first step on."""

    seconds: float
    """Seconds of the main lane, without what comes before the loop."""
    num_spans: int
    telemetry_s: Mapping[str, float]
    """Lane → seconds in spans of `telemetry`."""


def run_whole(config: Config) -> WholeRun:
    """In a process of its own, as a user starts it."""
    with tempfile.TemporaryDirectory(prefix="redline-bench-") as scratch:
        recipe = Path(scratch) / "recipe.json"
        recipe.write_text(config.model_dump_json())
        run = "import sys; from redline.cli import main; sys.argv[0] = 'redline'; main()"
        command = [sys.executable, "-c", run, "train", str(recipe), f"run.folder={scratch}", "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise TrainingError(
                f"the run that was to be watched failed: {done.stderr.strip()}", "run the recipe by itself first"
            )
        folder = RunFolder(Path(json.loads(done.stdout)["run"]))
        lanes = json.loads(folder.ledger.read_text())["lanes"]
        events = json.loads(folder.trace.read_text())
    main = lanes["main"]
    before = sum(main["rows"].get(name, 0) for name in BEFORE_THE_LOOP)
    watching = {
        name: sum(ns for row, ns in lane["rows"].items() if row.startswith("telemetry.")) / 1e9 for name, lane in lanes.items()
    }
    return WholeRun((main["wall_ns"] - before) / 1e9, sum(event["ph"] == "X" for event in events), watching)


def _counted_run(run: WholeRun, span_ns: float, clock_ns: float) -> Result:
    spans_s = run.num_spans * span_ns / 1e9
    value = 100 * (spans_s + sum(run.telemetry_s.values())) / run.seconds
    least = 100 * run.num_spans * 2 * clock_ns / 1e9 / run.seconds
    why = f"{run.num_spans:,} spans in {run.seconds:.1f} s, two readings of the clock for each"
    parts = {f"lane {lane}": 100 * seconds / run.seconds for lane, seconds in run.telemetry_s.items() if seconds}
    details = {"parts": {"spans": 100 * spans_s / run.seconds, **parts}}
    return Result("a whole run, counted", value, "%", [value], Bound(least, why), larger_is_better=False, details=details)


def _recipe(settings: TelemetrySettings, seed: int, steps: int | None = None) -> Config:
    recipe = {
        "run": {
            "device": settings.device,
            "num_threads": settings.num_threads,
            "seed": seed,
            "steps": steps or settings.warmup_steps + settings.steps,
            "checkpoint_every": 0,
        },
        "model": {"path": settings.model, "dtype": settings.dtype},
        "rollouts": {
            "task": {"kind": "import", "path": "redline.lab.material.tasks:Letters"},
            "groups_per_step": settings.groups_per_step,
            "group_size": settings.group_size,
            "max_new_tokens": settings.max_new_tokens,
            "evaluation": {"num_tasks": 0},
        },
        "buffer": {"max_bytes": 0},
        "engine": {"max_num_seqs": settings.groups_per_step * settings.group_size},
    }
    return resolve(validate(recipe, "redline bench telemetry")).config


def _counted(rounds: Sequence[Mapping[str, TimedRun]], span_ns: float, clock_ns: float) -> Result:
    runs = [row["recorded"] for row in rounds]
    samples = [100 * run.spans_per_step * span_ns / 1e9 / run.step_s for run in runs]
    spans, step_s = (statistics.median(getattr(run, name) for run in runs) for name in ("spans_per_step", "step_s"))
    least = 100 * spans * 2 * clock_ns / 1e9 / step_s
    why = f"{spans:,.0f} spans in a step of {step_s:.3f} s, two readings of the clock for each"
    value = statistics.median(samples)
    return Result("spans in a step, counted", value, "%", samples, Bound(least, why), larger_is_better=False)


def _paired(rounds: Sequence[Mapping[str, TimedRun]]) -> Result:
    """The ratio is under 1 by what recording costs."""
    with_it, without = ([row[name].step_s for row in rounds] for name in ("recorded", "unrecorded"))
    comparison = compare(without, with_it)
    peer = PeerFigure("unrecorded", statistics.median(without), comparison.ratio, comparison)
    bound = Bound(statistics.median(without), "the same step with nothing recorded")
    return Result("a recorded step", statistics.median(with_it), "s", with_it, bound, peer, larger_is_better=False)
