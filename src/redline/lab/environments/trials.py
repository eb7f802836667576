"""Attempts in an environment that is looked at: alone, again in a new one, and many at once; with the random policy, and with
one that knows the task's answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redline.environments.driver import Asked, Driver, Episode, Speaker
from redline.environments.speakers import AnsweringSpeaker, RandomSpeaker, ScriptedSpeaker
from redline.errors import RedlineError, TaskError, boundary
from redline.ports import Environment
from redline.rollouts.user_code.failures import failure_of
from redline.types import Task

Value = TypeVar("Value")
POLICIES = ("random", "scripted")
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Whose name a message may be in."""


@dataclass(slots=True, frozen=True)
class Plan:
    """How much is played."""

    tasks: int = 3
    """Training tasks, each played with every policy."""
    limit_s: float = 30.0
    """Seconds that any one call may take: making it, giving a task, playing an attempt."""
    seed: int = 0
    says: Sequence[str] = ()
    """What the scripted policy says, in turn; without it, the task's answer."""
    other_process: bool = False
    """Whether tasks are asked for in another process as well."""


@dataclass(slots=True)
class Trial:
    """The attempts at one task with one policy."""

    policy: str
    task: Task
    alone: Episode
    again: Episode
    """In a second environment, made with the same seed."""
    together: Episode | None = None
    """In the first environment, beside all others."""

    @property
    def name(self) -> str:
        return f"task {self.task.id}, {self.policy} policy"


@dataclass(slots=True)
class Trials:
    trials: list[Trial] = field(default_factory=list)
    longest_hold_s: float = 0.0

    @property
    def episodes(self) -> list[Episode]:
        every = [episode for trial in self.trials for episode in (trial.alone, trial.again, trial.together)]
        return [episode for episode in every if episode is not None]


def play_trials(
    environments: tuple[Environment, Environment], tasks: Sequence[Task], plan: Plan, tell: Callable[[str], None]
) -> Trials:
    """Play every task with every policy. Blocks for `limit_s` per attempt at most, and ends early where one does not end:
    others would not either."""

    def still(episode: Episode, seconds: float) -> None:
        so_far = f"{seconds:.0f} s and {len(episode.exchanges):,} turns"
        tell(f"{episode.task.id} has not ended after {so_far}; the limit is {plan.limit_s:g} s (--limit)")

    first, second = (Driver(environment, still=still) for environment in environments)
    found = Trials()
    try:
        for task in tasks:
            for policy in POLICIES:
                tell(f"{task.id}, {policy} policy")
                trial = Trial(
                    policy, task, *(driver.play(task, speaker(policy, task, plan), plan.limit_s) for driver in (first, second))
                )
                found.trials.append(trial)
                if _is_stuck(trial.alone) or _is_stuck(trial.again):
                    return found
        tell(f"{len(found.trials)} attempts at once")
        attempts = [(trial.task, speaker(trial.policy, trial.task, plan)) for trial in found.trials]
        for trial, episode in zip(found.trials, first.play_all(attempts, plan.limit_s), strict=True):
            trial.together = episode
        return found
    finally:
        found.longest_hold_s = max(first.longest_hold_s, second.longest_hold_s)
        first.close()
        second.close()


def speaker(policy: str, task: Task, plan: Plan) -> Speaker:
    """A policy for one attempt, which says the same in every attempt at this task."""
    if policy == "random":
        speak: Speaker = RandomSpeaker(f"{plan.seed}/{task.id}")
    else:
        speak = ScriptedSpeaker(plan.says) if plan.says else AnsweringSpeaker(task)

    def look_and_speak(asked: Asked) -> Any:
        _check_names(asked.messages)
        return speak(asked)

    return look_and_speak


def _check_names(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise TaskError where a message is in a name that chat templates do not know."""
    for index, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise TaskError(
                f"`policy.say` was given, as message {index}, one whose role is {message['role']!r:.60}, not one of"
                f" {', '.join(ROLES)}",
                'give it a list such as [{"role": "user", "content": "a text"}]',
            )


def _is_stuck(episode: Episode) -> bool:
    return isinstance(episode.error, TaskError) and "did not end within" in episode.error.message


def limited(what: str, call: Callable[[], Value], limit_s: float) -> tuple[Value, float]:
    """What a call of the user's code returns, and its seconds. Raises what it raises, and TaskError after `limit_s`: the call
    is left behind in its thread, since nothing can stop it."""
    future: Future[Value] = Future()

    def run() -> None:
        with boundary() as caught:
            future.set_result(call())
        if caught.error is not None:
            future.set_exception(caught.error)

    began = time.perf_counter()
    threading.Thread(target=run, name=what, daemon=True).start()
    try:
        return future.result(limit_s), time.perf_counter() - began
    except TimeoutError:
        raise TaskError(f"{what} did not return within {limit_s:g} s", "give it more time with --limit") from None


def plain(episode: Episode) -> dict[str, list[Mapping[str, Any]]]:
    """What an attempt asked, by role, and how it ended: what must be the same when it is played again. Roles that speak at the
    same time may do so in any order."""
    asked: dict[str, list[Mapping[str, Any]]] = {}
    for exchange in episode.exchanges:
        one = exchange.asked
        texts = {"messages": [dict(message) for message in one.messages], "tools": list(one.tools), "stop": list(one.stop)}
        asked.setdefault(one.role, []).append(texts)
    return asked


def said(what: str, error: Exception) -> str:
    """`play raised ValueError: no number, at game.py:7, in play: …`; errors of ours have no kind."""
    failure = failure_of("environment", error)
    verb = ":" if isinstance(error, RedlineError) else " raised"
    return f"{what}{verb} {failure.reason}" + (f", at {failure.where}" if failure.where else "")
