"""`redline bench rollout`: tasks, engine and rewards without a trainer: attempts and tokens per second, and where time goes.

Every round attempts the tasks of one step. They are those of a recipe; or those of a run folder (`replay`), where the attempts
at each task are as long as they were in the run, whatever the model says today. Without a trainer there is memory for nothing
else, and the policy stays what it is, so that all rounds do the same kind of work.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from redline.config import Config, load_recipe, refuse_without_effect, resolve, validate
from redline.engine import EngineSession
from redline.errors import ConfigError
from redline.lab.bench.settings import RolloutSettings
from redline.lab.evidence.document import Bound, Measured, Result
from redline.lab.evidence.statistics import percentiles
from redline.lab.material.forced_lengths import ForcedLengths
from redline.lab.material.recorded import RecordedStep, recorded_steps
from redline.lab.measure import roofline
from redline.lab.measure.machine import Machine, measure_machine, synchronize
from redline.lab.measure.pairs import interleave
from redline.lab.measure.warmup import warm_up
from redline.lab.peers.contest import OURS
from redline.launch.build import make_rollout_setup
from redline.launch.engines import engine_of
from redline.launch.models import load_policy
from redline.launch.preflight import check_inputs, load_tasks
from redline.launch.process import prepare_process
from redline.models.files.hf import AnyDecoder
from redline.models.sizes.flops import NetworkCost
from redline.rollouts import Dispatcher
from redline.runs import Run
from redline.telemetry import Recorder, recording
from redline.types import Trajectory, TrajectoryGroup

LETTERS = {"kind": "import", "path": "redline.lab.material.tasks:Letters"}
Rounds = Sequence[Mapping[str, "RolloutRun"]]


@dataclass(slots=True, frozen=True)
class RolloutRun:
    """The groups of one step."""

    seconds: float
    groups: int
    attempts: int
    prompt_tokens: int
    """Tokens of all prompts, each once."""
    new_tokens: int
    engine_s: float
    part_s: Mapping[str, float]
    """By span; what no span owns included."""
    latency_s: Sequence[float]
    """From submission to the last token, of each reply: one for an attempt, or several in an environment."""
    first_token_s: Sequence[float]
    reward: float
    failures: int

    @classmethod
    def of(cls, groups: Sequence[TrajectoryGroup], seconds: float, part_ns: Mapping[str, int]) -> RolloutRun:
        sequences: list[Trajectory] = [t for group in groups for t in group.trajectories]
        attempts = [own for group in groups for own in group.attempts]
        turns = [turn for t in sequences for turn in t.turns]
        part_s = {name: ns / 1e9 for name, ns in part_ns.items()}
        return cls(
            seconds=seconds,
            groups=len(groups),
            attempts=len(attempts),
            prompt_tokens=sum(int(np.count_nonzero(~group.trajectories[0].loss_mask)) for group in groups),
            new_tokens=sum(t.num_completion_tokens for t in sequences),
            engine_s=sum(s for name, s in part_s.items() if name.startswith("engine.")),
            part_s=part_s,
            latency_s=[turn.total_s for turn in turns],
            first_token_s=[turn.first_token_s for turn in turns],
            reward=statistics.fmean(own[0].reward for own in attempts),
            failures=sum(own[0].failure is not None for own in attempts),
        )

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds

    @property
    def attempts_per_s(self) -> float:
        return self.attempts / self.seconds

    def as_json(self) -> dict[str, Any]:
        return {
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "attempts_per_s": self.attempts_per_s,
            "new_tokens": self.new_tokens,
            "engine_s": self.engine_s,
            "part_s": dict(self.part_s),
            "reward": self.reward,
            "failures": self.failures,
        }


class RolloutStage:
    """Everything a recipe's rollouts need, and no trainer."""

    def __init__(self, config: Config, recorded: Sequence[RecordedStep]) -> None:
        prepare_process(config)
        self._config = config
        self._recorded = recorded
        self._device = torch.device(config.run.device)
        model = load_policy(config)
        self.decoder = model.decoder
        self.engine = engine_of(model, config.engine)
        self._forced = ForcedLengths(self.engine)
        setup = make_rollout_setup(config, model, self.engine, load_tasks(config))
        self._rollouts = Dispatcher(EngineSession(self._forced if recorded else self.engine), setup)

    def run(self, number: int) -> RolloutRun:
        """The groups of step `number`; a replay begins again where the run ended."""
        indices = self._indices(number)
        recorder = Recorder(keep_spans=False)
        self.engine.reset_prefix_cache()
        synchronize(self._device)
        with recording(recorder):
            recorder.step_mark()
            started = time.perf_counter()
            self._rollouts.begin(indices, 0)
            groups = self._rollouts.finished()
            synchronize(self._device)
            seconds = time.perf_counter() - started
            return RolloutRun.of(groups, seconds, recorder.step_mark())

    def _indices(self, number: int) -> Sequence[int]:
        if not self._recorded:
            size = self._config.rollouts.groups_per_step
            return range(number * size, (number + 1) * size)
        step = self._recorded[number % len(self._recorded)]
        self._forced.lengths = {group: step.of_group(group) for group in step.indices}
        return step.indices


def measure(settings: RolloutSettings, console: Console) -> Measured:
    config = recipe_of(settings)
    stage = RolloutStage(config, recorded_steps(settings.replay) if settings.replay else [])
    machine = measure_machine(torch.device(config.run.device), getattr(torch, config.model.dtype))
    console.print(machine.how, style="dim")
    _, warm = warm_up(lambda _: stage.run(0), max_seconds=settings.warmup_s)

    def tell(number: int, row: Mapping[str, RolloutRun]) -> None:
        run = row[OURS]
        console.print(
            f"round {number + 1}/{settings.pairs}: {run.tokens_per_s:,.0f} tok/s, {run.attempts_per_s:,.1f} attempts/s",
            style="dim",
        )

    rounds = interleave({OURS: lambda number: stage.run(number + 1)}, settings.pairs, settings.seed, tell)
    runs = [row[OURS] for row in rounds]
    used = settings.model_copy(
        update={
            "model": config.model.path,
            "dtype": config.model.dtype,
            "seed": config.run.seed,
            "engine": config.engine,
            "groups_per_step": config.rollouts.groups_per_step,
            "group_size": config.rollouts.group_size,
            "max_new_tokens": config.rollouts.max_new_tokens,
        }
    )
    return Measured(used, _results(runs, config, _cost(stage.decoder, config), machine), warm_ups={OURS: warm})


def recipe_of(settings: RolloutSettings) -> Config:
    """The recipe named, with what the command line says on top; a run's recipe as it was; or letters."""
    run = {"device": settings.device, "num_threads": settings.num_threads}
    if settings.replay is not None:
        recipe = Run.open(settings.replay).config
        _refuse_conversations(settings.replay, recipe)
        recipe["run"] |= run
        recipe["engine"] |= settings.engine.model_dump(exclude_unset=True)
        return resolve(validate(recipe, "redline bench rollout")).config
    sizes = settings.model_dump(include={"groups_per_step", "group_size", "max_new_tokens"})
    engine = settings.engine.model_dump(exclude_unset=True)
    if settings.recipe is not None:
        given = {f"rollouts.{key}": value for key, value in sizes.items() if key in settings.model_fields_set}
        given |= {f"engine.{key}": value for key, value in engine.items()} | {f"run.{key}": value for key, value in run.items()}
        given |= {"run.seed": settings.seed} if "seed" in settings.model_fields_set else {}
        config = resolve(load_recipe(settings.recipe, [f"{key}={json.dumps(value)}" for key, value in given.items()])).config
        refuse_without_effect(config)
        check_inputs(config)
        return config
    recipe = {
        "run": {**run, "seed": settings.seed},
        "model": {"path": settings.model, "dtype": settings.dtype},
        "rollouts": {"task": LETTERS, **sizes, "advantages": "group_centred" if settings.group_size > 1 else "batch"},
        "engine": {"max_num_seqs": settings.groups_per_step * settings.group_size, **engine},
    }
    return resolve(validate(recipe, "redline bench rollout")).config


def _refuse_conversations(run: Path, recipe: Mapping[str, Any]) -> None:
    """Replies of one turn are replayed by their lengths; what an environment answered in between is not known any more."""
    if (recipe.get("rollouts", {}).get("environment") or {}).get("name"):
        raise ConfigError(
            f"replay = {run}: its attempts were played in an environment",
            "measure the environment itself: redline bench rollout environment=NAME",
        )


# ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _cost(decoder: AnyDecoder, config: Config) -> NetworkCost:
    return NetworkCost.of(decoder).quantized(config.engine.quantization, getattr(torch, config.model.dtype))


def _results(runs: Sequence[RolloutRun], config: Config, cost: NetworkCost, machine: Machine) -> list[Result]:
    attempts = sum(run.attempts for run in runs)
    sampled, replies = sum(run.new_tokens for run in runs), sum(len(run.latency_s) for run in runs)
    tokens, whole = sampled / attempts, "latency of an attempt" if replies == attempts else "latency of a reply"
    groups = sum(run.groups for run in runs)
    load = roofline.Load(
        prompts=max(1, round(groups / len(runs))),
        prompt_tokens=sum(run.prompt_tokens for run in runs) / groups,
        n=config.rollouts.group_size,
        new_tokens=max(1, round(tokens)),
        max_num_seqs=config.engine.max_num_seqs,
        guesses=config.engine.speculation != "off",
    )
    fastest = roofline.throughput_bound(cost, load, machine)
    first, between = (bound(cost, load, machine) for bound in (roofline.first_token_bound, roofline.inter_token_bound))
    samples = [run.as_json() for run in runs]
    return [
        Result("tokens", statistics.median(run.tokens_per_s for run in runs), "tok/s", samples, fastest),
        Result(
            "attempts",
            statistics.median(run.attempts_per_s for run in runs),
            "attempts/s",
            [run.attempts_per_s for run in runs],
            Bound(fastest.value / tokens, f"{tokens:.1f} tokens per attempt on average; {fastest.why}"),
        ),
        _engine_share(runs),
        _latency(whole, [run.latency_s for run in runs], _whole_reply(first, between, max(1, round(sampled / replies)))),
        _latency("time to first token", [run.first_token_s for run in runs], first),
    ]


def _engine_share(runs: Sequence[RolloutRun]) -> Result:
    samples = [100 * run.engine_s / run.seconds for run in runs]
    names = dict.fromkeys(name for run in runs for name in run.part_s)
    parts = {name: statistics.median(100 * run.part_s.get(name, 0.0) / run.seconds for run in runs) for name in sorted(names)}
    why = "the engine samples all the time, and tasks and rewards take none"
    return Result("time in the engine", statistics.median(samples), "%", samples, Bound(100, why), details={"parts": parts})


def _whole_reply(first: Bound, between: Bound, tokens: int) -> Bound:
    value = first.value + (tokens - 1) * between.value
    return Bound(value, f"the first token, and {tokens - 1} more steps, for a reply of the mean length; {between.why}")


def _latency(name: str, seconds: Sequence[Sequence[float]], bound: Bound) -> Result:
    every = [s for of_round in seconds for s in of_round]
    found = percentiles(every)
    samples = [list(of_round) for of_round in seconds]
    return Result(name, found["p50"], "s", samples, bound, larger_is_better=False, details={"percentiles": found})
