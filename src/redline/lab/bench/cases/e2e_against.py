"""`redline bench e2e --against trl`: a step of the loop against one of TRL's, in turn.

Same model, tasks in the same order, sizes and learning rate on both sides. Each keeps its model loaded and takes one step when
it is told to, while the other sleeps: ours in this process, TRL in one of its own, whose python may be that of another
environment. In every round both take a step, in an order drawn by lot. Both use all cores, and both are in lockstep, as TRL is.
Answers and memory change as a run goes on, so both take as many steps before the first round: a pair is the same step of both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from redline.config import Config
from redline.config.sections.engine import EngineConfig
from redline.lab.bench.cases.e2e import LOCKSTEP, price_of, recipe, sample_results, sampling_cost
from redline.lab.bench.settings import E2ESettings
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.measure.machine import Machine, measure_machine, synchronize
from redline.lab.measure.pairs import interleave
from redline.lab.measure.roofline import Load, generation_seconds
from redline.lab.measure.scratch_run import StepWatch, scratch_stages
from redline.lab.measure.warmup import MAX_RUNS, WarmUp, warm_up_together
from redline.lab.peers.contest import OURS
from redline.lab.peers.trl_side import TrlSide
from redline.launch.process import prepare_process
from redline.launch.stages import Stages
from redline.models.files.hf import load_tokenizer
from redline.models.files.sources import model_folder
from redline.rollouts import Chat, make_task_source
from redline.telemetry import Recorder, recording
from redline.types import TrajectoryGroup
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
    least_rollouts_s: float = 0.0
    """What this machine needs for the prompts and answers of this step, by the roofline; 0 for a peer."""
    least_trainer_s: float = 0.0

    @property
    def trainer_s(self) -> float:
        """All that is not rollouts."""
        return self.step_s - self.rollouts_s

    @property
    def least_step_s(self) -> float:
        """In lockstep one begins when the other has ended; 0 where what sampling takes is not known."""
        return self.least_rollouts_s + self.least_trainer_s if self.least_rollouts_s else 0.0


Rounds = Sequence[Mapping[str, SteppedRun]]
Seconds = Callable[[SteppedRun], float]
SAMPLING = (
    "prompts and answers by max(bytes / bandwidth, operations / peak) of the prompts and of every decode step (weights, keys"
    " and values read once; products and attention)"
)
TRAINING = "operations of the trained tokens / peak (products and attention, forward and backward)"


class OwnSide:
    """Our loop, a step at a time."""

    def __init__(self, stages: Stages, recorder: Recorder, config: Config, machine: Machine) -> None:
        self._stages, self._recorder, self._device = stages, recorder, torch.device(config.run.device)
        self._cost, self._machine, self._engine = sampling_cost(stages, config), machine, config.engine

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
            least_rollouts_s=self._least_rollouts_s(done.groups),
            least_trainer_s=done.report.flops / self._machine.flops,
        )

    def _least_rollouts_s(self, groups: Sequence[TrajectoryGroup]) -> float:
        """0 where it cannot be told how many experts a token goes to."""
        if not self._cost.is_known:
            return 0.0
        return generation_seconds(self._cost, load_of(groups, self._engine), self._machine)


def load_of(groups: Sequence[TrajectoryGroup], engine: EngineConfig) -> Load:
    """What the engine was asked for, by what it gave: answers of one reply each."""
    answers = [trajectory for group in groups for trajectory in group.trajectories]
    lengths_S = np.array([answer.num_completion_tokens for answer in answers])
    return Load(
        prompts=len(groups),
        prompt_tokens=statistics.fmean(int((~group.trajectories[0].loss_mask).sum()) for group in groups),
        n=len(answers) // len(groups),
        new_tokens=round(lengths_S.mean()),
        max_num_seqs=engine.max_num_seqs,
        lengths_S=lengths_S,
        guesses=engine.speculation != "off",
    )


def measure(settings: E2ESettings, console: Console) -> Measured:
    machine = measure_machine(torch.device(settings.device), getattr(torch, settings.dtype))
    console.print(machine.how, style="dim")
    config = recipe(settings, LOCKSTEP, settings.seed)
    with _own_side(config, machine) as own, _trl_side(config, settings) as trl:
        sides: dict[str, Callable[[int], SteppedRun]] = {
            OURS: lambda _: own.step(),
            PEER: lambda _: SteppedRun(**trl.step()),
        }
        last, warm_ups = warm_up_together(sides, max_seconds=settings.warmup_s)
        for name, warmed in warm_ups.items():
            state = "is warm" if warmed.is_settled else "has not settled"
            console.print(f"{name} {state} after {len(warmed.seconds)} steps: one takes {last[name].step_s:.2f} s", style="dim")

        def tell(number: int, row: Mapping[str, SteppedRun]) -> None:
            each = ", ".join(f"{name} {run.step_s:.2f} s ({run.mean_tokens:.0f} tokens)" for name, run in row.items())
            console.print(f"round {number + 1}/{settings.pairs}: {each}", soft_wrap=True)

        rounds = interleave(sides, settings.pairs, settings.seed, tell)
        version = trl.version
    results = _results(rounds, settings, machine)
    return Measured(settings, [_with_unsettled(result, warm_ups) for result in results], {PEER: version}, warm_ups)


@contextmanager
def _own_side(config: Config, machine: Machine) -> Iterator[OwnSide]:
    prepare_process(config)
    recorder = Recorder(keep_spans=False)
    with recording(recorder), scratch_stages(config) as stages:
        yield OwnSide(stages, recorder, config, machine)


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


# ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _results(rounds: Rounds, settings: E2ESettings, machine: Machine) -> list[Result]:
    """Answers differ in length from round to round, so that every round has a bound of its own."""
    sampling, training = f"{SAMPLING}; {machine.how}", f"{TRAINING}; {machine.how}"
    both = f"{SAMPLING}, then {TRAINING}; {machine.how}"
    step = _part("a step", rounds, lambda run: run.step_s, lambda run: run.least_step_s, both)
    attempts = settings.groups_per_step * settings.group_size
    per_s = [attempts / row[OURS].step_s for row in rounds]
    theirs = _peer(rounds, lambda run: attempts / run.step_s, larger_is_better=True)
    samples = sample_results("", per_s, Bound(step.bound.rate_of(attempts), both), price_of(settings), theirs)
    return [
        replace(step, samples=[{name: asdict(run) for name, run in row.items()} for row in rounds]),
        _part("rollouts", rounds, lambda run: run.rollouts_s, lambda run: run.least_rollouts_s, sampling),
        _part("trainer", rounds, lambda run: run.trainer_s, lambda run: run.least_trainer_s, training),
        *(replace(result, fractions=step.fractions) for result in samples),
        # Sides whose answers differ in length do not do the same work; this is what is left of it.
        _part(
            "a step, per token of an attempt",
            rounds,
            lambda run: run.step_s / run.mean_tokens,
            lambda run: run.least_step_s / run.mean_tokens,
            f"by the tokens of each round's attempts: {both}",
        ),
    ]


def _part(name: str, rounds: Rounds, seconds: Seconds, least: Seconds, why: str) -> Result:
    """Seconds of both sides, beside the least that our side's work takes: of each round, and of the median one."""
    ours = [row[OURS] for row in rounds]
    own, bounds = [seconds(run) for run in ours], [least(run) for run in ours]
    return Result(
        name,
        statistics.median(own),
        "s",
        own,
        Bound(statistics.median(bounds), f"median of the rounds: {why}"),
        _peer(rounds, seconds),
        larger_is_better=False,
        fractions=[bound / value for bound, value in zip(bounds, own, strict=True)],
    )


def _peer(rounds: Rounds, value: Seconds, *, larger_is_better: bool = False) -> PeerFigure:
    ours, theirs = ([value(row[name]) for row in rounds] for name in (OURS, PEER))
    comparison = compare(ours, theirs) if larger_is_better else compare(theirs, ours)
    return PeerFigure(PEER, statistics.median(theirs), comparison.ratio, comparison)


def _with_unsettled(result: Result, warm_ups: Mapping[str, WarmUp]) -> Result:
    """The result with the sides whose steps still got faster, or varied, when the first round began."""
    assert result.peer is not None
    unsettled = [name for name, warmed in warm_ups.items() if not warmed.is_settled]
    return replace(result, peer=replace(result.peer, not_settled=unsettled))
