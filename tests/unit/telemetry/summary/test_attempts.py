"""Metrics of attempts of several sequences and roles: each counts once, whatever it is made of."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from support.fakes import REPORT, trajectory
from support.played_groups import BROKEN, game, played, sequence, turn
from support.stored_groups import numbered

from redline.buffer import GroupBuffer, MemoryStore, TrajectoryStore
from redline.buffer.packing import pack
from redline.config.sections.buffer import BufferConfig
from redline.rollouts.rewards.accuracy import accuracy
from redline.telemetry.alerts.training import AbortStorm, NotLearning
from redline.telemetry.summary.attempts import attempt_metrics, reward_metrics
from redline.telemetry.summary.learning import Learning
from redline.telemetry.summary.percentiles import median_phases
from redline.types import FinishReason, TrajectoryGroup, WeightUpdate, by_attempt
from redline.watch.rows import FinishedStep, failures_of, step_metrics


@pytest.fixture(scope="module")
def found() -> dict[str, float]:
    """Of two games of four attempts, each with three sequences of two roles."""
    return attempt_metrics([played(0), played(1)])


def test_rewards_are_means_over_roles_of_attempts_not_over_sequences(found: dict[str, float]) -> None:
    assert found["rollouts/role_white_reward_mean"] == pytest.approx(0.5)
    assert found["rollouts/role_black_reward_mean"] == pytest.approx(0.0)
    assert found["rollouts/reward_mean"] == pytest.approx(0.25)
    assert found["rollouts/reward_won_mean"] == pytest.approx(0.5), "a part that black never has is no 0 of black's"
    assert found["rollouts/reward_std"] == pytest.approx(np.std([1, -1, 0, 0.5, 0.5, 0.5]))


def test_attempts_failures_and_retries_are_counted_once(found: dict[str, float]) -> None:
    assert (found["rollouts/groups"], found["rollouts/attempts"], found["rollouts/failures"]) == (2, 8, 2)
    assert found["rollouts/failures_environment"] == 2
    assert found["rollouts/retries"] == 2
    tally = failures_of([played(0), played(1)])
    assert (tally.num_attempts, tally.num_failed, tally.kinds(5)) == (8, 2, [(BROKEN, 2)])


def test_turns_tokens_and_truncations_are_those_of_whole_attempts(found: dict[str, float]) -> None:
    assert found["rollouts/turns_mean"] == found["rollouts/turns_max"] == 4
    assert found["rollouts/sequences_mean"] == 3
    assert found["rollouts/completion_tokens_mean"] == 2 + 2 + 4 + 4
    assert (found["rollouts/tool_calls_mean"], found["rollouts/bad_tool_calls"]) == (1, 0)
    assert (found["rollouts/stopped_fraction"], found["rollouts/truncated_fraction"]) == (0, 1)


def test_attempt_that_a_budget_ended_is_truncated_however_its_replies_ended() -> None:
    ended = sequence([turn(1, 3)], 3, truncated=True, attempt=0)
    whole = sequence([turn(1, 3)], 3, attempt=1)
    found = attempt_metrics([TrajectoryGroup("t", [ended, whole], np.zeros(2, dtype=np.float32), num_cut_off=3)])
    assert found["rollouts/cut_off"] == 3
    assert (found["rollouts/truncated_fraction"], found["rollouts/stopped_fraction"]) == (0.5, 1)


def test_seconds_of_each_phase_have_percentiles(found: dict[str, float]) -> None:
    assert found["rollouts/environment_p50_s"] == pytest.approx(0.8)
    assert found["rollouts/prompt_p99_s"] == pytest.approx(0.01)
    assert found["rollouts/parse_p90_s"] == pytest.approx(0.02)
    assert found["rollouts/score_p50_s"] == pytest.approx(0.5)
    assert (found["engine/prefill_p50_s"], found["engine/decode_p50_s"]) == pytest.approx((0.2, 0.4))
    assert found["rollouts/attempt_latency_p50_s"] == pytest.approx(4 * 0.7), "all replies of the attempt"


def test_phases_that_nothing_measured_are_left_out() -> None:
    single = attempt_metrics([TrajectoryGroup("t", [trajectory([1], [2])], np.zeros(1, dtype=np.float32))])
    assert not any(key.startswith(("rollouts/environment_", "rollouts/score_")) for key in single)
    nothing = attempt_metrics([])
    assert math.isnan(nothing["rollouts/turns_max"])
    assert nothing["rollouts/attempts"] == nothing["rollouts/failures"] == 0


def test_a_step_counts_its_samples_by_attempts(tmp_path: Path) -> None:
    for store in (MemoryStore(), TrajectoryStore(tmp_path)):
        buffer = GroupBuffer(BufferConfig(max_lag=0), 2, store)
        buffer.admit(0)
        buffer.offer(played(0), numbered(1))
        batch = buffer.next_batch(0)
        assert (batch.num_attempts_sampled, batch.group_sequences.tolist()) == (5, [9, 2])
        row = step_metrics(FinishedStep([played(0)], batch, REPORT, WeightUpdate(1, (), 0), {"trainer.step": 10**9}))
        assert row["run/samples_per_s"] == pytest.approx(5)
        buffer.trained(batch)
        assert buffer.metrics["buffer/trained_tokens_mean"] == pytest.approx((3 * 12 + 3) / 5)


def test_late_games_count_the_tokens_of_whole_attempts(tmp_path: Path) -> None:
    for store in (MemoryStore(), TrajectoryStore(tmp_path)):
        buffer = GroupBuffer(BufferConfig(max_lag=1), 1, store)
        buffer.admit(0)
        buffer.offer(played(0))
        assert buffer._lengths(0) == [12, 12, 12, 12]


def test_packed_groups_keep_sequences_of_attempts_that_did_not_fail() -> None:
    batch = pack([played(0)], 0, keep_no_signal=True)
    assert (batch.num_sequences, batch.num_attempts_sampled) == (9, 3)


def test_held_out_rewards_and_accuracy_are_over_attempts() -> None:
    by_role = by_attempt(played().trajectories, by_role=True)
    assert reward_metrics("evaluation", by_role)["evaluation/reward_mean"] == pytest.approx(0.25)
    right = [sequence([turn(1, 2)], 2, attempt=0, reward_parts={"correct": 1.0}) for _ in range(3)]
    wrong = sequence([turn(1, 2)], 2, attempt=1, reward_parts={"correct": 0.0})
    assert accuracy([own[0] for own in by_attempt([*right, wrong], by_role=True)]) == 0.5


def test_a_run_sums_its_phases_up_as_the_median_of_its_steps() -> None:
    rows = [
        attempt_metrics([played(0)]),
        {"engine/decode_p50_s": 9.0, "engine/queue_p50_s": None},
        attempt_metrics([played(1)]),
    ]
    found = median_phases(rows)
    assert list(found) == ["environment", "prompt", "queue", "prefill", "decode", "parse", "score"]
    assert found["decode"] == pytest.approx({"p50": 0.4, "p90": 0.4, "p99": 0.4})
    assert median_phases([{"rollouts/groups": 0}]) == {}


# ── rows of metrics ────────────────────────────────────────────────────────────────────────────────────────────────────


def row(step: int, attempts: int, failures: int, signal: int = 1) -> dict[str, float]:
    counts = {"rollouts/groups": 1, "rollouts/groups_with_signal": signal, "rollouts/attempts": attempts}
    return {"step": step, **counts, "rollouts/failures": failures, "rollouts/reward_mean": 0.0, "rollouts/reward_std": 1.0}


def test_a_run_whose_groups_had_fewer_attempts_than_group_size_knows_that_all_failed() -> None:
    learning = Learning([row(1, 3, 3, signal=0), row(2, 3, 3, signal=0)], group_size=8)
    assert learning.why_not == "every attempt failed"


def test_alerts_take_the_attempts_that_were_made() -> None:
    storm = AbortStorm(0.2, group_size=8)
    findings = [storm.step(row(step, 4, 3)) for step in range(1, 5)]
    assert any(finding and "75%" in finding.seen for finding in findings)
    quiet = NotLearning(1, group_size=8)
    told = quiet.step(row(1, 4, 2, signal=0))
    assert told is not None
    assert "50% of the last step's attempts failed" in told.seen


def test_game_of_support_is_what_it_says() -> None:
    assert [t.finish_reason for t in game(0)] == [FinishReason.STOP, FinishReason.STOP, FinishReason.LENGTH]


def test_parts_under_a_new_name_in_every_attempt_make_no_metrics_and_are_counted() -> None:
    attempts = [[trajectory([1], [2], reward=1.0, reward_parts={"won": 1.0, f"new {i}": 1.0})] for i in range(20)]
    metrics = reward_metrics("rollouts", attempts)
    assert [name for name in metrics if name.startswith("rollouts/reward_") and "new" in name] == []
    assert metrics["rollouts/reward_won_mean"] == 1.0
    assert metrics["rollouts/parts_left_out"] == 20
