"""Runs whose attempts fail: what they say, when they stop, and that they go on otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.fakes import REPORT, FakeTrainer, train_batch, trajectory
from support.watched_stages import FakeStages

from redline.buffer import GroupBuffer, GroupStore, MemoryStore, TrajectoryStore
from redline.config.schema import Config
from redline.config.sections.buffer import BufferConfig
from redline.errors import TaskError
from redline.rollouts.prompts import failed_attempts
from redline.rollouts.rewards.accuracy import accuracy
from redline.telemetry import MetricsLog, Progress, Recorder, RunFolder, recording
from redline.telemetry.alerts.training import AbortStorm, NotFinite
from redline.telemetry.summary.failed_attempts import FailureTally
from redline.types import Failure, Task, Trajectory, TrajectoryGroup, WeightUpdate
from redline.watch.outputs import Outputs
from redline.watch.run_watch import MAX_FAILED_STEPS, RunWatch

FAILURE = Failure("reward", "KeyError: 'x'", "rewards.py:7, in score: return x", "")


def attempts(failed: int, fine: int) -> list[Trajectory]:
    return [*([trajectory([1], [2], failure=FAILURE)] * failed), *([trajectory([1], [2], reward=1.0)] * fine)]


class Watching:
    """A watch over a run that somebody else makes."""

    def __init__(self, folder: Path, evaluated: Sequence[Trajectory] = (), **evaluation: float) -> None:
        rollouts = {"task": {"kind": "import", "path": "a:B"}, "evaluation": evaluation}
        self.config = Config.model_validate({"model": {"path": "x"}, "rollouts": rollouts})
        self.folder = RunFolder.create(folder, "run")
        self.calls: list[tuple[object, ...]] = []
        self.recorder = Recorder()
        self.trainer = FakeTrainer(self.calls)
        stages = FakeStages(self.trainer, [Task("t", [{"role": "user", "content": "a"}])], [list(evaluated)])
        self.watch = RunWatch(self.config, Outputs(self.folder, self.recorder, Progress(100)), stages)

    def step(self, *groups: Sequence[Trajectory]) -> None:
        for number, group in enumerate(groups):
            self.watch.group_collected(TrajectoryGroup("t", group, np.zeros(len(group), dtype=np.float32), number))
        with recording(self.recorder):
            self.trainer.version += 1
            self.watch.step_finished(train_batch([]), REPORT, WeightUpdate(self.trainer.version, (), 0))


def test_a_run_whose_first_step_only_fails_stops_with_the_reason_and_the_place(tmp_path: Path) -> None:
    watching = Watching(tmp_path)
    with pytest.raises(TaskError) as stopped:
        watching.step(attempts(4, 0), attempts(4, 0))
    assert stopped.value.message == (
        "every attempt of step 1, the first of this process, failed (8 of 8): reward: KeyError: 'x',"
        " at rewards.py:7, in score: return x"
    )
    assert stopped.value.hint == "`score(task, text)` must return a number, or named numbers, for any text"
    [row] = MetricsLog.read(watching.folder.metrics)
    assert row["rollouts/failure_reason"] == str(FAILURE)


def test_the_row_of_a_step_names_the_reason_whichever_process_made_the_failures_and_none_where_there_are_none(
    tmp_path: Path,
) -> None:
    watching = Watching(tmp_path)
    restored = trajectory([1], [2], failure=Failure("reward", str(FAILURE).removeprefix("reward: ")))
    watching.watch.take_over([TrajectoryGroup("t", [restored], np.zeros(1, dtype=np.float32), 0)])
    watching.step(attempts(0, 4))
    watching.step(attempts(0, 4))
    assert watching.watch.rows.failures.num_failed == 0, "of this process"
    assert [row["rollouts/failure_reason"] for row in MetricsLog.read(watching.folder.metrics)] == [str(FAILURE), None]


def test_one_reward_is_enough_to_go_on(tmp_path: Path) -> None:
    watching = Watching(tmp_path)
    watching.step(attempts(4, 0), attempts(3, 1))
    assert (watching.watch.rows.failures.num_failed, watching.watch.rows.failures.num_attempts) == (7, 8)


def test_an_outage_later_stops_the_run_after_some_steps_and_loses_nothing(tmp_path: Path) -> None:
    watching = Watching(tmp_path)
    watching.step(attempts(0, 4))
    for _ in range(MAX_FAILED_STEPS - 1):
        watching.step(attempts(4, 0))
    watching.step(attempts(3, 1))
    watching.step()
    for _ in range(MAX_FAILED_STEPS - 1):
        watching.step(attempts(4, 0))
    assert not any(call[0] == "trainer.save" for call in watching.calls)
    with pytest.raises(TaskError, match="every attempt of step 8, as of the 2 before it, failed"):
        watching.step(attempts(4, 0))
    assert ("trainer.save", "step-000008") in watching.calls


def test_what_an_earlier_process_failed_at_does_not_stop_a_resumed_run(tmp_path: Path) -> None:
    watching = Watching(tmp_path)
    watching.watch.take_over([TrajectoryGroup("t", attempts(4, 0), np.zeros(4, dtype=np.float32))])
    watching.step()
    assert watching.watch.rows.failures.num_attempts == 0
    watching.step(attempts(0, 4))


def test_a_step_whose_groups_an_earlier_process_sampled_has_no_speed(tmp_path: Path) -> None:
    watching = Watching(tmp_path)
    watching.watch.take_over([TrajectoryGroup("t", attempts(0, 4), np.zeros(4, dtype=np.float32))])
    watching.step()
    watching.step(attempts(0, 4))
    reused, sampled = MetricsLog.read(watching.folder.metrics)
    assert (reused["rollouts/groups"], reused["engine/tokens_per_s"]) == (1, None)
    assert sampled["engine/tokens_per_s"] > 0


def test_a_first_evaluation_that_only_fails_stops_the_run_and_a_later_one_does_not(tmp_path: Path) -> None:
    watching = Watching(tmp_path, attempts(4, 0))
    with recording(watching.recorder):
        with pytest.raises(TaskError, match=r"(?s)every attempt of the first evaluation failed \(4 of 4\).*in score"):
            watching.watch.evaluate(0)
        watching.watch.evaluate(20)
    [row] = MetricsLog.read(watching.folder.evaluations)
    assert row["evaluation/failures"] == 4


@pytest.mark.parametrize(("failed", "ends"), [(4, False), (1, False), (0, True)])
def test_an_evaluation_that_fails_does_not_reach_a_target_below_zero(tmp_path: Path, failed: int, ends: bool) -> None:
    """The mean of the answers that were scored is above it, and says nothing about the others."""
    answers = [*attempts(failed, 0), *([trajectory([1], [2], reward=-0.5)] * (4 - failed))]
    watching = Watching(tmp_path, answers, every=1, stop_at=-0.6)
    with recording(watching.recorder):
        watching.watch.evaluate(20)
    assert watching.watch.is_complete is ends
    watching.trainer.version = 20
    outputs = Outputs(watching.folder, Recorder(), Progress(9))
    resumed = RunWatch(watching.config, outputs, FakeStages(watching.trainer))
    resumed.resume()
    assert resumed.is_complete is ends, "a resumed run reads the same in the file"


def test_means_of_rewards_are_over_the_attempts_that_have_one_with_the_failures_beside_them(tmp_path: Path) -> None:
    fine = [trajectory([1], [2], reward=1.0), trajectory([1], [2], reward=0.5)]
    watching = Watching(tmp_path, [*attempts(2, 0), *fine])
    watching.step([*attempts(2, 0), *fine])
    watching.step(attempts(4, 0))
    with recording(watching.recorder):
        watching.watch.evaluate(20)
    mixed, failed = MetricsLog.read(watching.folder.metrics)
    assert (mixed["rollouts/reward_mean"], mixed["rollouts/failures"]) == (0.75, 2)
    assert (failed["rollouts/reward_mean"], failed["rollouts/failures"]) == (None, 4)
    assert NotFinite().step(failed) is None, "failures are told of by their own alert"
    [row] = MetricsLog.read(watching.folder.evaluations)
    assert (row["evaluation/reward_mean"], row["evaluation/failures"]) == (0.75, 2)


def test_an_attempt_that_failed_at_evaluation_is_not_a_right_answer() -> None:
    right = trajectory([1], [2], reward=1.0, reward_parts={"correct": 1.0})
    assert accuracy([right, right, right, *attempts(1, 0)]) == 0.75


def test_the_commonest_reason_is_by_place_and_not_by_what_a_message_holds() -> None:
    tally = FailureTally()
    tally.add(trajectory([1], [2], failure=Failure("reward", f"KeyError: {i}", "a.py:1, in score")) for i in range(3))
    tally.add([trajectory([1], [2], failure=Failure("reward", "ValueError", "a.py:9, in score"))] * 2)
    tally.add(attempts(0, 5))
    assert tally.sentence() == "5 of 10 attempts failed (50%), most often with: reward: KeyError: 0, at a.py:1, in score"


def test_the_alert_about_failures_says_why_most_of_them_failed() -> None:
    storm = AbortStorm(0.2, 8)
    row = {"rollouts/groups": 8, "rollouts/failures": 60, "rollouts/failure_reason": str(FAILURE)}
    findings = [storm.step({"step": step, **row}) for step in range(1, 4)]
    assert findings[:2] == [None, None]
    assert findings[2] is not None
    assert "most of the last with: reward: KeyError: 'x', at rewards.py:7" in findings[2].seen


@pytest.mark.parametrize("keep", [False, True], ids=["in memory", "on disk"])
def test_a_group_that_was_never_sampled_is_stored_and_is_a_part_of_a_batch_without_weight(tmp_path: Path, keep: bool) -> None:
    store: GroupStore = TrajectoryStore(tmp_path) if keep else MemoryStore(horizon=0)
    buffer = GroupBuffer(BufferConfig(), 2, store)
    fine, failed = buffer.admit(3)
    failure = Failure("prompt", "a prompt of 5000 tokens, but 100 is the most")
    attempts = failed_attempts(failure, 2, version=3)
    good = [trajectory([1, 2], [3], version=3, reward=1.0), trajectory([1, 2], [4], version=3)]
    buffer.offer(
        TrajectoryGroup("good", good, np.array([1.0, -1.0], dtype=np.float32), fine),
        TrajectoryGroup("bad", attempts, np.zeros(2, dtype=np.float32), failed),
    )
    assert buffer.has_batch(3)
    batch = buffer.next_batch(3)
    assert int(np.count_nonzero(batch.loss_mask)) == 2
    assert batch.indices == (fine, failed)
    buffer.trained(batch)
    assert buffer.metrics["buffer/trained_reward_mean"] == 0.5, "of the group that has a reward"
    store.close()
