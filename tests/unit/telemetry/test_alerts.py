from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import simulated_runs
from support.simulated_runs import GIB, Fault, World

from redline.config.schema import Config
from redline.telemetry.alerts import Alerts, Detector, Episode, Finding, make_detectors
from redline.telemetry.alerts.bias import LengthBias
from redline.telemetry.alerts.host import HostMemorySlope
from redline.telemetry.alerts.pipeline import ThroughputDrop
from redline.telemetry.alerts.robust import explained_by, slope, spread, step_noise, trend_p_value
from redline.telemetry.alerts.training import AbortStorm
from redline.telemetry.spans import LaneState, OpenSpan
from redline.telemetry.stalls.activity import Activity
from redline.telemetry.workers import WorkerState

STEPS = 300
FAULT_AT, FAULTY_STEPS = 120, 180


def config(**sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "model": {"path": "builtin:tiny"},
        "rollouts": {"task": {"kind": "import", "path": "letters:Letters"}, "groups_per_step": 8, "group_size": 8},
        "buffer": {"max_lag": 2},
    }
    return Config.model_validate(values | sections)


def from_step(first: int, **changes: Any) -> Fault:
    """The world is different from this step on."""

    def fault(world: World, step: int) -> None:
        if step == first:
            for name, value in changes.items():
                setattr(world, name, value)

    return fault


def in_steps(first: int, last: int, **changes: Any) -> Fault:
    """The world is different in these steps, and then as before."""
    healthy = World()

    def fault(world: World, step: int) -> None:
        if step in (first, last + 1):
            for name, value in changes.items():
                setattr(world, name, value if step == first else getattr(healthy, name))

    return fault


LONG_WAITS = {("main", "wait.for_rollouts"): 1.0, ("rollouts", "wait.for_weights"): 200.0}
FAULTS: dict[str, Fault] = {
    "not_finite": in_steps(FAULT_AT, FAULT_AT + 2, row={"trainer/loss": None, "trainer/skipped": True}),
    "stalled_rollouts": from_step(FAULT_AT, groups=0),
    "long_wait": in_steps(FAULT_AT, FAULT_AT, wait_s=LONG_WAITS),
    "throughput_drop": from_step(FAULT_AT, engine_speed=0.6, trainer_speed=0.6),
    "staleness_rise": from_step(FAULT_AT, lag=2.0),
    "length_bias": from_step(FAULT_AT, stale_groups=2),
    "kv_saturation": from_step(FAULT_AT, kv_use=1.1),
    "host_memory_slope": from_step(1, leak_bytes_per_s=12 * GIB / 3600),
    "reward_collapse": from_step(FAULT_AT, success=0.02),
    "not_learning": from_step(FAULT_AT, row={"rollouts/groups_with_signal": 0}),
    "abort_storm": from_step(FAULT_AT, failure=0.5),
    "dead_worker": from_step(FAULT_AT, workers=[WorkerState("rollouts", False, "its thread ended")]),
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_raises_its_alert_and_no_other(kind: str, seed: int, tmp_path: Path) -> None:
    assert simulated_runs.run(make_detectors(config()), FAULTY_STEPS, seed, tmp_path, FAULTS[kind]) == [kind]


@pytest.mark.parametrize("seed", range(100, 104))
def test_a_healthy_run_raises_none(seed: int, tmp_path: Path) -> None:
    assert simulated_runs.run(make_detectors(config()), STEPS, seed, tmp_path) == []


@pytest.mark.slow
def test_a_hundred_thousand_healthy_steps_raise_at_most_one_alert(tmp_path: Path) -> None:
    """The rate that the documentation states."""
    raised = [kind for seed in range(100) for kind in simulated_runs.run(make_detectors(config()), 1000, seed, tmp_path)]
    assert len(raised) <= 1, raised


LATE = {
    "buffer/dropped_late": 2,
    "buffer/trained_groups": 8,
    "buffer/dropped_attempts": 16,
    "buffer/dropped_tokens_mean": 640.0,
    "buffer/trained_tokens_mean": 210.0,
    "buffer/dropped_reward_mean": 0.1,
    "buffer/trained_reward_mean": 0.5,
}


def test_late_groups_that_are_dropped_are_told_as_a_bias_with_lengths_and_rewards_of_both_sides() -> None:
    bias = LengthBias(0.02)
    found = [bias.step({"step": step, **LATE}) for step in (1, 2, 3)]
    assert found[0] is None, "two groups prove nothing"
    assert found[1] is not None
    assert found[1].seen == (
        "4 groups, 20.0% of the last 2 steps', were dropped as late; their attempts had at least 640 tokens on average, those"
        " trained on 210, with a mean reward of 0.1 beside 0.5: the training distribution is biased towards short answers"
    )
    assert "buffer.late_groups: wait" in found[1].look_at
    assert found[2] is None, "once an episode"


def test_groups_that_time_out_are_a_bias_too_and_the_key_that_drops_them_is_named() -> None:
    bias = LengthBias(0.02)
    found = [bias.step({"step": step, **LATE, "buffer/dropped_timed_out": 2 * step}) for step in (1, 2)]
    assert found[1] is not None
    assert "buffer.group_timeout_s" in found[1].look_at


def test_what_an_earlier_process_gave_up_is_not_blamed_for_the_late_groups_of_a_resumed_run() -> None:
    bias = LengthBias(0.02)
    found = [bias.step({"step": step, **LATE, "buffer/dropped_timed_out": 40}) for step in (101, 102)]
    assert found[1] is not None
    assert "buffer.late_groups: wait" in found[1].look_at


def test_late_groups_that_were_short_are_told_without_a_word_of_short_answers() -> None:
    bias = LengthBias(0.02)
    found = [bias.step({"step": step, **LATE, "buffer/dropped_tokens_mean": 5.0}) for step in (1, 2)]
    assert found[1] is not None
    assert "short answers" not in found[1].seen
    assert "what is trained on is not what was sampled" in found[1].seen


def test_a_fault_that_comes_back_is_told_again(tmp_path: Path) -> None:
    def fault(world: World, step: int) -> None:
        world.kv_use = 1.1 if 100 <= step < 130 or 200 <= step < 230 else 0.6

    assert simulated_runs.run(make_detectors(config()), STEPS, 0, tmp_path, fault) == ["kv_saturation", "kv_saturation"]


def test_a_kind_that_is_off_is_not_told(tmp_path: Path) -> None:
    alerts = Alerts(make_detectors(config()), tmp_path / "alerts.jsonl", off=("not_finite",))
    alerts.step({"step": 1, "trainer/loss": None, "trainer/grad_norm": 1.0}, Activity(0.0, 0.0))
    assert not (tmp_path / "alerts.jsonl").exists()


# ── what an alert says ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_alert_goes_to_the_console_the_file_and_the_listeners(tmp_path: Path) -> None:
    told: list[str] = []
    sent: list[Any] = []
    alerts = Alerts(make_detectors(config()), tmp_path / "alerts.jsonl", tell=told.append, send=sent.append)
    alerts.step({"step": 7, "trainer/loss": math.inf, "trainer/grad_norm": 1.0}, Activity(0.0, 0.0))
    [row] = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert row.keys() == {"time", "step", "kind", "seen", "since", "look_at"}
    assert (row["step"], row["kind"], row["since"]) == (7, "not_finite", "step 7")
    assert "trainer/loss" in row["seen"]
    assert "bad-steps/" in row["look_at"]
    assert sent == [row]
    assert row["seen"] in told[0]


def test_alerts_that_the_disk_does_not_take_are_told_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "alerts.jsonl").symlink_to(tmp_path / "gone" / "alerts.jsonl")
    told: list[str] = []
    sent: list[Any] = []
    alerts = Alerts([], tmp_path / "alerts.jsonl", tell=told.append, send=sent.append)
    for step in (1, 2):
        alerts.step({"step": step}, Activity(0.0, 0.0))
        alerts.found("stall", Finding("nothing moves", f"step {step}", "stalls/"))
    assert len(sent) == 2
    begins = [text.partition(":")[0] for text in told]
    assert begins == ["alert, stall", "alerts.jsonl does not have this alert", "alert, stall"]


class Broken(Detector):
    kind = "kv_saturation"

    def step(self, row: Any) -> Finding | None:
        raise ZeroDivisionError("here")


def test_a_detector_that_fails_is_switched_off_and_the_others_go_on(tmp_path: Path) -> None:
    told: list[str] = []
    alerts = Alerts([Broken(), *make_detectors(config())], tmp_path / "alerts.jsonl", tell=told.append)
    for step in (1, 2):
        alerts.step({"step": step, "trainer/loss": math.nan, "trainer/grad_norm": 1.0}, Activity(0.0, 0.0))
    assert [text for text in told if "ZeroDivisionError: here" in text] == told[:1]
    assert json.loads((tmp_path / "alerts.jsonl").read_text())["kind"] == "not_finite"


def test_a_wait_is_not_told_where_its_cause_was(tmp_path: Path) -> None:
    alerts = Alerts([], tmp_path / "alerts.jsonl")
    finding = Finding("seen", "since", "look")
    assert alerts.found("stalled_rollouts", finding)
    assert not alerts.found("long_wait", finding)
    assert not alerts.found("stalled_rollouts", finding)
    alerts.step({"step": 1}, Activity(0.0, 0.0))
    assert alerts.found("long_wait", finding)


def test_a_run_without_signal_is_told_so_once_with_its_reward_and_failures(tmp_path: Path) -> None:
    alerts = Alerts(make_detectors(config()), tmp_path / "alerts.jsonl")
    quiet = {"rollouts/groups": 8, "rollouts/groups_with_signal": 0, "rollouts/reward_mean": 0.0, "rollouts/failures": 16}
    for step in range(1, 30):
        arrived = quiet if step != 5 else {"rollouts/groups": 0, "rollouts/groups_with_signal": 0}  # none came, none was alike
        alerts.step({"step": step} | arrived, Activity(0.0, 0.0))
    told = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert [(row["kind"], row["step"], row["since"]) for row in told] == [("not_learning", 11, "step 1")]
    assert "the mean reward is 0.000; 25% of the last step's attempts failed" in told[0]["seen"]


def test_where_the_batch_is_the_baseline_attempts_that_all_score_alike_are_no_signal(tmp_path: Path) -> None:
    """REINFORCE++ compares with the whole batch: its groups have an advantage even where every reward is 1."""
    alerts = Alerts(make_detectors(config()), tmp_path / "alerts.jsonl")
    for step in range(1, 11):
        row = {"rollouts/groups": 8, "rollouts/groups_with_signal": 8, "rollouts/reward_mean": 1.0, "rollouts/reward_std": 0.0}
        alerts.step({"step": step} | row, Activity(0.0, 0.0))
    assert json.loads((tmp_path / "alerts.jsonl").read_text())["kind"] == "not_learning"


# ── single detectors ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_episode_begins_after_enough_bad_sightings_and_ends_after_enough_good_ones() -> None:
    episode = Episode(enter=2, leave=2)
    begun = [
        episode.see(bad, at) for at, bad in enumerate([True, False, True, True, True, False, True, False, False, True, True])
    ]
    assert [at for at, yes in enumerate(begun) if yes] == [3, 10]
    assert episode.since == 9


def waiting(seconds: float, *, quiet_s: float = 0.0, between_steps: bool = False) -> Activity:
    """The rollouts wait for the weights, and have done so for `seconds` in all."""
    spans = {"main": "run.evaluate" if between_steps else "trainer.forward", "rollouts": "wait.for_weights"}
    lanes = [LaneState(lane, None, None, True, {}, 0, "unaccounted", [OpenSpan(name, 0, {})]) for lane, name in spans.items()]
    return Activity(0.0, quiet_s, lanes, {"main": {}, "rollouts": {"wait.for_weights": seconds}})


@pytest.mark.parametrize(
    ("now", "told"),
    [
        (waiting(130.0), True),
        (waiting(130.0, quiet_s=29.0), False),  # nothing moves: that is a stall
        (waiting(130.0, between_steps=True), False),  # everybody waits for an evaluation
        (waiting(103.0), False),  # below the floor
    ],
)
def test_a_wait_that_lasts_is_told_while_it_does(now: Activity, told: bool, tmp_path: Path) -> None:
    alerts = Alerts(make_detectors(config()), tmp_path / "alerts.jsonl")
    for step in range(101):
        alerts.step({"step": step}, waiting(float(step)))
    alerts.tick(now)
    assert (tmp_path / "alerts.jsonl").exists() is told
    if told:
        row = json.loads((tmp_path / "alerts.jsonl").read_text())
        assert row["kind"] == "long_wait"
        assert row["seen"].startswith("rollouts waited 30.0 s for weights")
        assert "main is in trainer.forward" in row["look_at"]


def making_groups(seconds: float) -> Activity:
    lane = LaneState("main", None, None, True, {}, 0, "unaccounted", [OpenSpan("rollouts.reward", 0, {})])
    return Activity(0.0, 0.0, [lane], {"main": {"rollouts.reward": seconds, "engine.decode": 5.0}})


def test_groups_that_do_not_come_are_told_while_the_step_lasts_and_once(tmp_path: Path) -> None:
    alerts = Alerts(make_detectors(config()), tmp_path / "alerts.jsonl")
    for step in range(20):
        alerts.step({"step": step}, making_groups(2.0 * step))
    for seconds in (38.0 + 59.0, 38.0 + 61.0, 38.0 + 200.0):
        alerts.tick(making_groups(seconds))
    [row] = [json.loads(line) for line in (tmp_path / "alerts.jsonl").read_text().splitlines()]
    assert row["kind"] == "stalled_rollouts"
    assert "main is in rollouts.reward" in row["look_at"]


@pytest.mark.parametrize(("work", "told"), [(0.4, False), (0.9, True)])
def test_small_steps_are_slow_and_no_fault(work: float, told: bool) -> None:
    detector = ThroughputDrop(0.25)

    def row(step: int, work: float, speed: float) -> dict[str, Any]:
        noise = 1 + 0.02 * (step % 5)
        return {"step": step, "trainer/tokens": 1000 * work, "trainer/tokens_per_s": 5000 * speed * noise}

    rows = [row(step, 1.0, 1.0) for step in range(1, 60)] + [row(step, work, 0.5) for step in range(60, 160)]
    assert any(detector.step(each) for each in rows) is told


def test_a_deeper_buffer_makes_batches_older_on_purpose(tmp_path: Path) -> None:
    def fault(world: World, step: int) -> None:
        if step == FAULT_AT:
            world.lag, world.row = 2.0, {"buffer/target": 24}

    assert simulated_runs.run(make_detectors(config()), STEPS, 0, tmp_path, fault) == []


def test_caches_that_fill_up_are_no_leak(tmp_path: Path) -> None:
    """All of the first hour's growth, in every simulated run, is a warm-up of six GiB."""
    assert simulated_runs.run(make_detectors(config()), 150, 3, tmp_path) == []


def test_memory_that_is_taken_once_is_no_leak() -> None:
    detector = HostMemorySlope(hours=24)
    for second in range(480):
        used = (6 + 4 * (second > 150) + 2 * (second > 300)) * GIB + 2**20 * (second % 7)
        sizes = {"host/rss_bytes": used, "host/available_bytes": 24 * GIB - used, "host/total_bytes": 24 * GIB}
        assert detector.sample({"time": float(second), **sizes}) is None, second


def test_a_run_that_fails_from_the_start_is_told(tmp_path: Path) -> None:
    raised = simulated_runs.run(make_detectors(config()), 20, 0, tmp_path, from_step(1, failure=0.9, success=0.0))
    assert raised == ["abort_storm", "not_learning"]


def test_groups_that_are_given_up_count_as_aborted() -> None:
    storm = AbortStorm(fraction=0.2, group_size=8)
    given_up = [0] * 20 + [4, 8, 12, 16]  # since the run began
    found = [
        storm.step({"step": step, "rollouts/groups": 8, "rollouts/failures": 0, "buffer/dropped_timed_out": total})
        for step, total in enumerate(given_up, 1)
    ]
    assert [step for step, finding in enumerate(found, 1) if finding] == [22]
    assert found[21] is not None
    assert found[21].seen.startswith("25% of the attempts")


def test_what_an_earlier_process_gave_up_does_not_count_in_a_resumed_run() -> None:
    storm = AbortStorm(fraction=0.2, group_size=8)
    row = {"rollouts/groups": 8, "buffer/dropped_timed_out": 40}
    found = [storm.step({"step": 100 + step, "rollouts/failures": 36, **row}) for step in (1, 2, 3)]
    assert found[2] is not None
    assert found[2].seen.startswith("56% of the attempts"), "36 of 64 in each of the three steps"


# ── statistics ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_robust_statistics_ignore_a_wild_value() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 1000.0]
    assert spread(values) == pytest.approx(1.4826 * 1.5)
    assert slope(range(6), [0.0, 2.0, 4.0, 6.0, 8.0, 1000.0]) == pytest.approx(2.0)


def test_a_trend_hardly_counts_as_noise() -> None:
    assert step_noise([0.0, 1.0, 2.0, 3.0]) == pytest.approx(math.sqrt(0.5))
    assert step_noise([5.0]) == 0.0


def test_a_history_explains_twice_its_longest() -> None:
    assert explained_by([1.0] * 9 + [30.0], floor=10.0, deviations=8.0) == 60.0
    assert explained_by([1.0] * 10, floor=10.0, deviations=8.0) == 10.0


def test_a_rise_is_certain_and_a_constant_is_not() -> None:
    assert trend_p_value(list(range(24))) < 1e-9
    assert trend_p_value([3.0] * 24) == 1.0
    assert trend_p_value(list(range(24, 0, -1))) == 1.0


def test_replaced_rows_are_what_the_simulation_says() -> None:
    """The tests above hold only if the fault is in the rows."""
    rows = [value for kind, value, _ in simulated_runs.events(3, 0, from_step(2, groups=0)) if kind == "step"]
    assert [row["rollouts/groups"] for row in rows] == [8, 0, 0]
    assert replace(World(), lag=3.0).lag == 3.0
