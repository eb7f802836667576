"""`redline bench e2e`: whole steps of the loop, in lockstep and with rollouts ahead of the trainer.

Every round runs each lag once, in an order drawn by lot, from the same weights over the same tasks. In lockstep one side always
waits for the other; with a lag they work at the same time, on a CPU each on its own half of the cores, so lockstep is given the
same half: what is measured is the overlap, not the cores. The bound of a step is the busier side's work. Beside every speed
stands how many groups were dropped as late, and how long the attempts were that it trained on (`e2e_lengths.py`).

With `against` the loop takes turns with somebody else's instead (`e2e_against.py`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from rich.console import Console

from redline.config import Config, resolve, validate
from redline.errors import ConfigError
from redline.lab.bench.cases.e2e_lengths import Lengths, beside, length_results
from redline.lab.bench.settings import E2ESettings
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.material.forced_lengths import ForcedLengths, LogNormalLengths
from redline.lab.material.random_folders import as_path
from redline.lab.measure.machine import Machine, device_name, free_memory, measure_machine
from redline.lab.measure.pairs import interleave
from redline.lab.measure.roofline import NOT_KNOWN
from redline.lab.measure.scratch_run import StepWatch, scratch_stages
from redline.lab.plan.devices import CPU_PRICE, find_device
from redline.launch.process import prepare_process
from redline.launch.stages import Stages
from redline.models.sizes.flops import NetworkCost
from redline.ports import SteppedEngine
from redline.telemetry import Recorder, recording
from redline.types import TrajectoryGroup
from redline.watch.rows import FinishedStep

LOCKSTEP = 0
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
TASKS: Mapping[str, Mapping[str, object]] = {
    "letters": {"task": {"kind": "import", "path": "redline.lab.material.tasks:Letters"}},
    "sums": {
        "task": {"kind": "reasoning_gym", "dataset": "chain_sum", "params": SUMS},
        "prompt_suffix": "\nGive only the final answer.",
    },
}
"""As the rollouts section of a recipe has them."""
REWARD_WINDOW = 4
"""Steps at the end of the shortest run over which its reward, and that of the others by then, is averaged."""


@dataclass(slots=True)
class Clock:
    """Notes when steps end and what came of them."""

    skip: int
    """Steps before the clock starts: kernels warm up, and a pipeline fills."""
    cost: NetworkCost | None = None
    """To count operations with, where somebody wants them."""
    buffer_metrics: Callable[[], Mapping[str, float]] = dict
    """After each step, what became of the groups."""
    begun_s: float = 0.0
    ends_s: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    attempts: list[int] = field(default_factory=list)
    sampling_flops: list[float] = field(default_factory=list)
    training_flops: list[int] = field(default_factory=list)
    fates: list[Mapping[str, float]] = field(default_factory=list)

    def finished(self, step: FinishedStep) -> None:
        now, attempts = time.perf_counter(), step.attempts
        if step.update.version == self.skip:
            self.begun_s = now
        if step.update.version > self.skip:
            self.ends_s.append(now - self.begun_s)
            self.rewards.append(statistics.fmean(own[0].reward for own in attempts) if attempts else self.rewards[-1])
            self.tokens.append(sum(t.num_completion_tokens for own in attempts for t in own))
            self.lags.append(step.batch.lag)
            self.attempts.append(step.batch.num_attempts_sampled)
            self.fates.append(self.buffer_metrics())
            self.sampling_flops.append(sampling_flops(self.cost, step.groups) if self.cost else 0.0)
            self.training_flops.append(step.report.flops)


def sampling_cost(stages: Stages, config: Config) -> NetworkCost:
    return NetworkCost.of(stages.model.decoder).quantized(config.engine.quantization, getattr(torch, config.model.dtype))


def sampling_flops(cost: NetworkCost, groups: Sequence[TrajectoryGroup]) -> float:
    """Products of every prompt once and of every sampled token; what attention adds is little at such lengths. 0 where it
    cannot be told how many experts a token goes to."""
    if not cost.is_known:
        return 0.0
    prompt_tokens = sum(int((~group.trajectories[0].loss_mask).sum()) for group in groups)
    new_tokens = sum(t.num_completion_tokens for group in groups for t in group.trajectories)
    return cost.product_flops(prompt_tokens + new_tokens, new_tokens)


@dataclass(slots=True, frozen=True)
class E2ERun:
    """What one run of the loop gave, after its first steps."""

    step_s: float
    trainer_wait_s: float
    """Per step."""
    rollouts_wait_s: float
    ends_s: Sequence[float]
    rewards: Sequence[float]
    tokens_per_s: float
    max_lag: int
    samples_per_s: float
    """Attempts, scored and trained on."""
    sampling_flops: float
    """Per step."""
    training_flops: float
    lengths: Lengths

    @property
    def rollouts_s(self) -> float:
        """Seconds of a step in which rollouts were at work."""
        return self.step_s - self.rollouts_wait_s

    @property
    def trainer_s(self) -> float:
        return self.step_s - self.trainer_wait_s

    def reward_by(self, seconds: float) -> float:
        """Mean over the last steps that had ended by then."""
        done = [reward for end, reward in zip(self.ends_s, self.rewards, strict=True) if end <= seconds + 1e-9]
        return statistics.fmean(done[-REWARD_WINDOW:]) if done else 0.0

    def as_json(self) -> dict[str, object]:
        return {
            "step_s": self.step_s,
            "trainer_wait_s": self.trainer_wait_s,
            "rollouts_wait_s": self.rollouts_wait_s,
            "tokens_per_s": self.tokens_per_s,
            "samples_per_s": self.samples_per_s,
            "max_lag": self.max_lag,
            **self.lengths.as_json(),
            "ends_s": list(self.ends_s),
            "rewards": list(self.rewards),
        }


def measure(settings: E2ESettings, console: Console) -> Measured:
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    machine = measure_machine(device, dtype)
    price = price_of(settings)

    def seen(number: int, row: Mapping[str, E2ERun]) -> None:
        told = ", ".join(f"lag {lag} {run.step_s:.2f} s ({run.lengths})" for lag, run in row.items())
        console.print(f"round {number + 1}/{settings.pairs}: a step takes {told}")

    with as_path(settings.model, device, dtype, settings.seed) as path:
        given = settings.model_copy(update={"model": path})
        sides: dict[str, Callable[[int], E2ERun]] = {str(lag): _side(given, lag) for lag in settings.lags}
        rounds = interleave(sides, settings.pairs, settings.seed, seen)
    results = [result for lag in settings.lags for result in _results(rounds, lag, price, machine)]
    return Measured(settings, results)


def _side(settings: E2ESettings, lag: int) -> Callable[[int], E2ERun]:
    def run(number: int) -> E2ERun:
        config = recipe(settings, lag, settings.seed + number)
        return run_loop(config, settings.warmup_steps, settings.steps, settings.lengths == "log-normal")

    return run


def run_loop(config: Config, skip: int, steps: int, draws_lengths: bool = False) -> E2ERun:
    """The loop of `redline train` in a folder that is thrown away."""

    def around(engine: SteppedEngine) -> SteppedEngine:
        rollouts = config.rollouts
        lengths = LogNormalLengths(rollouts.max_new_tokens, rollouts.group_size, config.run.seed)
        return ForcedLengths(engine, lengths) if draws_lengths else engine

    prepare_process(config)
    recorder = Recorder(keep_spans=False)
    with recording(recorder), scratch_stages(config, around) as stages:
        clock = Clock(skip, sampling_cost(stages, config), stages.buffer_metrics)
        before = _until(stages, clock, skip, recorder)
        after = _until(stages, clock, skip + steps, recorder)
    clock.buffer_metrics = dict  # it holds the stages
    del stages
    free_memory(torch.device(config.run.device))
    waited = {lane: after[lane] - before.get(lane, 0.0) for lane in after}
    seconds = clock.ends_s[-1]
    # In lockstep the one that is not at work waits, and both are in one lane.
    trainer_wait = waited["main"] if config.buffer.max_lag else waited["not trainer"]
    rollouts_wait = waited.get("rollouts", 0.0) if config.buffer.max_lag else seconds - waited["not trainer"]
    return E2ERun(
        step_s=seconds / steps,
        trainer_wait_s=trainer_wait / steps,
        rollouts_wait_s=rollouts_wait / steps,
        ends_s=clock.ends_s,
        rewards=clock.rewards,
        tokens_per_s=sum(clock.tokens) / seconds,
        max_lag=max(clock.lags),
        samples_per_s=sum(clock.attempts) / seconds,
        sampling_flops=sum(clock.sampling_flops) / steps,
        training_flops=sum(clock.training_flops) / steps,
        lengths=Lengths.of(clock.fates, config.rollouts.group_size),
    )


def _until(stages: Stages, clock: Clock, steps: int, recorder: Recorder) -> dict[str, float]:
    """Run to that step; seconds that each lane has waited so far, and that the main one spent on anything but training."""
    stages.run(StepWatch(clock.finished), steps)
    lanes = recorder.ledger().lanes
    waited = {name: sum(ns for row, ns in lane.rows.items() if row.startswith("wait.")) / 1e9 for name, lane in lanes.items()}
    rollouts = sum(ns for row, ns in lanes["main"].rows.items() if row.split(".")[0] in ("rollouts", "engine")) / 1e9
    return waited | {"not trainer": rollouts}


def recipe(settings: E2ESettings, lag: int, seed: int) -> Config:
    cores = settings.num_threads or torch.get_num_threads()
    share = max(1, cores // 2) if lag == LOCKSTEP and settings.device == "cpu" and settings.against is None else cores
    values = {
        "run": {
            "device": settings.device,
            "num_threads": share,
            "seed": seed,
            # With a lag the last steps of a run begin nothing more. They are not timed: a long run has few of them.
            "steps": settings.warmup_steps + settings.steps + (lag + 1 if lag != LOCKSTEP else 0),
            "checkpoint_every": 0,
        },
        "model": {"path": settings.model, "dtype": settings.dtype},
        "rollouts": {
            **task_section(settings),
            "groups_per_step": settings.groups_per_step,
            "group_size": settings.group_size,
            "max_new_tokens": settings.max_new_tokens,
            "evaluation": {"num_tasks": 0},
        },
        "buffer": {"max_lag": lag, "max_bytes": 0} | ({"late_groups": settings.late_groups} if lag != LOCKSTEP else {}),
        "trainer": settings.trainer.model_dump(mode="json", exclude_unset=True),
        "engine": {"max_num_seqs": settings.groups_per_step * settings.group_size}
        | settings.engine.model_dump(exclude_unset=True),
    }
    return resolve(validate(values, "redline bench e2e")).config


def task_section(settings: E2ESettings) -> Mapping[str, object]:
    """The task as the rollouts section of a recipe has it."""
    if settings.task == "words":
        task = {"kind": "import", "path": "redline.lab.material.tasks:Words", "params": {"tokens": settings.prompt_tokens}}
        return {"task": task}
    return TASKS[settings.task]


def price_of(settings: E2ESettings) -> float:
    """Dollars for an hour of this machine."""
    if settings.price is not None:
        return settings.price
    if settings.device == "cpu":
        return CPU_PRICE
    name = device_name(torch.device(settings.device))
    try:
        return find_device(name).price
    except ConfigError as error:
        raise ConfigError(
            f"redline bench e2e: no price is known for {name}", "give one, in dollars per hour: price=2.5"
        ) from error


# ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _results(rounds: Sequence[Mapping[str, E2ERun]], lag: int, price: float, machine: Machine) -> list[Result]:
    runs = [row[str(lag)] for row in rounds]
    busier = [max(run.rollouts_s, run.trainer_s) for run in runs]
    samples = [run.samples_per_s for run in runs]
    most = statistics.median(run.samples_per_s * run.step_s / busy for run, busy in zip(runs, busier, strict=True))
    lengths = [run.lengths for run in runs]
    speeds = [
        _step_time(rounds, lag, runs, busier),
        work_result(f"lag {lag}: rollouts at work", [r.rollouts_s for r in runs], [r.sampling_flops for r in runs], machine),
        work_result(f"lag {lag}: trainer at work", [r.trainer_s for r in runs], [r.training_flops for r in runs], machine),
        _throughput(lag, runs, busier),
        *sample_results(f"lag {lag}: ", samples, Bound(most, "with no waiting on either side"), price),
    ]
    return [
        *(replace(result, details={**result.details, **beside(lengths)}) for result in speeds),
        *length_results(f"lag {lag}: ", lengths),
        _reward(rounds, lag),
    ]


def work_result(
    name: str, seconds: Sequence[float], flops: Sequence[float], machine: Machine, peer: PeerFigure | None = None
) -> Result:
    """Seconds of a step that a side is at work, and the least that its products take; no bound where these are not known."""
    least = statistics.median(flops) / machine.flops if all(flops) else 0.0
    bound = Bound(least, f"{statistics.median(flops) / 1e12:.3g} TFLOP of products; {machine.how}") if least else NOT_KNOWN
    return Result(name, statistics.median(seconds), "s", seconds, bound, peer, larger_is_better=False)


def sample_results(
    prefix: str, per_s: Sequence[float], bound: Bound, price: float, peer: PeerFigure | None = None
) -> list[Result]:
    """Samples of an hour, and what a million of them cost at that rate; `bound` and `peer` are per second."""
    hourly, own = [3600 * each for each in per_s], statistics.median(per_s)

    def dollars(rate: float) -> float:
        return 1e6 / (3600 * rate) * price

    of_an_hour = peer and replace(peer, value=3600 * peer.value)
    of_a_million = peer and replace(peer, value=dollars(peer.value))
    why = f"{bound.why}; ${price:g} an hour"
    return [
        Result(f"{prefix}samples", 3600 * own, "samples/h", hourly, Bound(3600 * bound.value, bound.why), of_an_hour),
        Result(
            f"{prefix}a million samples",
            dollars(own),
            "$",
            [dollars(each) for each in per_s],
            Bound(dollars(bound.value) if bound.value else 0.0, why),
            of_a_million,
            larger_is_better=False,
            details={"price_per_hour": price},
        ),
    ]


def _step_time(rounds: Sequence[Mapping[str, E2ERun]], lag: int, runs: Sequence[E2ERun], busier: Sequence[float]) -> Result:
    peer = None
    if lag != LOCKSTEP and str(LOCKSTEP) in rounds[0]:
        lockstep = [row[str(LOCKSTEP)].step_s for row in rounds]
        comparison = compare(lockstep, [run.step_s for run in runs])
        peer = PeerFigure("lockstep", statistics.median(lockstep), comparison.ratio, comparison)
    return Result(
        f"lag {lag}: a step",
        statistics.median(run.step_s for run in runs),
        "s",
        [run.as_json() for run in runs],
        Bound(statistics.median(busier), "the work of the side that has more of it; the other's could all be done meanwhile"),
        peer,
        larger_is_better=False,
        details={
            "parts": {
                "trainer waits": statistics.median(run.trainer_wait_s for run in runs),
                "rollouts wait": statistics.median(run.rollouts_wait_s for run in runs),
            },
            "max_lag_seen": max(run.max_lag for run in runs),
        },
    )


def _throughput(lag: int, runs: Sequence[E2ERun], busier: Sequence[float]) -> Result:
    samples = [run.tokens_per_s for run in runs]
    best = statistics.median(run.tokens_per_s * run.step_s / busy for run, busy in zip(runs, busier, strict=True))
    return Result(
        f"lag {lag}: tokens", statistics.median(samples), "tok/s", samples, Bound(best, "with no waiting on either side")
    )


def _reward(rounds: Sequence[Mapping[str, E2ERun]], lag: int) -> Result:
    """After as much time as the fastest of the round took for all its steps."""
    samples = [row[str(lag)].reward_by(min(run.ends_s[-1] for run in row.values())) for row in rounds]
    why = "a reward of 1 for every answer"
    return Result(f"lag {lag}: reward after equal time", statistics.fmean(samples), "", samples, Bound(1.0, why))
