"""`redline env check`: plays a few attempts in an environment without a model, and says what a run would stumble over."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from redline.environments.driver import Episode, about_tokens
from redline.errors import RedlineError, boundary
from redline.lab.environments.made import Made
from redline.lab.environments.snapshots import snapshot_problems
from redline.lab.environments.trials import Plan, Trial, Trials, limited, plain, play_trials
from redline.lab.evidence.statistics import percentiles
from redline.rollouts.rewards.parts import reward_parts
from redline.rollouts.tasks.checks import check_task
from redline.rollouts.user_code.calls import failure_of
from redline.types import Task

HOLD_S = 0.25
"""An attempt that keeps the event loop for longer holds up every other attempt of a run."""
SHOWN = 60
"""Characters of a text in a sentence."""


@dataclass(slots=True)
class Report:
    """What was found."""

    name: str
    problems: list[str] = field(default_factory=list)
    """What is wrong, a sentence each."""
    notes: list[str] = field(default_factory=list)
    """What is worth knowing, and may be as it is meant."""
    passed: list[str] = field(default_factory=list)
    """What was looked at and is right."""
    times_s: dict[str, Mapping[str, float]] = field(default_factory=dict)
    """Part of an attempt → percentiles of its seconds."""
    rewards: dict[str, dict[str, float]] = field(default_factory=dict)
    """Part of the reward, with its role in front where there is one → least, mean, most."""
    counts: dict[str, float] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return 1 if self.problems else 0

    def as_json(self) -> dict[str, Any]:
        return {
            "environment": self.name,
            "ok": not self.problems,
            "problems": self.problems,
            "notes": self.notes,
            "passed": self.passed,
            "times_s": self.times_s,
            "rewards": self.rewards,
            "counts": self.counts,
        }


def check(made: Made, plan: Plan, tell: Callable[[str], None]) -> Report:
    """Look at an environment. Blocks for `plan.limit_s` per call at most. Raises RedlineError where it cannot be made."""
    report = Report(made.name)
    tell("making it twice")
    first, made_s = limited("making the environment", made.make, plan.limit_s)
    second, _ = limited("making the environment", made.make, plan.limit_s)
    report.times_s["make"] = percentiles([made_s])
    tasks = _tasks(made, (first, second), plan, report)
    if not tasks:
        return report
    trials = play_trials((first, second), tasks, plan, tell)
    _judge(report, trials)
    if (problems := snapshot_problems(made, tasks[0], plan)) is not None:
        _add(report, "a game goes on from a snapshot as it would have gone on", problems)
    _measure(report, trials)
    report.notes += getattr(first, "notes", list)()
    for environment in (first, second):
        getattr(environment, "close", lambda: None)()
    return report


# ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _tasks(made: Made, objects: tuple[Any, Any], plan: Plan, report: Report) -> list[Task]:
    """Training tasks, as far as they can be used."""
    sources = [made.tasks(one) for one in objects]
    tasks: list[Task] = []
    seconds: list[float] = []
    problems: list[str] = []
    for index in range(plan.tasks):
        with boundary() as caught:
            task, took_s = limited(f"train({index})", partial(sources[0].train, index), plan.limit_s)
            tasks.append(check_task(task, f"train({index})", bare=True))
            seconds.append(took_s)
            other, _ = limited(f"train({index})", partial(sources[1].train, index), plan.limit_s)
            if other != task:
                problems.append(f"train({index}) gives another task in an environment that was made with the same seed")
        if caught.error is not None:
            problems.append(_said(f"train({index})", caught.error))
            break
    with boundary() as caught:
        held_out, _ = limited("held_out(8)", lambda: list(sources[0].held_out(8)), plan.limit_s)
        problems += _held_out_problems(held_out, tasks)
    if caught.error is not None:
        problems.append(_said("held_out(8)", caught.error))
    if seconds:
        report.times_s["task"] = percentiles(seconds)
    _add(report, "the same tasks under the same seed, others held out", problems)
    return tasks


def _held_out_problems(held_out: Sequence[Any], tasks: Sequence[Task]) -> Iterator[str]:
    for index, task in enumerate(held_out):
        check_task(task, f"held_out(8)[{index}]", bare=True)
    trained = {(task.id, str(task.messages), str(task.data)) for task in tasks}
    for task in held_out:
        if (task.id, str(task.messages), str(task.data)) in trained:
            yield f"held-out task {task.id} is a training task as well: an evaluation would ask what training has shown"


# ── attempts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _judge(report: Report, trials: Trials) -> None:
    _add(report, "no exceptions and no waiting for ever", _errors(trials))
    _add(report, "the same attempt under the same seed", [text for trial in trials.trials for text in _again(trial)])
    _add(report, "the same attempt beside others", [text for trial in trials.trials for text in _together(trial)])
    _add(
        report, "a reward of numbers for each role", sorted({text for one in trials.episodes for text in _score_problems(one)})
    )
    stable, begun, broken = _prompts(trials)
    _add(report, "prompts that go on from what was said", broken)
    report.counts |= {"turns_that_go_on": stable, "turns_that_begin_anew": begun}
    if trials.longest_hold_s > HOLD_S:
        report.notes.append(
            f"it kept the event loop for up to {trials.longest_hold_s:.2f} s at a time, in which no other attempt goes on:"
            " await what takes long, or make `play` a plain `def`, which is called in a thread"
        )


def _errors(trials: Trials) -> list[str]:
    """Each kind of error once, with how often it came."""
    found: dict[str, list[str]] = {}
    for trial in trials.trials:
        for episode in (trial.alone, trial.again, trial.together):
            if episode is not None and episode.error is not None:
                found.setdefault(_said("play", episode.error), []).append(trial.name)
    return [
        f"{text} ({names[0]}{f', and {len(names) - 1} more attempts' if names[1:] else ''})" for text, names in found.items()
    ]


def _again(trial: Trial) -> Iterator[str]:
    if trial.alone.error is None and trial.again.error is None:
        yield from _difference(trial.name, "played again with the same seed and replies", trial.alone, trial.again)


def _together(trial: Trial) -> Iterator[str]:
    if trial.together is not None and trial.alone.error is None and trial.together.error is None:
        yield from _difference(trial.name, "played beside other attempts", trial.alone, trial.together)


def _difference(name: str, how: str, one: Episode, other: Episode) -> Iterator[str]:
    """The first thing that two attempts do not have in common."""
    first, second = plain(one), plain(other)
    for role in sorted({*first, *second}):
        mine, theirs = first.get(role, []), second.get(role, [])
        who = f" {role}" if role else ""
        for turn, (a, b) in enumerate(zip(mine, theirs, strict=False), start=1):
            if a != b:
                yield f"{name}: {how}, it asks{who} something else in turn {turn}: {_last(b)} instead of {_last(a)}"
                return
        if len(mine) != len(theirs):
            yield f"{name}: {how}, it asks{who} {len(theirs)} times instead of {len(mine)}"
            return
    if one.score != other.score:
        yield f"{name}: {how}, it scores {other.score} instead of {one.score}"


def _last(asked: Mapping[str, Any]) -> str:
    text = str(asked["messages"][-1].get("content")) if asked["messages"] else ""
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")


def scores_by_role(episode: Episode) -> Mapping[str, Any]:
    """Role → what it scored; one without a name in a game without roles."""
    if episode.roles in ((), ("",)):
        return {"": episode.score}
    return episode.score if isinstance(episode.score, Mapping) else {}


def _score_problems(episode: Episode) -> Iterator[str]:
    if episode.error is not None:
        return
    scores = scores_by_role(episode)
    without = [role or "the role without a name" for role in episode.roles if role not in scores]
    if episode.exchanges and without:
        yield f"play returned no score for {', '.join(without)}: a game of several roles returns a mapping from role to score"
        return
    if not episode.exchanges:
        yield f"play ended before it asked the policy anything (task {episode.task.id})"
    for score in scores.values():
        with boundary() as caught:
            reward_parts(score)
        if caught.error is not None:
            yield (
                caught.error.message.replace("`score`", "play") if isinstance(caught.error, RedlineError) else str(caught.error)
            )


# ── prompts ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _prompts(trials: Trials) -> tuple[int, int, list[str]]:
    """Turns that go on from an earlier one of their role, turns that begin a conversation anew, and what nearly goes on: an
    earlier message that was changed, or a reply that is not as it was said."""
    stable = begun = 0
    broken: dict[str, None] = {}
    for trial in trials.trials:
        said: dict[str, list[tuple[Sequence[Any], Any]]] = {}
        for turn, exchange in enumerate(trial.alone.exchanges, start=1):
            earlier = said.setdefault(exchange.asked.role, [])
            now = exchange.asked.messages
            if any(_goes_on(now, messages, reply) for messages, reply in earlier):
                stable += 1
            elif earlier:
                begun += 1
                broken |= dict.fromkeys(_nearly(trial.name, turn, now, *earlier[-1]))
            earlier.append((now, exchange.turn.message))
    return stable, begun, list(broken)


def _goes_on(now: Sequence[Any], messages: Sequence[Any], reply: Any) -> bool:
    size = len(messages)
    return len(now) > size and list(now[:size]) == list(messages) and _says(now[size], reply)


def _says(message: Any, reply: Any) -> bool:
    """Whether a message is the reply, or says the same in the assistant's name."""
    return message == reply or (message.get("role") == "assistant" and message.get("content") == reply.get("content"))


def _nearly(name: str, turn: int, now: Sequence[Any], messages: Sequence[Any], reply: Any) -> Iterator[str]:
    size = len(messages)
    if len(now) > size and list(now[:size]) == list(messages) and now[size].get("role") == "assistant":
        yield (
            f"{name}, turn {turn}: the reply before it is in the messages, but not as it was said: its tokens are made"
            " anew, and the turn begins a new sequence; append `turn.message`"
        )
    elif any(message is reply for message in now):
        index = next(index for index, (a, b) in enumerate(zip(now, messages, strict=False)) if a != b)
        yield (
            f"{name}, turn {turn}: message {index} is not what it was in the turn before: the whole prompt is computed again,"
            " and the turn begins a new sequence; only add messages at the end"
        )


# ── figures ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _measure(report: Report, trials: Trials) -> None:
    alone = [episode for trial in trials.trials for episode in (trial.alone, trial.again) if episode.error is None]
    parts = {
        "to the first question": [one.exchanges[0].environment_s for one in alone if one.exchanges],
        "between turns": [exchange.environment_s for one in alone for exchange in one.exchanges[1:]],
        "from the last reply to the score": [one.end_s for one in alone if one.exchanges],
    }
    report.times_s |= {name: percentiles(seconds) for name, seconds in parts.items() if seconds}
    _measure_rewards(report, alone)
    turns = [len(one.exchanges) for one in alone]
    if turns:
        prompts = [
            sum(about_tokens(str(m.get("content", ""))) for m in x.asked.messages) for one in alone for x in one.exchanges
        ]
        report.counts |= {
            "attempts": len(trials.episodes),
            "roles": max(len(one.roles) for one in alone),
            "turns_least": min(turns),
            "turns_mean": statistics.fmean(turns),
            "turns_most": max(turns),
            "prompt_tokens_mean": statistics.fmean(prompts) if prompts else 0.0,
            "prompt_tokens_most": max(prompts, default=0),
        }


def _measure_rewards(report: Report, episodes: Sequence[Episode]) -> None:
    found: dict[str, list[float]] = {}
    for episode in episodes:
        for role, score in scores_by_role(episode).items():
            with boundary() as caught:
                for part, value in reward_parts(score).items():
                    found.setdefault(f"{role}: {part}" if role else part, []).append(value)
            if caught.error is not None:
                return
    report.rewards = {
        name: {"least": min(values), "mean": statistics.fmean(values), "most": max(values)} for name, values in found.items()
    }
    if episodes and found and all(min(values) == max(values) for values in found.values()):
        report.notes.append("every attempt scored the same: a policy that does no better than random learns nothing from that")


def _add(report: Report, what: str, problems: Sequence[str] | Iterator[str]) -> None:
    found = list(problems)
    report.problems += found
    if not found:
        report.passed.append(what)


def _said(what: str, error: Exception) -> str:
    """`play raised ValueError: no number, at game.py:7, in play: …`; errors of ours have no kind."""
    failure = failure_of("environment", error)
    verb = ":" if isinstance(error, RedlineError) else " raised"
    return f"{what}{verb} {failure.reason}" + (f", at {failure.where}" if failure.where else "")
