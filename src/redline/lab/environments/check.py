"""`redline env check`: plays a few attempts in an environment without a model, and says what a run would stumble over."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypeVar

from redline.environments.driver import Episode, about_tokens
from redline.errors import RedlineError, boundary
from redline.lab.environments.made import Made
from redline.lab.environments.prompts import prompts
from redline.lab.environments.snapshots import snapshot_problems
from redline.lab.environments.tasks import OtherProcess, look_at_tasks
from redline.lab.environments.trials import Plan, Trial, Trials, limited, plain, play_trials, said
from redline.lab.evidence.statistics import percentiles
from redline.rollouts.episodes.scores import scores_of_roles
from redline.rollouts.rewards.parts import reward_parts
from redline.rollouts.tasks.alike import alike
from redline.types import Task

Ended = TypeVar("Ended", Trial, Episode)

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
    not_checked: list[str] = field(default_factory=list)
    """What could not be looked at, because no attempt ended."""
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
            "not_checked": self.not_checked,
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
    looked = look_at_tasks(made, (first, second), plan)
    _add(report, "the same tasks under the same seed, others held out", looked.problems)
    report.notes += looked.notes
    if not looked.tasks:
        return report
    report.times_s["task"] = percentiles(looked.seconds)
    other = OtherProcess(made, len(looked.tasks)) if plan.other_process and not looked.problems else None
    before = [_kept(task) for task in looked.tasks]
    trials = play_trials((first, second), looked.tasks, plan, tell)
    report.problems += [text for pair in zip(looked.tasks, before, strict=True) for text in _changes(*pair)]
    _judge(report, trials)
    if other is not None and (problems := other.problems(looked.tasks, plan.limit_s)) is not None:
        _add(report, "the same tasks in another process", problems)
    if (problems := snapshot_problems(made, looked.tasks, plan)) is not None:
        _add(report, "a game goes on from a snapshot as it would have gone on", problems)
    _measure(report, trials)
    report.notes += getattr(first, "notes", list)()
    for environment in (first, second):
        getattr(environment, "close", lambda: None)()
    return report


def _kept(task: Task) -> Task | None:
    """A copy down to its objects; None where it cannot be told whether that one and the task are the same."""
    kept: list[Task] = []
    with boundary():
        copied = deepcopy(task)
        kept += [copied] if copied == task else []
    return kept[0] if kept else None


def _changes(task: Task, before: Task | None) -> Iterator[str]:
    for name in ("messages", "data") if before is not None else ():
        if getattr(task, name) != getattr(before, name):
            yield (
                f"task {task.id}: play changed the task's {name}: an object in them, which all attempts share."
                " Copy the object before you change it"
            )


# ── attempts ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _judge(report: Report, trials: Trials) -> None:
    _add(report, "no exceptions and no waiting for ever", _errors(trials))
    ended = [trial for trial in trials.trials if trial.alone.error is None]
    again = [trial for trial in ended if trial.again.error is None]
    together = [trial for trial in ended if trial.together is not None and trial.together.error is None]
    scored = [one for one in trials.episodes if one.error is None]
    _add_of(report, "the same attempt under the same seed", again, _again)
    _add_of(report, "the same attempt beside others", together, _together)
    _add_of(report, "a reward of numbers for each role", scored, _score_problems)
    report.notes += sorted({text for one in trials.episodes for text in _score_notes(one, trials)})
    stable, begun, broken = prompts(trials)
    report.counts |= {"turns_that_go_on": stable, "turns_that_begin_anew": begun}
    if begun and not stable and not broken:
        report.notes.append(
            "no turn goes on from an earlier one: each is a sequence of its own, whose whole prompt is computed; where an"
            " attempt is one conversation, add `turn.message` and what follows to the same messages"
        )
    else:
        _add(report, "prompts that go on from what was said", broken)
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
                found.setdefault(said("play", episode.error), []).append(trial.name)
    return [
        f"{text} ({names[0]}{f', and {len(names) - 1} more attempts' if names[1:] else ''})" for text, names in found.items()
    ]


def _again(trial: Trial) -> Iterator[str]:
    yield from _difference(trial.name, "played again with the same seed and replies", trial.alone, trial.again)


def _together(trial: Trial) -> Iterator[str]:
    assert trial.together is not None, "one that was not played is not compared"
    yield from _difference(trial.name, "played beside other attempts", trial.alone, trial.together)


def _difference(name: str, how: str, one: Episode, other: Episode) -> Iterator[str]:
    """The first thing that two attempts do not have in common."""
    first, second = plain(one), plain(other)
    for role in sorted({*first, *second}):
        mine, theirs = first.get(role, []), second.get(role, [])
        who = f" {role}" if role else ""
        for turn, (a, b) in enumerate(zip(mine, theirs, strict=False), start=1):
            if not alike(a, b):
                yield f"{name}: {how}, it asks{who} something else in turn {turn}: {_where_they_differ(a, b)}"
                return
        if len(mine) != len(theirs):
            yield f"{name}: {how}, it asks{who} {len(theirs)} times instead of {len(mine)}"
            return
    if not alike(one.score, other.score):
        yield f"{name}: {how}, it scores {other.score} instead of {one.score}"


def _where_they_differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """The first message, or else the first option, that is another one in the second ask."""
    mine, theirs = one["messages"], other["messages"]
    for index, (a, b) in enumerate(zip(mine, theirs, strict=False)):
        if a != b:
            if a.get("content") != b.get("content"):
                a, b = a.get("content"), b.get("content")
            where = "" if index == len(mine) - 1 == len(theirs) - 1 else f" (message {index})"
            return f"{_short(b)} instead of {_short(a)}{where}"
    if len(mine) != len(theirs):
        return f"{len(theirs)} messages instead of {len(mine)}"
    key = next(key for key in one if one[key] != other.get(key))
    return f"{key} {_short(other.get(key))} instead of {_short(one[key])}"


def _short(value: Any) -> str:
    text = str(value)
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")


def scores_by_role(episode: Episode) -> Mapping[str, Any]:
    """Role → what it scored; one without a name in a game without roles, and where the score is that of all roles."""
    score = episode.score
    by_role = isinstance(score, Mapping) and any(role and role in score for role in episode.roles)
    return score if by_role else {"": score}


def _score_problems(episode: Episode) -> Iterator[str]:
    scores = scores_by_role(episode)
    by_role = scores is episode.score
    without = [role or "the role without a name" for role in episode.roles if by_role and role not in scores]
    if episode.exchanges and without:
        yield f"play returned no score for {', '.join(without)}: a game of several roles returns a mapping from role to score"
        return
    if not episode.exchanges:
        yield f"play ended before it asked the policy anything (task {episode.task.id})"
    for score in scores.values():
        with boundary() as caught:
            reward_parts(score) if by_role else scores_of_roles(score, episode.roles or ("",), {})
        if caught.error is not None:
            yield (
                caught.error.message.replace("`score`", "play").replace("`play`", "play")
                if isinstance(caught.error, RedlineError)
                else str(caught.error)
            )


def _score_notes(episode: Episode, trials: Trials) -> Iterator[str]:
    """What is odd about a score, and may be meant so."""
    score = episode.score
    if episode.error is not None or not episode.exchanges:
        return
    if any(episode.roles) and not (isinstance(score, Mapping) and any(role in score for role in episode.roles)):
        yield f"roles spoke ({', '.join(episode.roles)}), and the score is not by role: all roles get the same score"
    elif any(episode.roles):
        spoken = {role for one in trials.episodes for role in one.roles}
        if unknown := [str(name)[:SHOWN] for name in score if name not in spoken]:
            yield f"play returned a score for {', '.join(unknown[:10])}, and no such role spoke in any attempt: it is left out"


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
        sizes = [sum(about_tokens(str(m.get("content", ""))) for m in x.asked.messages) for one in alone for x in one.exchanges]
        report.counts |= {
            "attempts": len(trials.episodes),
            "roles": max(len(one.roles) for one in alone),
            "turns_least": min(turns),
            "turns_mean": statistics.fmean(turns),
            "turns_most": max(turns),
            "prompt_tokens_mean": statistics.fmean(sizes) if sizes else 0.0,
            "prompt_tokens_most": max(sizes, default=0),
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
    if all(episode.roles in ((), ("",)) for episode in episodes):
        _note_missing_parts(report, found, len(episodes))
    if episodes and found and all(min(values) == max(values) for values in found.values()):
        report.notes.append("every attempt scored the same: a policy that does no better than random learns nothing from that")


def _note_missing_parts(report: Report, found: Mapping[str, Sequence[float]], num_scores: int) -> None:
    """Say which parts of the reward are in some scores alone, in a game without roles."""
    for part, values in found.items():
        if len(values) < num_scores:
            report.notes.append(
                f"the reward part {part} is in {len(values)} of {num_scores} scores: with a weight in `reward_weights`,"
                " an attempt without it fails; give it each time, as 0 where it was not earned"
            )


def _add_of(report: Report, what: str, ended: Sequence[Ended], problems: Callable[[Ended], Iterator[str]]) -> None:
    """Look for problems in what has ended, each of them once."""
    if ended:
        _add(report, what, list(dict.fromkeys(text for one in ended for text in problems(one))))
    else:
        report.not_checked.append(what)


def _add(report: Report, what: str, problems: Sequence[str] | Iterator[str]) -> None:
    found = list(problems)
    report.problems += found
    if not found:
        report.passed.append(what)
