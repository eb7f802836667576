"""Causes between the stages: taking turns, waiting for fresh data, weight sync, the buffer, checkpoints."""

from __future__ import annotations

import numpy as np

from redline.lab.doctor.facts import Facts
from redline.lab.doctor.finding import Abstention, Answer, Evidence, Finding


def long_tail(facts: Facts) -> Answer:
    """A few long attempts keep the engine at work with most of its rows empty, while the trainer stands still."""
    late = facts.phase("wait_for_late_groups")
    slow, usual = facts.mean("rollouts/attempt_latency_p99_s"), facts.mean("rollouts/attempt_latency_p50_s")
    rows = _rows(facts)
    batch = facts.mean("engine/batch_size_mean")
    if slow is None or not usual or batch is None or (slow < 2 * usual and not late.any()):
        return None
    idle = max(0.0, 1 - batch / rows)
    lost = facts.phase("generation") * idle if facts.is_lockstep else late
    lag = facts.setting("buffer.max_lag", 0)
    return Finding(
        cause="long_tail",
        title=f"A few long attempts take {slow / usual:.1f} times as long as the usual one.",
        why="While the last of them are decoded, most rows of the engine are empty, and the trainer has nothing to do.",
        evidence=(
            facts.evidence("rollouts/attempt_latency_p50_s", "seconds of the usual attempt"),
            facts.evidence("rollouts/attempt_latency_p99_s", "seconds of the longest"),
            facts.evidence("engine/batch_size_mean", f"sequences decoded at once, of {rows:.0f} that began"),
        ),
        gain=facts.saved(
            "rollouts", lost, 0.1, 0.5, 0.9, "the trainer, and attempts of the next batch, fill the empty rows' time"
        ),
        change={"buffer.max_lag": lag + 1},
        advice="Attempts are then up to that many steps older; the docs of the buffer say what that does to training.",
    )


def no_overlap(facts: Facts) -> Answer:
    """Engine and trainer have devices or cores of their own, and still take turns."""
    if not facts.is_lockstep or not facts.setting("placement.engines", 0) or facts.setting("run.device", "cpu") != "cuda":
        return None
    generation = facts.phases(("generation", "wait_for_engine"))
    lost = np.minimum(generation, facts.phase("training"))
    return Finding(
        cause="no_overlap",
        title="Engines and trainer have GPUs of their own, and take turns.",
        why="With buffer.max_lag=0 one stands still while the other works.",
        evidence=(
            facts.evidence("timeline/generation_s", "seconds a step"),
            facts.evidence("timeline/training_s", "seconds a step"),
        ),
        gain=facts.saved("rollouts", lost, 0.4, 0.8, 1.0, "both can work at once"),
        change={"buffer.max_lag": 1},
    )


def staleness_waits(facts: Facts) -> Answer:
    """Rollouts may not go on, since what they sample would be too old, and then the trainer waits for them."""
    if facts.is_lockstep:
        return None
    budget = facts.phase("wait_for_budget", "rollouts")
    lost = np.minimum(budget, facts.trainer_waits)
    lag = facts.setting("buffer.max_lag", 0)
    if (facts.mean("buffer/groups_to_score") or 0) >= 1:
        return None  # then rewards are what both wait for
    return Finding(
        cause="staleness_waits",
        title="Trainer and rollouts wait for each other.",
        why=f"Rollouts stop when they are {lag} steps ahead (buffer.max_lag), and the trainer waits when they begin again.",
        evidence=(
            Evidence("timeline_rollouts/wait_for_budget_s", float(budget.mean()), "seconds a step that rollouts wait"),
            Evidence("timeline/wait_for_rollouts_s", float(facts.trainer_waits.mean()), "seconds a step that the trainer does"),
            facts.evidence("buffer/lag_mean", "steps of lag of what was trained on"),
        ),
        gain=facts.saved("rollouts", lost, 0.2, 0.6, 1.0, "one more step of lag is enough to keep both at work"),
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
        gain=facts.saved("trainer", lost, 0.2, 0.6, 0.95, "a faster way exists between these places"),
        change=change,
        advice="Engines in the trainer's process (placement.engines=0) read its weights and need no copy; an adapter"
        " (trainer.lora.rank) moves alone.",
    )


def serialisation(facts: Facts) -> Answer:
    """Objects are turned into bytes: batches to disk or to ranks, weights to a server."""
    if facts.ledger is None:
        return Abstention("serialisation", "there is no ledger yet; it is written when the run ends")
    weights = np.nan_to_num(facts.steps.get("weight_sync/serialise_s", np.zeros(facts.num_steps)))
    batches = facts.spans("buffer.pack", "buffer.store")
    lost = weights + batches
    return Finding(
        cause="serialisation",
        title="Turning batches or weights into bytes holds up the loop.",
        why="The main thread writes them while engine and trainer wait.",
        evidence=(
            facts.evidence("weight_sync/serialise_s", "seconds a step for weights"),
            Evidence("buffer.pack + buffer.store", float(batches.mean()), "seconds a step for batches, in the main thread"),
        ),
        gain=facts.saved("trainer", lost, 0.2, 0.5, 0.9, "fewer bytes, or another thread"),
        change={},
        advice="Store less (buffer.max_bytes), put the run folder on a faster disk, or move weights through memory"
        " (placement.transport=auto).",
    )


def _rows(facts: Facts) -> float:
    """Sequences that the engine could decode at once in a step."""
    attempts = facts.setting("rollouts.groups_per_step", 1) * facts.setting("rollouts.group_size", 1)
    return float(max(1, min(facts.setting("engine.max_num_seqs", 256), attempts)))
