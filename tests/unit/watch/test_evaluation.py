"""Evaluations of a run that another process goes on with."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console
from support.fakes import FakeTrainer, trajectory
from support.played_groups import BROKEN
from support.watched_stages import FakeStages

from redline.config.schema import Config
from redline.rollouts.prompts import failed_attempts
from redline.telemetry import Progress, Recorder, RunFolder, recording
from redline.types import FinishReason, Task
from redline.watch.evaluation import evaluation_row
from redline.watch.outputs import Outputs
from redline.watch.run_watch import RunWatch


def watch_over(folder: RunFolder, screen: Console, reward: float, version: int) -> RunWatch:
    rollouts = {"task": {"kind": "import", "path": "a:B"}, "evaluation": {"every": 1}}
    config = Config.model_validate({"model": {"path": "x"}, "rollouts": rollouts})
    trainer = FakeTrainer([])
    trainer.version = version
    tasks = [Task("t", [{"role": "user", "content": "a"}])]
    stages = FakeStages(trainer, tasks, [[trajectory([1], [2], reward=reward)]])
    return RunWatch(config, Outputs(folder, Recorder(), Progress(9, console=screen)), stages)


def test_a_resumed_run_tells_how_far_it_is_from_the_first_evaluation_of_the_run(tmp_path: Path) -> None:
    folder, screen = RunFolder.create(tmp_path, "run"), Console(file=io.StringIO(), width=200, highlight=False)
    with recording(Recorder()):
        watch_over(folder, screen, reward=0.25, version=0).evaluate(0)
        resumed = watch_over(folder, screen, reward=0.5, version=1)
        resumed.resume()
        resumed.evaluate(1)
        again = watch_over(folder, screen, reward=1.0, version=2)
        again.resume()
        again.evaluate(2)
    assert isinstance(screen.file, io.StringIO)
    lines = screen.file.getvalue().splitlines()
    changes = [line.split("reward")[1].split("answers")[0].split() for line in lines if "held-out" in line]
    assert changes == [["0.250", "1"], ["0.500", "+0.250", "1"], ["1.000", "+0.750", "1"]]


def test_attempts_that_failed_before_the_policy_chose_a_token_are_in_no_mean_of_lengths() -> None:
    cut_off = trajectory([1], [2, 3, 4, 5], finish_reason=FinishReason.LENGTH)
    unscored = trajectory([1], [2, 3], failure=BROKEN)
    tasks = [Task(name, [{"role": "user", "content": "a"}]) for name in "ab"]
    row = evaluation_row(tasks, [[cut_off, unscored], failed_attempts(BROKEN, 2, version=0)], 1.0, "")
    assert (row["evaluation/completion_tokens_mean"], row["evaluation/truncated_fraction"]) == (3.0, 0.5)
    assert (row["evaluation/num_answers"], row["evaluation/failures"]) == (4, 3)
    none = evaluation_row(tasks, [failed_attempts(BROKEN, 2, version=0)] * 2, 1.0, "")
    assert (none["evaluation/completion_tokens_mean"], none["evaluation/truncated_fraction"]) == (0.0, 0.0)
