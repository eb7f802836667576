"""Causes in rollouts: rewards, environments, prompts and tasks."""

from __future__ import annotations

import os

import numpy as np

from redline.lab.doctor.facts import Facts
from redline.lab.doctor.finding import Abstention, Answer, Evidence, Finding


def slow_reward(facts: Facts) -> Answer:
    """The engine and the trainer stand still while rewards are computed."""
    own = facts.phases(("reward", "wait_for_rewards", "wait_for_reward_model"), "rollouts")
    waiting = np.minimum(facts.trainer_waits, facts.rollouts_wait) if (facts.mean("buffer/groups_to_score") or 0) >= 1 else 0
    lost = own + waiting
    workers = facts.setting("rollouts.max_reward_workers")
    more = max(4, 2 * workers) if isinstance(workers, int) else 2 * max(4, os.cpu_count() or 1)
    return Finding(
        cause="slow_reward",
        title="Rewards hold up the run.",
        why="Everything else waits while the reward of attempts is computed.",
        evidence=(
            Evidence("timeline/reward_s + wait_for_rewards_s", float(lost.mean()), "seconds a step in or for rewards"),
            facts.evidence("rollouts/score_p50_s", "seconds from an attempt's last reply to its reward"),
        ),
        gain=facts.saved("rollouts", lost, 0.2, 0.6, 0.95, "rewards of several attempts can be computed at once"),
        change={"rollouts.max_reward_workers": more},
        advice="Make the reward itself faster, or compute several at once; `redline profile` shows which line takes the time.",
    )


def serial_episodes(facts: Facts) -> Answer:
    """The engine waits for environments, of which too few work at once."""
    if not facts.setting("rollouts.environment.name"):
        return None
    lost = facts.phases(("environment", "wait_for_environments"), "rollouts")
    workers = facts.setting("rollouts.environment.workers", 8)
    attempts = facts.mean("rollouts/attempts") or 0.0
    if workers >= attempts:
        return None  # each attempt has one: more would stand idle
    run_in = facts.setting("rollouts.environment.run_in", "auto")
    change: dict[str, object] = {"rollouts.environment.workers": int(min(256, max(2 * workers, attempts)))}
    if run_in == "loop":
        change["rollouts.environment.run_in"] = "threads"
    return Finding(
        cause="serial_episodes",
        title="The engine waits for environments.",
        why=f"At most {workers} calls of environments run at once, and {attempts:.0f} attempts are under way in a step.",
        evidence=(
            Evidence("timeline/environment_s + wait_for_environments_s", float(lost.mean()), "seconds a step for environments"),
            facts.evidence("rollouts/environment_p50_s", "seconds of the environment's own code before a turn"),
            facts.evidence("engine/batch_size_mean", "sequences decoded at once"),
            Evidence("rollouts.environment.workers", workers, "calls of environments at once"),
        ),
        gain=facts.saved("rollouts", lost, 0.2, 0.6, 0.95, "the environment's time is waiting or has cores to spare"),
        change=change,
    )


def retokenising(facts: Facts) -> Answer:
    """Conversations are encoded again in every turn, or prompts take long to make."""
    if facts.setting("rollouts.environment.keep_replies", True):
        return None
    lost = facts.phase("data", "rollouts")
    again = facts.steps.get("engine/prompt_tokens", np.zeros(facts.num_steps))
    turns = facts.mean("rollouts/turns_mean") or 1.0
    if turns <= 1:
        return None
    prefill = np.nan_to_num(facts.steps.get("engine/prefill_s", np.zeros(facts.num_steps)))
    return Finding(
        cause="retokenising",
        title="Replies are encoded again in every turn.",
        why="With rollouts.environment.keep_replies=false a turn's tokens are not those that were sampled, so that they are"
        " encoded again and the prefix cache misses them.",
        evidence=(
            Evidence("rollouts.environment.keep_replies", False, "replies are turned into text and back"),
            facts.evidence("rollouts/turns_mean", "turns of an attempt"),
            Evidence("engine/prompt_tokens", float(np.nanmean(again)), "tokens of prompts that were computed, a step"),
            facts.evidence("engine/prefill_s", "seconds a step"),
        ),
        gain=facts.saved("rollouts", lost + prefill * (1 - 1 / turns), 0.2, 0.7, 1.0, "most of a turn's prompt is older turns"),
        change={"rollouts.environment.keep_replies": True},
    )


def loading_stall(facts: Facts) -> Answer:
    """Everything waits for tasks or prompts: reading data, drawing tasks, encoding."""
    if facts.ledger is None:
        return Abstention("loading_stall", "there is no ledger yet; it is written when the run ends")
    lost = facts.phases(("wait_for_task", "wait_for_tasks", "wait_for_calls"), "rollouts")
    if not facts.is_lockstep and (facts.mean("buffer/groups_to_score") or 0) < 1:
        lost = lost + facts.phase("wait_for_requests", "rollouts")
    if not facts.setting("rollouts.environment.name"):
        buffered = facts.spans("buffer.pack", "buffer.store", "buffer.choose", "buffer.settle", "buffer.admit")
        lost = lost + np.maximum(0.0, facts.phase("data", "rollouts") - buffered)
    return Finding(
        cause="loading_stall",
        title="Tasks or their prompts take long to make.",
        why="The engine has nothing to do while a task is drawn, or its prompt is made.",
        evidence=(
            facts.evidence("timeline/data_s", "seconds a step for tasks, prompts and the buffer"),
            facts.evidence("rollouts/prompt_p50_s", "seconds from messages to tokens"),
        ),
        gain=facts.saved("rollouts", lost, 0.3, 0.7, 0.95, "the work can be done ahead, or once"),
        change={},
        advice="Do in the task source's `__init__` what does not change from task to task; keep data in Arrow files.",
    )


def failures(facts: Facts) -> Answer:
    """Attempts fail after they were sampled: their time is lost."""
    attempts, failed = facts.total("rollouts/attempts"), facts.total("rollouts/failures") + facts.total("rollouts/retries")
    if not attempts:
        return Abstention("failed_attempts", "no attempt arrived in a steady step")
    share = min(1.0, failed / attempts)
    return Finding(
        cause="failed_attempts",
        title=f"{share:.0%} of the attempts fail or are begun again.",
        why="What a failed attempt sampled is not trained on.",
        evidence=(
            facts.evidence("rollouts/failures", "attempts a step"),
            facts.evidence("rollouts/retries", "attempts a step"),
        ),
        gain=facts.saved("rollouts", facts.phase("generation", "rollouts") * share, 0.5, 0.9, 1.0, "failures can be mended"),
        change={},
        advice="`redline show RUN --failures` names the reason and the line of code.",
    )
