"""One side of `redline compare`: a process that runs a round when it is told to and sleeps in between. Started by `Worker` with
PYTHONPATH at the source of its side, which may be another revision: each side runs the `process.py` of its own.

    python process.py '{"recipe": PATH, "overrides": [...], "seed": 3}'     steps of a run
    python process.py '{"case": "trainer", "overrides": [...], "seed": 3}'  rounds of a bench
    →  {"device": "cpu", "identity": {...}}
    round  →  {"metrics": {"run/step_s": ..., ...}, "larger_is_better": ["engine/tokens_per_s", ...]}
    end    →  {"peak_bytes": ...}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from redline.child import end_soon_after, take_stdout
from redline.config import Config, load_recipe, resolve
from redline.engine.stats import metrics_between
from redline.lab.compare.left_out import LEFT_OUT
from redline.lab.measure.scratch_run import StepWatch, scratch_stages
from redline.launch.process import prepare_process
from redline.models.files.sources import model_folder
from redline.ports import Session
from redline.telemetry import Recorder, describe_environment, recording
from redline.watch.rows import step_metrics

Metrics = dict[str, float]
Play = Callable[[], tuple[Metrics, list[str]]]
"""One round: its metrics, and those of them that are better when larger."""

MOST_STEPS = 1_000_000
"""Steps of a side, more than any comparison takes."""


def main() -> None:
    reply, task = take_stdout(), json.loads(sys.argv[1])
    end_soon_after(os.getppid())  # a step that hangs never sees that its input has ended
    with _steps(task) if "recipe" in task else _case(task) as (device, play):
        reply({"device": device.type, "identity": describe_environment()})
        for line in sys.stdin:
            if line.strip() == "end":
                reply({"peak_bytes": _peak(device)})
                break
            reply(_timed(play, device))


def _timed(play: Play, device: torch.device) -> dict[str, Any]:
    """`cpu_s` is the CPU time of all threads: where others load the machine it varies less than the time that passes."""
    _synchronize(device)
    started, cpu = time.perf_counter(), time.process_time()
    metrics, larger = play()
    _synchronize(device)
    clocks = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
    finite = {name: float(value) for name, value in metrics.items() if math.isfinite(value)}
    return {"metrics": finite | clocks, "larger_is_better": larger}


# ── steps of a run ─────────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _steps(task: dict[str, Any]) -> Iterator[tuple[torch.device, Play]]:
    config = _recipe(task)
    prepare_process(config)
    recorder, rows = Recorder(keep_spans=False), list[Metrics]()
    with recording(recorder), scratch_stages(config) as stages:
        watch = StepWatch(lambda step: rows.append(step_metrics(step)), recorder)
        stages.session.hold()

        def step() -> tuple[Metrics, list[str]]:
            """Rollouts that run ahead rest while the other side has its turn."""
            stats = stages.engine_stats()
            recorder.step_mark()
            with _resumed(stages.session):
                stages.run(watch, stages.trainer.version + 1)
            row = rows.pop() | metrics_between(stats, stages.engine_stats()) | dict(stages.buffer_metrics())
            return row, [name for name in row if name.endswith(("_per_s", "hit_rate")) or "reward" in name]

        yield torch.device(config.run.device), step


@contextlib.contextmanager
def _resumed(session: Session) -> Iterator[None]:
    session.resume()
    try:
        yield
    finally:
        session.hold()


def _recipe(task: dict[str, Any]) -> Config:
    """Other tasks and samples in every pair, from the same weights: a model made from a seed keeps the recipe's."""
    path, overrides = Path(task["recipe"]), list(task["overrides"])
    config = load_recipe(path, overrides)
    own = [f"run.seed={config.run.seed + task['seed']}", *(f"{key}={value}" for key, value in LEFT_OUT.items())]
    own.append(f"run.steps={max(config.run.steps, MOST_STEPS)}")  # or the buffer would begin nothing after the recipe's last
    if config.model.path.startswith("builtin:"):
        own.append(f"model.path={json.dumps(str(model_folder(config.model.path, config.run.seed)))}")
    return resolve(load_recipe(path, [*overrides, *own])).config


# ── rounds of a bench ──────────────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def _case(task: dict[str, Any]) -> Iterator[tuple[torch.device, Play]]:
    from redline.lab.bench.settings import TrainerSettings, as_recipe, make_settings

    settings = make_settings(task["case"], task["overrides"])
    settings = settings.model_copy(update={"seed": settings.seed + task["seed"]} if _is_random(settings.model) else {})
    prepare_process(as_recipe(settings))
    device = torch.device(settings.device)
    yield device, _trainer(settings) if isinstance(settings, TrainerSettings) else _whole(task["case"], settings)


def _is_random(model: str) -> bool:
    """Weights that are drawn on the device, and not kept in a folder for each seed."""
    return model.startswith("random:")


def _trainer(settings: Any) -> Play:
    """Our trainer alone, in place and warm; a round is its steps."""
    from redline.lab.bench.cases.trainer import Contest

    alone: dict[str, Any] = {"peers": ()}
    if "warmup_s" in type(settings).model_fields:
        alone["warmup_s"] = 0.0  # both sides warm up together, by as many rounds
    contest = Contest(settings.model_copy(update=alone), Console(quiet=True))
    [ours] = contest.sides
    number = 0

    def play() -> tuple[Metrics, list[str]]:
        nonlocal number
        number += 1
        run = contest.run(ours, number)
        return {"step_s": run.step_s, "tokens_per_s": run.tokens_per_s}, ["tokens_per_s"]

    return play


def _whole(case: str, settings: Any) -> Play:
    """The bench as it is, from set-up to document."""
    from redline.lab.bench.run import bench

    def play() -> tuple[Metrics, list[str]]:
        results = bench(case, settings, Console(quiet=True)).results
        return {r.name: r.value for r in results}, [r.name for r in results if r.larger_is_better]

    return play


# ── device ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device) -> int:
    """The most that was held at once; on a CPU without what Python and torch need to be there at all."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return max(0, _resident() - _AT_START)


def _resident() -> int:
    """The most there was. Unlike `ru_maxrss`, /proc does not count what the parent held when it started this process."""
    status = Path("/proc/self/status")
    if not status.exists():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return next(int(line.split()[1]) * 1024 for line in status.read_text().splitlines() if line.startswith("VmHWM:"))


_AT_START = _resident()

if __name__ == "__main__":
    main()
