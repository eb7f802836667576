"""Causes between the stages: taking turns, waiting for fresh data, weight sync, the buffer, checkpoints."""

from __future__ import annotations

import math

import numpy as np

from redline.lab.doctor.facts import BETWEEN, EVALUATION, Facts, Parts
from redline.lab.doctor.finding import Abstention, Answer, Evidence, Finding
from redline.lab.doctor.rules.rollouts import has_few_workers
from redline.lab.doctor.rules.sizes import is_bookkeeping, rows_of_an_engine

WORTH_WRITING = 0.02
"""Share of the time that checkpoints may take."""


def long_tail(facts: Facts) -> Answer:
    """A few long attempts keep the engine at work with most of its rows empty, while the trainer stands still."""
    late = facts.phase("wait_for_late_groups")
    slow, usual = facts.mean("rollouts/attempt_latency_p99_s"), facts.mean("rollouts/attempt_latency_p50_s")
    rows, batch = rows_of_an_engine(facts), facts.mean("engine/batch_size_mean")
    if slow is None or not usual or batch is None or (slow < 2 * usual and not late.any()):
        return None
    idle = max(0.0, 1 - batch / rows)
    lag = facts.setting("buffer.max_lag", 0)
    lost = facts.phase("generation") * idle if facts.is_lockstep else late
    return Finding(
        cause="long_tail",
        title=f"A few long attempts take {slow / usual:.1f} times as long as the usual one.",
        why="While the last of them are decoded, most rows of the engine are empty, and the trainer has nothing to do.",
        evidence=(
            facts.evidence("rollouts/attempt_latency_p50_s", "seconds of the usual attempt"),
            facts.evidence("rollouts/attempt_latency_p99_s", "seconds of the longest"),
            facts.evidence("engine/batch_size_mean", f"sequences decoded at once by an engine, of {rows:.0f} that began"),
            Evidence("timeline/wait_for_late_groups_s", float(late.mean()), "seconds a step that the trainer waits for them"),
        ),
        gain=facts.saved(
            "rollouts",
            lost,
            "generation",
            Parts(0.1, 0.5, 0.9),
            "the trainer, and attempts of the next batch, fill the empty rows' time",
        ),
        change={"buffer.max_lag": lag + 1},
        advice="Attempts are then up to that many steps older; the docs of the buffer say what that does to training.",
    )


def no_overlap(facts: Facts) -> Answer:
    """Rollouts wait for something other than the trainer's device, and the trainer still stands still meanwhile."""
    if not facts.is_lockstep:
        return None
    apart = np.zeros(facts.num_steps)
    if not has_few_workers(facts):  # more of them come first
        computing = facts.column("timeline_environments/environment_s") + facts.column("timeline_environments/data_s")
        apart = apart + np.maximum(0.0, facts.phase("wait_for_environments") - computing)
    if facts.setting("placement.engines", 0):
        apart = apart + facts.phases(("generation", "wait_for_engine"))
    lost = np.minimum(apart, facts.phase("training"))
    return Finding(
        cause="no_overlap",
        title="Rollouts and trainer take turns, though neither is in the other's way.",
        why="With buffer.max_lag=0 the trainer stands still while environments, or engines of their own, are at work.",
        evidence=(
            Evidence("waits", float(apart.mean()), "seconds a step that environments wait, or engines apart work"),
            facts.evidence("timeline/training_s", "seconds a step"),
            Evidence("placement.engines", facts.setting("placement.engines", 0), "engines in processes of their own"),
        ),
        gain=facts.saved("rollouts", lost, "training", Parts(0.4, 0.8, 1.0), "both can work at once"),
        change={"buffer.max_lag": 1},
        advice="Attempts are then up to one step older; the docs of the buffer say what that does to training.",
    )


def staleness_waits(facts: Facts) -> Answer:
    """Rollouts may not go on, since what they sample would be too old, and then the trainer waits for them."""
    if facts.is_lockstep:
        return None
    if (facts.mean("buffer/groups_to_score") or 0) >= 1:
        return None  # then rewards are what both wait for
    lag = facts.setting("buffer.max_lag", 0)
    budget, awaited = facts.phase("wait_for_budget", "rollouts"), facts.phase("wait_for_environments", "rollouts")
    if has_few_workers(facts):  # more of them come first
        awaited = np.zeros(facts.num_steps)
    parts, assumption = Parts(0.2, 0.6, 1.0), "one more step of lag is enough to keep both at work"
    if (
        awaited.sum() > budget.sum()
    ):  # environments answer as soon as they do: of n + 1 batches under way each takes n / (n + 1)
        parts = Parts(0.5 / (lag + 2), 1 / (lag + 2), 1 / (lag + 1))
        assumption = "environments take no longer with the attempts of one more batch under way"
    lost = np.minimum(np.maximum(budget, awaited), facts.trainer_waits)
    return Finding(
        cause="staleness_waits",
        title="Trainer and rollouts wait for each other.",
        why=f"Rollouts begin nothing that would be over {lag} steps ahead (buffer.max_lag), and the trainer waits for what is"
        " under way.",
        evidence=(
            Evidence("timeline_rollouts/wait_for_budget_s", float(budget.mean()), "seconds a step that rollouts wait"),
            Evidence(
                "timeline_rollouts/wait_for_environments_s", float(awaited.mean()), "seconds a step for environments alone"
            ),
            Evidence("timeline/wait_for_rollouts_s", float(facts.trainer_waits.mean()), "seconds a step that the trainer does"),
            facts.evidence("buffer/lag_mean", "steps of lag of what was trained on"),
        ),
        gain=facts.saved("both", lost, "step", parts, assumption),
        change={"buffer.max_lag": lag + 1},
    )


def sync_stall(facts: Facts) -> Answer:
    """The engine stands still, or the trainer waits, while new weights move."""
    lost = facts.phases(("weight_sync", "wait_for_engine"))
    transport = facts.setting("placement.transport", "auto")
    change: dict[str, object] = {}
    if transport in ("checkpoint_engine", "http", "broadcast"):
        change["placement.transport"] = "auto"
    return Finding(
        cause="sync_stall",
        title="New weights take long to reach the engine.",
        why="The trainer goes on when the engines have them, and the engines stand still for a part of that.",
        evidence=(
            Evidence("timeline/weight_sync_s + wait_for_engine_s", float(lost.mean()), "seconds a step"),
            facts.evidence("weight_sync/bytes_moved", "bytes moved, a step"),
            facts.evidence("weight_sync/pause_s", "seconds that the engine stood still"),
            Evidence("placement.transport", str(transport), "how they move"),
        ),
        gain=facts.saved("trainer", lost, "weights", Parts(0.3, 0.8, 1.0), "a faster way exists between these places"),
        change=change,
        advice="Engines in the trainer's process (placement.engines=0) read its weights and need no copy; an adapter"
        " (trainer.lora.rank) moves alone.",
    )


def serialisation(facts: Facts) -> Answer:
    """Objects are turned into bytes: batches to disk or to ranks, weights to a server."""
    if facts.ledger is None:
        return Abstention("serialisation", "there is no ledger yet; it is written when the run ends")
    weights = facts.column("weight_sync/serialise_s")
    # Spans are known for the run as a whole, its first steps among them, which load what they use: no more than data took.
    batches = np.minimum(facts.spans("buffer.pack", "buffer.store"), facts.phase("data"))
    if is_bookkeeping(weights + batches):
        return None
    return Finding(
        cause="serialisation",
        title="Turning batches or weights into bytes holds up the loop.",
        why="The main thread writes them while engine and trainer wait.",
        evidence=(
            facts.evidence("weight_sync/serialise_s", "seconds a step for weights"),
            Evidence("buffer.pack + buffer.store", float(batches.mean()), "seconds a step for batches, in the main thread"),
        ),
        gain=facts.saved("trainer", weights + batches, "tasks", Parts(0.2, 0.5, 1.0), "fewer bytes, or another thread"),
        change={},
        advice="Store less (buffer.max_bytes), put the run folder on a faster disk, or move weights through memory"
        " (placement.transport=auto).",
    )


def io_bound(facts: Facts) -> Answer:
    """Checkpoints and logs hold up the loop between two steps."""
    lost = np.maximum(0.0, facts.column(BETWEEN) - facts.column(EVALUATION))
    every = facts.setting("run.checkpoint_every", 0)
    steps = facts.column("step")
    after = (steps - 1) % every == 0 if every else np.zeros(facts.num_steps, bool)
    usual = float(lost[~after].mean()) if (~after).any() else 0.0
    each = max(0.0, float(lost[after].mean()) - usual) if after.any() else 0.0
    rarely = max(every, math.ceil(each / max(1e-9, WORTH_WRITING * facts.step_s)))
    writes = np.where(after, np.minimum(lost, each), 0.0)
    is_checkpoints = writes.sum() >= 0.5 * lost.sum() and rarely > every
    kept = every / rarely if is_checkpoints else 0.3
    if is_bookkeeping(lost):
        return None
    return Finding(
        cause="io_bound",
        title="Writing checkpoints and logs holds up the loop.",
        why="A checkpoint waits for the one before it to be on the disk, and rows are flushed: nothing else happens meanwhile.",
        evidence=(
            Evidence("between steps", float(lost.mean()), "seconds a step that are part of no step, nor of an evaluation"),
            Evidence("after a checkpoint", each, "seconds more than otherwise"),
            Evidence("run.checkpoint_every", every, "steps from one to the next"),
        ),
        gain=facts.saved(
            "both",
            writes if is_checkpoints else lost,
            "between",
            Parts(0.6 * (1 - kept), 1 - kept, 1 - kept),
            f"a kill may cost {rarely} steps" if is_checkpoints else "the disk can be faster",
        ),
        change={"run.checkpoint_every": rarely} if is_checkpoints else {},
        advice="" if is_checkpoints else "Put the run folder on a faster disk.",
    )
