"""Diagnoses a run of another framework: the same answers as for ours, as far as its logs go."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from redline.lab.doctor.doctor import RULES, Diagnosis, Rule, examined
from redline.lab.doctor.facts import FEWEST, FIRST, Facts
from redline.lab.doctor.finding import Abstention
from redline.lab.doctor.rules import machine
from redline.lab.others import rules
from redline.lab.others.advice import ADVICE
from redline.runs.others import OtherRun
from redline.telemetry.summary.timeline import PREFIX

RULES_OF_OTHERS: Mapping[str, Rule] = {
    "slow_reward": rules.slow_reward,
    "sync_stall": rules.sync_stall,
    "double_forward": rules.double_forward,
    "io_bound": rules.io_bound,
    "frequent_evaluation": rules.frequent_evaluation,
    "staleness_waits": rules.staleness_waits,
    "long_tail": rules.long_tail,
    "no_signal": rules.no_signal,
    "failed_attempts": rules.failed_attempts,
    "imbalance": rules.imbalance,
    "slow_first_step": machine.slow_first_step,
    "throttling": machine.throttling,
}
"""Cause → the rule that looks for it in logs of others."""
_UNTOLD = {
    "the log has no figures of the engine": (
        "low_concurrency",
        "prefix_cache_off",
        "preemption",
        "kv_cache_too_small",
        "kv_cache_too_large",
        "too_much_tensor_parallelism",
        "speculation_off",
    ),
    "the log has no times of environments, prompts and batches": (
        "serial_episodes",
        "retokenising",
        "loading_stall",
        "serialisation",
    ),
    "the log does not say how a batch was divided, and what memory was free": (
        "micro_batch_too_small",
        "checkpointing_not_needed",
        "offload_not_needed",
        "memory_spike",
    ),
    "the log does not say which devices sampled and which trained": ("no_overlap",),
    "the log has no samples of the host": ("noisy_neighbour", "cpu_bound"),
}
"""What is missing → causes that no log of theirs can show."""


def diagnose(run: OtherRun) -> Diagnosis:
    """Look at a run for every cause that its log can show. Its logs are read already."""
    facts = facts_of(run)
    timed = [name for name in facts.steps if name.startswith(PREFIX)]
    phases = {name.removeprefix(PREFIX).removesuffix("_s"): facts.total(name) for name in timed}
    findings, abstentions = examined(facts, RULES_OF_OTHERS) if facts.num_steps >= FEWEST else ((), ())
    advice, bound = ADVICE[run.framework.key], run.bound(phases, None)
    return Diagnosis(
        run=str(run.folder.shown),
        bound=replace(bound, details=(*bound.details, *run.damage)),
        findings=tuple(replace(found, advice=advice.get(found.cause, found.advice)) for found in findings),
        abstentions=(*abstentions, *_untold()),
        wall_s=facts.wall_s,
        num_steps=facts.num_steps,
        has_phases=bool(phases),
        cannot="" if findings or phases else run.how_to_tell,
    )


def facts_of(run: OtherRun) -> Facts:
    """The figures of a log, the first steps apart, as those of a run of ours."""
    rows = list(run.rows("metrics"))
    apart = min(FIRST, max(0, len(rows) - FEWEST))
    times = [row["run/time_s"] for row in rows[apart:] if "run/time_s" in row]
    samples = [row for row in run.rows("samples") if times and times[0] <= row["time"] <= times[-1]]
    return Facts(run.config, _columns(rows[apart:]), _columns(rows[:apart]), _columns(samples), environment=run.environment)


def _columns(rows: Sequence[Mapping[str, float]]) -> dict[str, np.ndarray]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name, math.nan) for row in rows], dtype=float) for name in names}


def _untold() -> tuple[Abstention, ...]:
    return tuple(Abstention(cause, why) for why, causes in _UNTOLD.items() for cause in causes if cause in RULES)
