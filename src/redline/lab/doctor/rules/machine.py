"""Causes outside the loop: the host's cores, other processes, clocks, memory, and what the first steps take."""

from __future__ import annotations

import os

import numpy as np

from redline.lab.doctor.facts import Facts, Side
from redline.lab.doctor.finding import Abstention, Answer, Evidence, Finding


def slow_first_step(facts: Facts) -> Answer:
    """The first steps compile, load or fill caches, and take much longer than the rest."""
    first = facts.first.get("run/step_s")
    if first is None or not len(first):
        return None
    beyond = float(np.sum(np.maximum(0.0, first - facts.step_s)))
    spread = float(np.std(facts.steps["run/step_s"]))
    if beyond < 3 * spread:
        return None
    gain = facts.saved(
        "trainer", np.full(facts.num_steps, beyond / facts.num_steps), 0.2, 0.5, 0.9, "it can be kept from run to run"
    )
    return Finding(
        cause="slow_first_step",
        title=f"The first steps take {beyond:.1f} s more than the others.",
        why="Kernels are compiled, graphs captured and weights loaded when they are first used.",
        evidence=(
            Evidence("run/step_s", float(first[0]), "seconds of the first step", tuple(first.tolist())),
            facts.evidence("run/step_s", "seconds of a steady step"),
        ),
        gain=gain,
        change={},
        advice="It is paid once: longer runs feel it less. Keep torch's and Triton's caches on a disk that lasts.",
    )


def noisy_neighbour(facts: Facts) -> Answer:
    """Other processes use the cores that this run needs."""
    machine, own = facts.sampled("host/machine_cpu_percent"), facts.sampled("host/cpu_percent")
    if machine is None or own is None:
        return Abstention("noisy_neighbour", "the machine was not sampled; telemetry.sample_every_s=1 does")
    cores = facts.environment.get("cpu", {}).get("usable_cores") or os.cpu_count() or 1
    children = facts.sampled("host/children_cpu_percent") or 0.0
    others = machine - (own + children) / cores
    if others < 15 or machine < 85:
        return None
    taken = others / 100
    return Finding(
        cause="noisy_neighbour",
        title=f"Other processes take {others:.0f}% of the machine.",
        why="The cores are busy, and a part of that is not this run.",
        evidence=(
            Evidence("host/machine_cpu_percent", machine, "% of all cores, busy with whatever"),
            Evidence("host/cpu_percent", own, "% of one core, this process"),
            Evidence("host/children_cpu_percent", children, "% of one core, its children"),
        ),
        gain=facts.saved(
            _worker(facts),
            facts.phases(("generation", "training"), _worker(facts)),
            0.3 * taken,
            0.8 * taken,
            min(1.0, 1.2 * taken),
            "they compete for the same cores",
        ),
        change={},
        advice="Stop them, or give this run cores of its own (taskset, a container); compare runs only when they are gone.",
    )


def cpu_bound(facts: Facts) -> Answer:
    """A GPU stands still while the host prepares its work."""
    if facts.setting("run.device", "cpu") != "cuda":
        return None
    busy, own = facts.sampled("gpu/0/utilization_percent"), facts.sampled("host/cpu_percent")
    if busy is None or own is None:
        return Abstention("cpu_bound", "the GPU was not sampled; install the extra `gpu`")
    waits = float((facts.trainer_waits + facts.phase("environment") + facts.phase("reward")).sum()) / max(1e-9, facts.wall_s)
    idle = max(0.0, 1 - busy / 100 - waits)
    if busy > 70 or own < 80:
        return None
    return Finding(
        cause="cpu_bound",
        title=f"The GPU is idle {100 - busy:.0f}% of the time, while one core of the host is at work.",
        why="Kernels are launched one by one by Python, slower than the GPU runs them.",
        evidence=(
            Evidence("gpu/0/utilization_percent", busy, "% of the time in which some kernel ran"),
            Evidence("host/cpu_percent", own, "% of one core"),
        ),
        gain=facts.saved(
            _worker(facts), facts.steps["run/step_s"] * idle, 0.2, 0.5, 0.9, "larger batches need fewer launches per token"
        ),
        change={"rollouts.groups_per_step": 2 * facts.setting("rollouts.groups_per_step", 8)},
        advice="More work per launch: more groups a step, larger micro-batches. `redline profile` shows the host's part.",
    )


def throttling(facts: Facts) -> Answer:
    """The GPU lowers its clocks for heat or power."""
    if facts.setting("run.device", "cpu") != "cuda":
        return None
    clock = facts.samples.get("gpu/0/sm_clock_mhz")
    if clock is None or not np.isfinite(clock).any():
        return Abstention("throttling", "the GPU's clocks were not sampled; install the extra `gpu`")
    fastest, mean = float(np.nanmax(clock)), float(np.nanmean(clock))
    lost = 1 - mean / fastest
    hot = facts.sampled("gpu/0/temperature_c") or 0.0
    power, limit = facts.sampled("gpu/0/power_w"), facts.sampled("gpu/0/power_limit_w")
    at_limit = power is not None and limit is not None and power > 0.95 * limit
    if lost < 0.05 or not (at_limit or hot > 80):
        return None
    return Finding(
        cause="throttling",
        title=f"The GPU's clock is {lost:.0%} below what it reaches.",
        why="It is at its limit of power." if at_limit else "It is hot.",
        evidence=(
            Evidence("gpu/0/sm_clock_mhz", mean, f"MHz on average, {fastest:.0f} at best", tuple(clock[:200].tolist())),
            Evidence("gpu/0/temperature_c", hot, "°C"),
            Evidence("gpu/0/power_w", power or 0.0, f"W, of {limit or 0:.0f} allowed"),
        ),
        gain=facts.saved(_worker(facts), facts.steps["run/step_s"], 0.2 * lost, 0.7 * lost, lost, "the work follows the clock"),
        change={},
        advice="Look at cooling and at `nvidia-smi -q -d PERFORMANCE,POWER`; raise the limit if it was lowered.",
    )


def _worker(facts: Facts) -> Side:
    """The side that bounds the run; in lockstep either."""
    return facts.bounding or "trainer"
