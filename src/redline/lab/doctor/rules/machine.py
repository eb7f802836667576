"""Causes outside the loop: the host's cores, other processes, clocks, memory, and what the first steps take."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from redline.lab.doctor.facts import Facts, Parts, Side
from redline.lab.doctor.finding import Abstention, Answer, Evidence, Finding
from redline.lab.doctor.rules.sizes import usable_cores

ONCE_S = 1.0
"""Seconds, paid once in a run, that are nobody's bottleneck."""
CLOCK = "/sm_clock_mhz"


def slow_first_step(facts: Facts) -> Answer:
    """The first steps compile, load or fill caches, and take much longer than the rest."""
    first = facts.first.get("run/step_s")
    if first is None or not len(first):
        return None
    beyond = float(np.sum(np.maximum(0.0, first - facts.step_s)))
    spread = float(np.std(facts.steps["run/step_s"]))
    if beyond < max(ONCE_S, 3 * spread):
        return None
    return Finding(
        cause="slow_first_step",
        title=f"The first steps take {beyond:.1f} s more than the others.",
        why="Kernels are compiled, graphs captured and weights loaded when they are first used.",
        evidence=(
            Evidence("run/step_s", float(first[0]), "seconds of the first step", tuple(first.tolist())),
            facts.evidence("run/step_s", "seconds of a steady step"),
        ),
        gain=facts.saved(
            "both",
            np.full(facts.num_steps, beyond / facts.num_steps),
            "step",
            Parts(0.2, 0.7, 1.0),
            "it can be kept from run to run",
        ),
        change={},
        advice="It is paid once: longer runs feel it less. Keep torch's and Triton's caches on a disk that lasts.",
    )


def noisy_neighbour(facts: Facts) -> Answer:
    """Other processes use the cores that this run needs, on some machine of it."""
    here = _neighbour(facts, "the machine", Parts(0.5, 0.9, 1.2), "they compete for the same cores")
    parts, assumption = Parts(0.0, 0.5, 1.2), "they compete for the same cores, and the run waits for {}"
    return _worst(here, [_neighbour(there, name, parts, assumption.format(name)) for name, there in facts.elsewhere()])


def _worst(here: Answer, elsewhere: Iterable[Answer]) -> Answer:
    """What costs most of what was found on all machines; what rank 0's tells where nothing was."""
    found = [answer for answer in (here, *elsewhere) if isinstance(answer, Finding)]
    return max(found, key=lambda finding: finding.gain.likely_s) if found else here


def _neighbour(facts: Facts, where: str, parts: Parts, assumption: str) -> Answer:
    machine, own = facts.sampled("host/machine_cpu_percent"), facts.sampled("host/cpu_percent")
    if machine is None or own is None:
        return Abstention("noisy_neighbour", f"the machine was not sampled; {facts.how_to_sample}")
    cores = facts.sampled("host/cores") or usable_cores(facts)
    children = facts.sampled("host/children_cpu_percent") or 0.0
    others = machine - (own + children) / cores
    if others < 15:
        return None
    waited = facts.sampled("host/core_wait_percent")
    if waited is None and machine < 85:
        return None
    # What its own threads wanted at once, in % of one core: beyond the cores that there are they were in each other's way.
    wanted = own + children + (waited or 0.0)
    theirs = 1.0 if wanted <= 100 * cores else others / max(1e-9, others + (own + children) / cores)
    taken = others / 100 if waited is None else min(1.0, waited / 100) * theirs
    seconds = facts.phases(("generation", "training")) if waited is None else facts.column("run/step_s")
    return Finding(
        cause="noisy_neighbour",
        title=f"Other processes take {others:.0f}% of {where}.",
        why="This run's threads wait for cores that other processes have.",
        evidence=(
            Evidence("host/machine_cpu_percent", machine, f"% of all cores of {where}, busy with whatever"),
            Evidence("host/cpu_percent", own, "% of one core, this process"),
            Evidence("host/children_cpu_percent", children, "% of one core, its children"),
            *((Evidence("host/core_wait_percent", waited, "% of the time a thread waited for a core"),) if waited else ()),
        ),
        gain=facts.saved("both", seconds * taken, "step", parts, assumption),
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
            facts.evidence("trainer/micro_batches", "pieces of a batch, each launched by itself"),
            facts.evidence("engine/batch_size_mean", "sequences decoded by one launch"),
        ),
        gain=facts.saved(
            _worker(facts),
            facts.column("run/step_s") * idle,
            "step",
            Parts(0.1, 0.4, 0.9),
            "the same work takes fewer launches",
        ),
        change=_fewer_launches(facts),
        advice="The time of a token falls with more work per launch: larger micro-batches, more sequences decoded at once, and,"
        " where the algorithm allows it, more groups a step. `redline profile` shows the host's part.",
    )


def _fewer_launches(facts: Facts) -> dict[str, object]:
    """Keys that let the same batch be computed in fewer launches; none where nothing limits them. A larger batch would be
    another training, and comparing its steps would prove nothing."""
    change: dict[str, object] = {}
    now = facts.setting("trainer.max_tokens_per_micro_batch")
    if isinstance(now, int) and (facts.mean("trainer/micro_batches") or 0.0) > (facts.mean("trainer/updates") or 1.0):
        change["trainer.max_tokens_per_micro_batch"] = 4 * now
    rows = facts.setting("engine.max_num_seqs", 256)
    if (facts.mean("engine/batch_size_mean") or 0.0) > 0.8 * rows:
        change["engine.max_num_seqs"] = 4 * rows
    return change


def throttling(facts: Facts) -> Answer:
    """A GPU lowers its clocks for heat or power, on some machine of the run."""
    if facts.setting("run.device", "cpu") != "cuda":
        return None
    elsewhere = [
        _throttled(there, gpu, f"GPU {gpu.removeprefix('gpu/')} of {name}", Parts(0.0, 0.5, 1.0))
        for name, there in facts.elsewhere()
        for gpu in sorted(figure.removesuffix(CLOCK) for figure in there.samples if figure.endswith(CLOCK))
    ]
    return _worst(_throttled(facts, "gpu/0", "the GPU", Parts(0.2, 0.7, 1.0)), elsewhere)


def _throttled(facts: Facts, gpu: str, which: str, parts: Parts) -> Answer:
    """`gpu` is the beginning of its figures, `which` what a person calls it."""
    clock = facts.samples.get(f"{gpu}{CLOCK}")
    if clock is None or not np.isfinite(clock).any():
        return Abstention("throttling", "the GPU's clocks were not sampled; install the extra `gpu`")
    fastest, mean = float(np.nanmax(clock)), float(np.nanmean(clock))
    lost = 1 - mean / fastest
    hot = facts.sampled(f"{gpu}/temperature_c") or 0.0
    power, limit = facts.sampled(f"{gpu}/power_w"), facts.sampled(f"{gpu}/power_limit_w")
    at_limit = power is not None and limit is not None and power > 0.95 * limit
    if lost < 0.05 or not (at_limit or hot > 80):
        return None
    course = tuple(clock[np.isfinite(clock)][:200].tolist())
    return Finding(
        cause="throttling",
        title=f"The clock of {which} is {lost:.0%} below what it reaches.",
        why="It is at its limit of power." if at_limit else "It is hot.",
        evidence=(
            Evidence(f"{gpu}{CLOCK}", mean, f"MHz on average, {fastest:.0f} at best", course),
            Evidence(f"{gpu}/temperature_c", hot, "°C"),
            Evidence(f"{gpu}/power_w", power or 0.0, f"W, of {limit or 0:.0f} allowed"),
        ),
        gain=facts.saved("both", facts.column("run/step_s") * lost, "step", parts, "the work follows the clock"),
        change={},
        advice="Look at cooling and at `nvidia-smi -q -d PERFORMANCE,POWER`; raise the limit if it was lowered.",
    )


def _worker(facts: Facts) -> Side:
    """The side that bounds the run; in lockstep either."""
    return facts.bounding or "trainer"
