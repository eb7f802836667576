"""Causes in rollouts: rewards, environments, prompts and tasks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from redline.lab.doctor.facts import EVALUATION, Facts, Parts
from redline.lab.doctor.finding import Abstention, Answer, Evidence, Finding
from redline.lab.doctor.rules.sizes import is_bookkeeping, rows_of_an_engine, usable_cores

REWARD_WORKERS = 8
"""Calls of `score` at once where the recipe leaves that open and the task allows several."""
WORTH_EVALUATING = 0.05
"""Share of the time that evaluations may take."""


def slow_reward(facts: Facts) -> Answer:
    """The engine and the trainer stand still while rewards are computed."""
    own = facts.phases(("reward", "wait_for_rewards", "wait_for_reward_model"), "rollouts")
    waiting = np.zeros(facts.num_steps)
    if (facts.mean("buffer/groups_to_score") or 0) >= 1:  # then the trainer waits for them, and the engine for new requests
        waiting = np.minimum(facts.trainer_waits, facts.rollouts_wait + facts.phase("wait_for_requests", "rollouts"))
    lost = own + waiting
    if is_bookkeeping(lost):
        return None
    remedy = _more_rewards_at_once(facts)
    return Finding(
        cause="slow_reward",
        title="Rewards hold up the run.",
        why="Everything else waits while the reward of attempts is computed.",
        evidence=(
            Evidence("timeline/reward_s + wait_for_rewards_s", float(lost.mean()), "seconds a step in or for rewards"),
            facts.evidence("buffer/groups_to_score", "groups sampled and without a reward"),
            Evidence("rollouts.max_reward_workers", remedy.now, "calls of `score` at once, at most"),
        ),
        gain=facts.saved("both" if waiting.any() else "rollouts", lost, "rewards", remedy.parts, remedy.assumption),
        change=remedy.change,
        advice=remedy.advice,
    )


@dataclass(slots=True, frozen=True)
class _Remedy:
    """What would make rewards faster."""

    now: int
    """Calls at once as it is."""
    change: dict[str, object]
    parts: Parts
    assumption: str
    advice: str


def _more_rewards_at_once(facts: Facts) -> _Remedy:
    """A reward model takes all answers at once; a task of one's own can score in processes, where two calls never meet; any
    other may need one thread, and only its author knows."""
    given = facts.setting("rollouts.max_reward_workers")
    in_processes = facts.setting("rollouts.reward_run_in", "threads") == "processes"
    now = given if isinstance(given, int) else REWARD_WORKERS if in_processes else 1
    more = max(REWARD_WORKERS, 2 * now)
    profile = "Make the reward itself faster: `redline profile RUN` shows which line takes the time."
    if facts.setting("rollouts.reward_model.path"):
        size = facts.setting("rollouts.reward_model.max_tokens_per_batch", 16384)
        return _Remedy(
            now,
            {"rollouts.reward_model.max_tokens_per_batch": 2 * size},
            Parts(0.0, 0.2, 0.5),
            "most of the time is the reward model's, and larger batches suit it",
            "A reward model scores all answers together; a smaller one is faster. With a lag it works beside the trainer.",
        )
    spare = 1 - now / min(more, max(now, usable_cores(facts)))
    parts = Parts(0.5 * spare, 0.85 * (1 - now / more), 1 - now / more)
    if facts.setting("rollouts.environment.name"):
        return _Remedy(now, {}, Parts(0.1, 0.5, 0.9), "the environment's score can be faster", profile)
    if facts.setting("rollouts.task.kind") == "import":
        change: dict[str, object] = {"rollouts.reward_run_in": "processes", "rollouts.max_reward_workers": more}
        return _Remedy(now, change, parts, f"rewards wait for something, or {more} cores are free", profile)
    safe = "Several threads are right only where `score` is thread-safe, and help where it waits: they compute one at a time."
    return _Remedy(now, {"rollouts.max_reward_workers": more}, parts, "`score` waits, and is thread-safe", f"{safe} {profile}")


def serial_episodes(facts: Facts) -> Answer:
    """The engine waits for environments, of which too few work at once."""
    if not has_few_workers(facts):
        return None
    if facts.ledger is None and facts.setting("rollouts.environment.run_in", "auto") in ("auto", "threads"):
        return Abstention("serial_episodes", "whether calls of the environment take turns is known when the run has ended")
    waits = facts.phases(("environment", "wait_for_environments"), "rollouts")
    empty = max(0.0, 1 - (facts.mean("engine/batch_size_mean") or 0.0) / rows_of_an_engine(facts))
    lost = waits + empty * facts.phase("generation", "rollouts")
    workers = facts.setting("rollouts.environment.workers", 8)
    attempts = facts.mean("rollouts/attempts") or 0.0
    run_in = facts.setting("rollouts.environment.run_in", "auto")
    now = 1 if run_in == "loop" else workers
    more = int(min(256, max(2 * workers, attempts)))
    change: dict[str, object] = {"rollouts.environment.workers": more}
    if run_in == "loop":
        change["rollouts.environment.run_in"] = "threads"
    return Finding(
        cause="serial_episodes",
        title="The engine waits for environments.",
        why=f"At most {now} calls of environments run at once, and {attempts:.0f} attempts are under way in a step.",
        evidence=(
            Evidence(
                "timeline/environment_s + wait_for_environments_s", float(waits.mean()), "seconds a step for environments"
            ),
            facts.evidence("rollouts/environment_p50_s", "seconds of the environment's own code before a turn"),
            facts.evidence("engine/batch_size_mean", "sequences decoded at once"),
            Evidence("rollouts.environment.workers", workers, "calls of environments at once"),
        ),
        gain=facts.saved(
            "rollouts",
            lost,
            "environments",
            Parts(0.2, 0.85 * (1 - now / more), 1 - now / more),
            "the environment's time is waiting, or has cores to spare, and replies come at once instead of one by one",
        ),
        change=change,
    )


def has_few_workers(facts: Facts) -> bool:
    """Whether fewer calls of an environment are made at once than there are attempts. An `async` one needs no workers, and
    awaits in the event loop, all attempts at once; where that cannot be told, it is taken to need them."""
    if not facts.setting("rollouts.environment.name"):
        return False
    run_in = facts.setting("rollouts.environment.run_in", "auto")
    if run_in == "loop":
        return True
    if facts.setting("rollouts.environment.workers", 8) >= (facts.mean("rollouts/attempts") or 0.0):
        return False
    if facts.ledger is None or run_in == "processes":
        return True
    return any(lane.startswith("environment-") for lane in facts.ledger.lanes)


def retokenising(facts: Facts) -> Answer:
    """Conversations are encoded again in every turn, and trained on as a sequence for each."""
    turns = facts.mean("rollouts/turns_mean") or 1.0
    if facts.setting("rollouts.environment.keep_replies", True) or turns <= 1:
        return None
    once = 2 / (turns + 1)  # n turns of one length have n (n + 1) / 2 lengths where each begins again, and n where none does
    again = facts.column("timeline_environments/data_s") + facts.column("engine/prefill_s") + facts.phase("training")
    return Finding(
        cause="retokenising",
        title="Replies are encoded again in every turn.",
        why="With rollouts.environment.keep_replies=false a turn's tokens are not those that were sampled: they are encoded"
        " again, the prefix cache misses them, and each turn is trained on as a sequence of its own.",
        evidence=(
            Evidence("rollouts.environment.keep_replies", False, "replies are turned into text and back"),
            facts.evidence("rollouts/turns_mean", "turns of an attempt"),
            facts.evidence("rollouts/sequences_mean", "sequences that an attempt is trained as"),
            facts.evidence("engine/prompt_tokens", "tokens of prompts that were computed, a step"),
            facts.evidence("trainer/tokens", "tokens through the trainer, a step"),
        ),
        gain=facts.saved("both", again * (1 - once), "step", Parts(0.2, 0.8, 1.0), "most of a turn's prompt is older turns"),
        change={"rollouts.environment.keep_replies": True},
        advice="Where the chat template leaves earlier thinking out, the policy then sees what a served model would not.",
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
    if is_bookkeeping(lost):
        return None
    return Finding(
        cause="loading_stall",
        title="Tasks or their prompts take long to make.",
        why="The engine has nothing to do while a task is drawn, or its prompt is made.",
        evidence=(
            facts.evidence("timeline/data_s", "seconds a step for tasks, prompts and the buffer"),
            facts.evidence("rollouts/prompt_p50_s", "seconds from messages to tokens"),
        ),
        gain=facts.saved("rollouts", lost, "tasks", Parts(0.3, 0.8, 1.0), "the work can be done ahead, or once"),
        change={},
        advice="Do in the task source's `__init__` what does not change from task to task; keep data in Arrow files.",
    )


def frequent_evaluation(facts: Facts) -> Answer:
    """The run stands still for evaluations."""
    lost, every = facts.column(EVALUATION), facts.setting("rollouts.evaluation.every", 0)
    if not every or not lost.any():
        return None
    each = float(lost[lost > 0].mean())
    rarely = max(every, math.ceil(each / max(1e-9, WORTH_EVALUATING * facts.step_s)))
    if rarely == every:
        return None
    return Finding(
        cause="frequent_evaluation",
        title=f"Evaluations take {lost.sum() / facts.wall_s:.0%} of the time.",
        why="Nothing is trained on while held-out tasks are attempted.",
        evidence=(
            Evidence("evaluation/seconds", each, "seconds of an evaluation"),
            Evidence("rollouts.evaluation.every", every, "steps from one to the next"),
            facts.evidence("run/step_s", "seconds of a step"),
        ),
        gain=facts.saved(
            "both",
            lost,
            "between",
            Parts(0.8 * (1 - every / rarely), 1 - every / rarely, 1 - every / rarely),
            f"a point of the curve every {rarely} steps is enough",
        ),
        change={"rollouts.evaluation.every": rarely},
        advice="Fewer held-out tasks (rollouts.evaluation.num_tasks) save as much, with wider intervals.",
    )


def failures(facts: Facts) -> Answer:
    """Attempts fail after they were sampled: their time is lost."""
    attempts, failed = facts.total("rollouts/attempts"), facts.total("rollouts/failures") + facts.total("rollouts/retries")
    if not attempts:
        return Abstention("failed_attempts", "no attempt arrived in a steady step")
    share = min(1.0, failed / attempts)
    trained = float(np.clip(facts.phase("training").sum() / max(1e-9, facts.wall_s), 0.0, 1.0))
    return Finding(
        cause="failed_attempts",
        title=f"{share:.0%} of the attempts fail or are begun again.",
        why="What a failed attempt sampled is not trained on.",
        evidence=(
            facts.evidence("rollouts/failures", "attempts a step"),
            facts.evidence("rollouts/retries", "attempts a step"),
        ),
        gain=facts.saved(
            "rollouts",
            facts.column("run/step_s") * share,
            "step",
            Parts(1 - trained, 1 - trained / 2, 1.0),
            "failures can be mended: each step then has as many more attempts, which take training and nothing else",
        ),
        change={},
        advice="`redline show RUN --failures` names the reason and the line of code.",
    )
