"""Evaluations: what the policy makes of the held-out tasks, now and then."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from redline.config.schema import RolloutsConfig
from redline.rollouts.rewards.accuracy import accuracy, task_scores
from redline.telemetry import MetricsLog, span
from redline.telemetry.console.progress import SampleAnswer
from redline.telemetry.summary.attempts import length_metrics, reward_metrics
from redline.telemetry.summary.failed_attempts import WORTH_SAYING, FailureTally, reaches_target
from redline.types import Task, Trajectory, by_attempt
from redline.watch.outputs import Outputs
from redline.watch.watched import Watched

NUM_SAMPLES_SHOWN = 3


class Evaluations:
    """Has the held-out tasks attempted and writes `evaluations.jsonl`."""

    def __init__(self, rollouts: RolloutsConfig, outputs: Outputs, stages: Watched) -> None:
        self._rollouts = rollouts
        self._outputs = outputs
        self._stages = stages
        self._log = MetricsLog(outputs.folder.evaluations)
        self.has_reached_target = False
        """Whether an evaluation after the first step has reached `rollouts.evaluation.stop_at`."""
        self.samples: dict[int, list[SampleAnswer]] = {}
        """Version → answers to show, of the first evaluation and of the newest."""
        self.rewards: dict[int, float] = {}
        """Version → mean reward."""
        self.accuracies: dict[int, float] = {}
        """Version → share of right answers, where the tasks say which are right."""

    def is_due(self, version: int) -> bool:
        every = self._rollouts.evaluation.every
        return bool(every) and version % every == 0

    def run(self, version: int) -> None:
        """Block until the current policy has attempted the held-out tasks, and write their row."""
        if not self._stages.held_out:
            return
        started = time.perf_counter()
        with span("run.evaluate", version=version):
            tasks = self._stages.held_out
            attempts = self._stages.evaluate(tasks)
            failed = failures_of(attempts)
            if failed.all_failed and version == 0:
                raise failed.stop("the first evaluation")
            seconds = time.perf_counter() - started
            row = evaluation_row(tasks, attempts, seconds, self._rollouts.answer_prefix)
            self._log.rewind(version - 1)  # a resumed run may evaluate a version once more
            written = self._log.append(version, row)
            self._keep(written)
            self._outputs.listeners.evaluation(written)
        found = self.accuracies.get(version)
        self._outputs.progress.evaluation(
            f"held-out, step {version}", self.rewards.get(version, math.nan), row["evaluation/num_answers"], seconds, found
        )
        if failed.share > WORTH_SAYING:
            self._outputs.progress.note(f"held-out, step {version}: {failed.sentence()}")

    def _keep(self, row: Mapping[str, Any]) -> None:
        """Remember what a row of `evaluations.jsonl` says, of this process or of an earlier one."""
        version = row["step"]
        self.has_reached_target |= reaches_target(row, self._rollouts.evaluation.stop_at)
        if row["evaluation/reward_mean"] is not None:  # else every attempt failed
            self.rewards[version] = row["evaluation/reward_mean"]
        if "evaluation/accuracy" in row:
            self.accuracies[version] = row["evaluation/accuracy"]
        self.samples[version] = [SampleAnswer(**sample) for sample in row["evaluation/samples"]]
        for between in sorted(self.samples)[1:-1]:
            del self.samples[between]

    def rewind(self, version: int, aside: Path | None) -> None:
        """Cut the rows after `version`, into the folder `aside` where there is one, and remember the rest."""
        self._log.rewind(version, aside)
        for row in MetricsLog.read(self._outputs.folder.evaluations):
            if {"step", "evaluation/reward_mean", "evaluation/samples"} <= row.keys():  # else damaged, or somebody else's
                self._keep(row)
        if self.rewards:
            first = min(self.rewards)
            self._outputs.progress.first_evaluation(self.rewards[first], self.accuracies.get(first))

    def flush(self) -> None:
        """Block until the disk has every row."""
        self._log.flush_to_disk()

    def close(self) -> None:
        self._log.close()


def failures_of(attempts: Sequence[Sequence[Trajectory]]) -> FailureTally:
    """Count the attempts at each task, and those that failed."""
    failed = FailureTally()
    failed.add(own[0] for trajectories in attempts for own in by_attempt(trajectories))
    return failed


def evaluation_row(
    tasks: Sequence[Task], attempts: Sequence[Sequence[Trajectory]], seconds: float, answer_prefix: str
) -> dict[str, Any]:
    """What an evaluation says of the attempts at each task. One that failed has no reward, and counts in no mean of rewards; it
    has not given the right answer."""
    by_role = [own for trajectories in attempts for own in by_attempt(trajectories, by_role=True)]
    right, failed = accuracy([own[0] for own in by_role]), failures_of(attempts)
    shown = zip(tasks[:NUM_SAMPLES_SHOWN], attempts, strict=False)
    return {
        **reward_metrics("evaluation", by_role),
        **({} if right is None else {"evaluation/accuracy": right}),
        "evaluation/num_tasks": len(attempts),
        "evaluation/num_answers": failed.num_attempts,
        "evaluation/failures": failed.num_failed,
        **length_metrics("evaluation", _sampled([own for trajectories in attempts for own in by_attempt(trajectories)])),
        "evaluation/seconds": seconds,
        "evaluation/task_scores": task_scores(scored_of(attempts)),
        "evaluation/samples": [asdict(_shown(task, first, answer_prefix)) for task, (first, *_) in shown],
    }


def scored_of(attempts: Sequence[Sequence[Trajectory]]) -> list[list[Trajectory]]:
    """By task, one sequence of each role of each attempt: what has a reward of its own."""
    return [[own[0] for own in by_attempt(trajectories, by_role=True)] for trajectories in attempts]


def _sampled(attempts: Sequence[Sequence[Trajectory]]) -> Sequence[Sequence[Trajectory]]:
    """Those for which the policy chose a token: one that failed before that has no length. All of them where none has one."""
    return [own for own in attempts if any(sequence.num_completion_tokens for sequence in own)] or attempts


def asked_of(task: Task) -> str:
    """What a task asks, in a line: an environment may ask by itself."""
    return str(task.messages[-1]["content"]) if task.messages else task.id


def _shown(task: Task, attempt: Trajectory, answer_prefix: str) -> SampleAnswer:
    return SampleAnswer(asked_of(task), answer_prefix + attempt.text, attempt.reward)
