"""Runs a recipe with other settings on this machine: recorded for a few steps, or in pairs of processes that take turns."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from redline.child import Child, ChildError
from redline.config import Config, load_recipe, refuse_without_effect, resolve
from redline.errors import ConfigError, RunFolderError, SideError
from redline.lab.compare.sides import OWN_SOURCE
from redline.lab.compare.worker import Job, Told, Turns, environment_of, measure_pair
from redline.lab.doctor.doctor import RULES, diagnose
from redline.lab.doctor.facts import Facts
from redline.lab.evidence.experiment import Pair
from redline.lab.simulate.recorded import Recording
from redline.lab.tune.proposals import proposals
from redline.lab.tune.space import Change, Situation, changes, name_of, overrides_of
from redline.lab.tune.trials import failure_kind, refuse_for_the_disk
from redline.lab.tune.tune import Look
from redline.launch.placement import place, visible_gpus
from redline.runs.run import Run

if TYPE_CHECKING:
    from redline.lab.plan.plan import Plan

RECORDED_STEPS = 10
"""Steps of a recording: the first two are apart, and eight are enough for the doctor and the simulator."""
FEWEST_ROUNDS, MOST_ROUNDS = 6, 24
"""Rounds of a pair: six are the fewest that have an exact interval."""
PHASES = {"training": ("forward/backward", "optimizer step"), "generation": ("generation",)}
"""Phase of a step → the planner's names of its parts."""
OF_THE_RECIPE = {cause: rule for cause, rule in RULES.items() if cause != "noisy_neighbour"}
"""What is looked for. Neighbours take their part of every setting's time, and what a setting saves is not theirs."""
MOST_TOGETHER = 0.8
"""Share of a GPU's memory that two sides may need at once, by the planner: then they take turns on it."""
FIRST_S, LEAST_S, PATIENCE = 1800.0, 120.0, 20.0
"""What a start or a step may take before it counts as a hang: seconds while nothing is known, seconds in any case, and times
the longest so far."""


@dataclass(slots=True)
class ProcessBench:
    """Implements `tune.Bench` with processes of this machine."""

    recipe: Path
    overrides: Sequence[str]
    folder: Path
    """Where recordings are kept."""
    max_lag: int
    identity: str = ""
    """What recordings are of: those of another recipe, model or machine in the same folder are not looked at."""
    told: Told | None = None
    """What the last pair said of itself."""
    longest_s: float = 0.0
    _plans: dict[tuple[str, float | None], Plan | None] = field(default_factory=dict)

    # ── looking ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def look(self, settings: Change) -> Look:
        """Record and read. A recipe that cannot be recorded has proposals without predictions."""
        config = self.config(settings)
        try:
            run = self._recorded(settings)
        except (SideError, RunFolderError) as error:
            if not settings:
                raise
            situation = Situation(config, self.max_lag, _cores(), visible_gpus())
            return self._look(settings, situation, None, None, f"no recording: {error.message.splitlines()[0]}")
        facts = Facts.of(run)
        situation = Situation(
            config,
            self.max_lag,
            _cores(),
            visible_gpus(),
            _largest(facts, "trainer/tokens"),
            facts.mean("engine/prompt_tokens"),
        )
        return self._look(settings, situation, run, facts, "")

    def _look(self, settings: Change, situation: Situation, run: Run | None, facts: Facts | None, why: str) -> Look:
        diagnosis = diagnose(run, rules=OF_THE_RECIPE) if run else None
        found = proposals(
            changes(situation), diagnosis, _recording(run), lambda change: self._planned_ratio(settings, change, facts)
        )
        refused = {proposal.name: self._refusal({**settings, **proposal.change}, facts) for proposal in found}
        return Look(
            step_s=facts.step_s if facts and facts.step_s else None,
            bound=diagnosis.bound.headline if diagnosis else why,
            proposals=[proposal for proposal in found if not refused[proposal.name]],
            ruled_out={name: reason for name, reason in refused.items() if reason},
        )

    def config(self, settings: Change) -> Config:
        """The resolved recipe with other settings. Raises `ConfigError` where it is none."""
        resolved = resolve(load_recipe(self.recipe, [*self.overrides, *overrides_of(settings)])).config
        refuse_without_effect(resolved)
        return resolved

    def _refusal(self, settings: Change, facts: Facts | None) -> str:
        """Why these settings cannot run here; empty where they may."""
        if settings.get("buffer.max_lag", 0) > self.max_lag:
            return f"a lag of more than {self.max_lag} is not allowed"
        try:
            place(self.config(settings))
        except ConfigError as error:
            return error.message
        plan = self._plan(settings, facts)
        return "" if plan is None or plan.fits else plan.verdict

    # ── the planner ────────────────────────────────────────────────────────────────────────────────────────────────────

    def _plan(self, settings: Change, facts: Facts | None) -> Plan | None:
        """The plan of these settings, with lengths as recorded; None where the planner does not know the model or device."""
        from redline.lab.plan.plan import Hardware, make_plan  # imports torch: what is wrong with the recipe is said before

        name = name_of({key: value for key, value in settings.items() if key != "run.num_threads"})  # plans measure a machine
        lengths = facts.mean("rollouts/completion_tokens_mean") if facts else None
        if (name, lengths) not in self._plans:
            config = load_recipe(self.recipe, [*self.overrides, *overrides_of(settings)])
            threads = self.config({}).run.num_threads
            same = config.model_copy(update={"run": config.run.model_copy(update={"num_threads": threads})})
            try:
                self._plans[name, lengths] = make_plan(same, Hardware(), mean_new_tokens=lengths)
            except ConfigError:
                self._plans[name, lengths] = None
        return self._plans[name, lengths]

    def _planned_ratio(self, settings: Change, change: Change, facts: Facts | None) -> float | None:
        """How many times as fast the planner takes a change for: what it says of the phase, by the phase's recorded share."""
        if facts is None or not facts.step_s or self._refusal({**settings, **change}, facts):
            return None
        phase = "training" if next(iter(change)).startswith("trainer.") else "generation"
        plans = self._plan(settings, facts), self._plan({**settings, **change}, facts)
        before, after = (sum(plan.time.seconds_of(name) for name in PHASES[phase]) if plan else 0.0 for plan in plans)
        share = min(1.0, float(facts.phase(phase).mean()) / facts.step_s)
        return 1 / (1 - share * (1 - after / before)) if before and after else None

    # ── recordings ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def _recorded(self, settings: Change) -> Run:
        """The recording of these settings; made where there is none that is whole. Raises `SideError`."""
        name = self._name(settings)
        folder = self.folder / f"{name}-001"
        if folder.is_dir():
            if (made := _whole(folder)) is not None:
                return made
            shutil.rmtree(folder)
        own = [
            f"run.name={name}",
            f"run.folder={json.dumps(str(self.folder))}",
            f"run.steps={RECORDED_STEPS}",
            "run.checkpoint_every=0",
        ]
        own += ["rollouts.evaluation={num_tasks: 0}", "telemetry.sinks=[]", "telemetry.alert_webhook=null"]
        task = {"recipe": str(self.recipe.resolve()), "overrides": [*self.overrides, *overrides_of(settings), *own]}
        command = [sys.executable, "-m", "redline.lab.tune.record_process", json.dumps(task)]
        with Child(command, environment_of(OWN_SOURCE), own_group=True) as child:
            try:
                run = Run.open(child.read(self._limit_s(RECORDED_STEPS))["run"])
            except ChildError as failed:
                error = SideError(f"{name_of(settings)} {failed}", side=name_of(settings), code=failed.code)
                refuse_for_the_disk(error)
                raise error from None
        for weights in (run.folder.checkpoints, run.folder.model):
            shutil.rmtree(weights, ignore_errors=True)  # nothing goes on from here
        return run

    def _name(self, settings: Change) -> str:
        """What the run of a recording is called."""
        return hashlib.sha256(f"{self.identity}{name_of(settings)}".encode()).hexdigest()[:12]

    # ── pairs ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def measure(self, a: Change, b: Change, number: int) -> Pair:
        """Blocks for a pair. Sides that do not fit into the memory together run one after the other."""
        jobs = self._job(a), self._job(b)
        alternate = self._rests(a) and self._rests(b) and self._fit_together(a, b)
        try:
            pair, self.told = measure_pair(*jobs, Turns(self._rounds(), alternate, self._limit_s()), number, 0)
        except SideError as error:
            if not alternate or failure_kind(error) != "memory":
                raise
            pair, self.told = measure_pair(*jobs, Turns(self._rounds(), False, self._limit_s()), number, 0)
        self.longest_s = max(
            [self.longest_s, self.told.startup_s, *(side["wall_s"] for r in pair.rounds for side in (r.a, r.b))]
        )
        return pair

    def _job(self, settings: Change) -> Job:
        overrides = [*self.overrides, *overrides_of(settings)]
        task, lag = {"recipe": str(self.recipe.resolve()), "overrides": overrides}, self.config(settings).buffer.max_lag
        return Job(OWN_SOURCE, task, name_of(settings), lag)

    def _rests(self, settings: Change) -> bool:
        """Whether the process does nothing while the other side has its turn. Engines and environments of its own go on."""
        config = self.config(settings)
        goes_on = config.rollouts.environment.name is not None or getattr(config.rollouts.task, "kind", "") == "import"
        return not config.placement.engines and not (config.buffer.max_lag and goes_on)

    def _fit_together(self, a: Change, b: Change) -> bool:
        """Whether a GPU holds both sides at once, each with the sizes that it would have alone: the recipe gives them, and they
        are small. On a CPU that is found out."""
        configs = self.config(a), self.config(b)
        if all(config.run.device == "cpu" for config in configs):
            return True
        if any(not c.engine.kv_cache_memory_bytes or not c.trainer.max_tokens_per_micro_batch for c in configs):
            return False  # sizes that are chosen by the memory that is free
        plans = [plan for settings in (a, b) if (plan := self._plan(settings, None)) is not None]
        needed = sum(plan.memory.worst.total for plan in plans)
        return len(plans) == 2 and needed <= MOST_TOGETHER * plans[0].setup.device.memory_bytes

    def _rounds(self) -> int:
        """An even number, so that each side is first as often; together they last about as long as the start."""
        wanted = self.told.startup_s / self.told.round_s if self.told else 0.0
        return 2 * math.ceil(min(MOST_ROUNDS, max(FEWEST_ROUNDS, wanted)) / 2)

    def _limit_s(self, steps: int = 1) -> float:
        return max(LEAST_S, PATIENCE * self.longest_s) * steps if self.longest_s else FIRST_S


def _whole(folder: Path) -> Run | None:
    """The recording in a folder; None where it was killed before its end, maybe before there was anything in it."""
    try:
        run = Run.open(folder)
        return run if run.steps >= RECORDED_STEPS and run.ledger is not None else None
    except RunFolderError:
        return None


def _recording(run: Run | None) -> Recording | None:
    """The run as the simulator takes it; None where it recorded too little for that."""
    try:
        return Recording.of(run) if run else None
    except RunFolderError:
        return None


def _largest(facts: Facts, metric: str) -> float | None:
    values = facts.steps.get(metric)
    if values is None or not np.isfinite(values).any():
        return None
    return float(np.nanmax(values)) / max(1.0, facts.mean("trainer/updates") or 1.0)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
