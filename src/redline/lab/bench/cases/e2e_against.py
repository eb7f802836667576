"""`redline bench e2e --against trl`: a step of the loop against one of TRL's, in turn.

Same model, tasks in the same order, sizes and learning rate on both sides. Each keeps its model loaded and takes one step when
it is told to, while the other sleeps: ours in this process, TRL in one of its own, whose python may be that of another
environment. In every round both take a step, in an order drawn by lot. Both use all cores, and both are in lockstep, as TRL is.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console

from redline.config import Config
from redline.lab.bench.cases.e2e import LOCKSTEP, price_of, recipe, sample_results, sampling_cost, sampling_flops, work_result
from redline.lab.bench.settings import E2ESettings
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.measure.machine import measure_machine, synchronize
from redline.lab.measure.pairs import interleave
from redline.lab.measure.scratch_run import StepWatch, scratch_stages
from redline.lab.measure.warmup import MAX_RUNS, warm_up
from redline.lab.peers.contest import OURS
from redline.lab.peers.trl_side import TrlSide
from redline.launch.process import prepare_process
from redline.launch.stages import Stages
from redline.models.files.hf import load_tokenizer
from redline.models.files.sources import model_folder
from redline.rollouts import Chat, make_task_source
from redline.telemetry import Recorder, recording
from redline.watch.rows import FinishedStep

PEER = "trl"


@dataclass(slots=True, frozen=True)
class SteppedRun:
    """One step of either side."""

    step_s: float
    rollouts_s: float
    reward: float
    mean_tokens: float
    """Mean tokens of an attempt."""
    sampling_flops: float = 0.0
    training_flops: float = 0.0

    @property
    def trainer_s(self) -> float:
        """All that is not rollouts."""
        return self.step_s - self.rollouts_s


Rounds = Sequence[Mapping[str, SteppedRun]]


class OwnSide:
    """Our loop, a step at a time."""

    def __init__(self, stages: Stages, recorder: Recorder, config: Config) -> None:
        self._stages, self._recorder, self._device = stages, recorder, torch.device(config.run.device)
        self._cost = sampling_cost(stages, config)

    def step(self) -> SteppedRun:
        finished: list[FinishedStep] = []
        self._recorder.step_mark()
        synchronize(self._device)
        started = time.perf_counter()
        self._stages.run(StepWatch(finished.append), self._stages.trainer.version + 1)
        synchronize(self._device)
        seconds = time.perf_counter() - started
        spent = self._recorder.step_mark()
        [done] = finished
        return SteppedRun(
            step_s=seconds,
            rollouts_s=sum(ns for name, ns in spent.items() if name.partition(".")[0] in ("rollouts", "engine")) / 1e9,
            reward=statistics.fmean(own[0].reward for own in done.attempts),
            mean_tokens=statistics.fmean(sum(t.num_completion_tokens for t in own) for own in done.attempts),
            sampling_flops=sampling_flops(self._cost, done.groups),
            training_flops=done.report.flops,
        )


def measure(settings: E2ESettings, console: Console) -> Measured:
    machine = measure_machine(torch.device(settings.device), getattr(torch, settings.dtype))
    console.print(machine.how, style="dim")
    config = recipe(settings, LOCKSTEP, settings.seed)
    with _own_side(config) as own, _trl_side(config, settings) as trl:
        sides: dict[str, Callable[[int], SteppedRun]] = {
            OURS: lambda _: own.step(),
            PEER: lambda _: SteppedRun(**trl.step()),
        }
        warm_ups = {}
        for name, side in sides.items():
            run, warm_ups[name] = warm_up(side, max_seconds=settings.warmup_s)
            console.print(f"{name} is warm: a step takes {run.step_s:.2f} s", style="dim")

        def tell(number: int, row: Mapping[str, SteppedRun]) -> None:
            each = ", ".join(f"{name} {run.step_s:.2f} s ({run.mean_tokens:.0f} tokens)" for name, run in row.items())
            console.print(f"round {number + 1}/{settings.pairs}: {each}", soft_wrap=True)

        rounds = interleave(sides, settings.pairs, settings.seed, tell)
        version = trl.version
    ours = [row[OURS] for row in rounds]
    sampling, training = ([getattr(run, name) for run in ours] for name in ("sampling_flops", "training_flops"))
    whole = [a + b for a, b in zip(sampling, training, strict=True)]
    attempts = settings.groups_per_step * settings.group_size
    per_s = [attempts / run.step_s for run in ours]
    step = work_result("a step", [r.step_s for r in ours], whole, machine, _peer(rounds, lambda run: run.step_s))
    theirs = _peer(rounds, lambda run: attempts / run.step_s, larger_is_better=True)
    results = [
        _with_samples(step, rounds),
        work_result("rollouts", [r.rollouts_s for r in ours], sampling, machine, _peer(rounds, lambda run: run.rollouts_s)),
        work_result("trainer", [r.trainer_s for r in ours], training, machine, _peer(rounds, lambda run: run.trainer_s)),
        *sample_results("", per_s, Bound(step.bound.rate_of(attempts), step.bound.why), price_of(settings), theirs),
        _per_token(rounds, step),
    ]
    return Measured(settings, results, {PEER: version}, warm_ups)


@contextmanager
def _own_side(config: Config) -> Iterator[OwnSide]:
    prepare_process(config)
    recorder = Recorder(keep_spans=False)
    with recording(recorder), scratch_stages(config) as stages:
        yield OwnSide(stages, recorder, config)


@contextmanager
def _trl_side(config: Config, settings: E2ESettings) -> Iterator[TrlSide]:
    folder = model_folder(config.model.path, config.run.seed)
    steps = MAX_RUNS + settings.pairs
    tasks = make_task_source(config.rollouts.task, config.run.seed)
    chat = Chat(load_tokenizer(folder), config.rollouts.system_prompt, config.rollouts.prompt_suffix)
    drawn = [tasks.train(number) for number in range(steps * settings.groups_per_step)]
    work = {
        "model": str(folder),
        "reward": settings.task,
        "steps": steps,
        "groups_per_step": settings.groups_per_step,
        "group_size": settings.group_size,
        "max_new_tokens": settings.max_new_tokens,
        "learning_rate": config.trainer.learning_rate,
        "device": config.run.device,
        "dtype": config.model.dtype,
        "seed": settings.seed,
    }
    rows: list[dict[str, Any]] = [{"prompt": chat.messages(task), "answer": task.answer} for task in drawn]
    side = TrlSide(settings.trl_python, rows, work, config.run.num_threads or 1)
    try:
        yield side
    finally:
        side.close()


def _peer(rounds: Rounds, value: Callable[[SteppedRun], float], *, larger_is_better: bool = False) -> PeerFigure:
    ours, theirs = ([value(row[name]) for row in rounds] for name in (OURS, PEER))
    comparison = compare(ours, theirs) if larger_is_better else compare(theirs, ours)
    return PeerFigure(PEER, statistics.median(theirs), comparison.ratio, comparison)


def _with_samples(step: Result, rounds: Rounds) -> Result:
    samples = [{name: asdict(run) for name, run in row.items()} for row in rounds]
    return Result(step.name, step.value, step.unit, samples, step.bound, step.peer, larger_is_better=False)


def _per_token(rounds: Rounds, step: Result) -> Result:
    """Sides whose answers differ in length do not do the same work; this is what is left of it."""

    def value(run: SteppedRun) -> float:
        return run.step_s / run.mean_tokens

    own = [value(row[OURS]) for row in rounds]
    tokens = statistics.median(row[OURS].mean_tokens for row in rounds)
    bound = Bound(step.bound.value / tokens, f"{tokens:.1f} tokens of an attempt; {step.bound.why}")
    name = "a step, per token of an attempt"
    return Result(name, statistics.median(own), "s", own, bound, _peer(rounds, value), larger_is_better=False)
