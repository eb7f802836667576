"""Verdicts from rows and samples made by hand: a value is judged only if it was measured."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest

from redline.config.installation import how_to_install
from redline.config.load import validate
from redline.config.schema import Config
from redline.config.sections.targets import TargetsConfig
from redline.errors import ConfigError
from redline.telemetry import Recorder
from redline.telemetry.summary.phases import EngineParts
from redline.telemetry.summary.targets import METRICS, Verdict, summary_line, verdicts
from redline.telemetry.summary.timeline import by_phase

ROW: dict[str, Any] = {
    "run/step_s": 2.0,
    "run/samples_per_s": 10.0,
    "engine/tokens_per_s": 5000.0,
    "engine/first_token_p50_s": 0.05,
    "engine/batch_size_mean": 100.0,
    "engine/preemptions": 0,
    "trainer/tokens_per_s": 9000.0,
    "trainer/padding_tokens": 0,
    "trainer/imbalance": 1.05,
    "trainer/mfu": 0.4,
    "weight_sync/total_s": 0.01,
    "buffer/policy_lag_max_steps": 1,
    "timeline/generation_s": 1.2,
    "timeline/training_s": 0.6,
    "timeline/weight_sync_s": 0.01,
    "timeline/data_s": 0.04,
    "timeline/other_s": 0.14,
    "timeline/unaccounted_s": 0.01,
}
GPU = {
    "host/rss_bytes": 1,
    "host/children_rss_bytes": 0,
    "host/total_bytes": 100,
    "gpu/0/utilization_percent": 90,
    "gpu/0/memory_used_bytes": 60,
    "gpu/0/memory_total_bytes": 100,
    "memory/peak_bytes": 70,
}


def recipe(device: str = "cuda", max_lag: int = 0, **telemetry: Any) -> Config:
    rollouts = {"task": {"kind": "import", "path": "nowhere:Tasks"}}
    values = {"model": {"path": "builtin:tiny"}, "run": {"device": device}, "rollouts": rollouts, "telemetry": telemetry}
    return validate({**values, "buffer": {"max_lag": max_lag}})


def judged(rows: list[dict[str, Any]], samples: list[dict[str, Any]], config: Config) -> dict[str, Verdict]:
    return {verdict.name: verdict for verdict in verdicts(rows, samples, config)}


def test_every_threshold_of_a_recipe_belongs_to_a_metric() -> None:
    assert sorted(metric.key for metric in METRICS if metric.key) == sorted(TargetsConfig.model_fields)


def test_a_good_run_meets_every_target_that_has_a_default() -> None:
    found = judged([ROW] * 3, [GPU] * 2, recipe())
    assert {verdict.met for verdict in found.values() if verdict.target.startswith(("<", ">", "≤", "≥"))} == {True}
    assert found["GPU utilisation"].value == 90
    assert found["peak memory"].value == 70, "the allocator remembers a peak that no sample saw"
    assert found["steps"].value == 1800
    assert found["throughput"].value == 36_000
    assert found["MFU"].value == pytest.approx(40)
    assert found["generation share"].value == pytest.approx(60)


def test_beside_the_trainer_speeds_are_of_all_steps_together_and_not_of_a_median_step() -> None:
    """As a run with a lag has them: one step waits for the samples of two, the next finds them there."""
    lanes = ("timeline_rollouts/generation_s", "timeline_rollouts/wait_for_budget_s")
    long = ROW | {"run/step_s": 0.2, "run/samples_per_s": 80.0, "engine/tokens_per_s": 6000.0, "engine/batch_size_mean": 25.0}
    short = ROW | {"run/step_s": 0.05, "run/samples_per_s": 320.0, "engine/tokens_per_s": 1000.0, "engine/batch_size_mean": 5.0}
    rows = [long | dict(zip(lanes, (0.19, 0.01), strict=True)) | {"engine/steps": 45}]
    rows += [short | dict(zip(lanes, (0.01, 0.04), strict=True)) | {"engine/steps": 5}]
    found = judged(3 * rows, [], recipe(max_lag=1))
    assert found["throughput"].value == pytest.approx(3600 * 32 / 0.25), "16 attempts in each of two steps, which take 0.25 s"
    assert found["steps"].value == pytest.approx(3600 * 2 / 0.25)
    assert found["generation"].value == pytest.approx((0.19 * 6000 + 0.01 * 1000) / 0.2)
    assert found["decoded at once"].value == pytest.approx((45 * 25 + 5 * 5) / 50)
    assert found["throughput"].why == "mean of run/samples_per_s in 6 of 6 steps, weighed by run/step_s"


def test_a_row_that_stands_for_several_steps_counts_as_often() -> None:
    """As logs of other frameworks have them: the last row of a run holds fewer steps."""
    ten = ROW | {"run/steps": 10, "run/step_s": 1.0, "run/samples_per_s": 16.0}
    one = ROW | {"run/step_s": 3.0, "run/samples_per_s": 16 / 3}
    found = judged([ten, one], [], recipe())
    assert found["steps"].value == pytest.approx(3600 * 11 / 13)
    assert found["throughput"].value == pytest.approx(16 * 3600 * 11 / 13)


def test_samples_that_were_thinned_stand_for_the_time_between_them() -> None:
    """A day at 90%, of which a sample in 100 s is left, and an hour at 10% with one a second."""
    older = [GPU | {"time": 100.0 * i, "gpu/0/utilization_percent": 90} for i in range(864)]
    newest = [GPU | {"time": 86_400.0 + i, "gpu/0/utilization_percent": 10} for i in range(3600)]
    found = judged([ROW], older + newest, recipe())["GPU utilisation"]
    assert found.value == pytest.approx((86_400 * 90 + 3600 * 10) / 90_000, abs=0.1)
    assert found.why == "mean of gpu/N/utilization_percent in 4464 samples, by the time that each stands for"


def test_in_lockstep_the_speed_of_the_engine_is_a_median_steps_and_throughput_is_what_steps_an_hour_say() -> None:
    slow = ROW | {"run/step_s": 8.0, "run/samples_per_s": 2.5, "engine/tokens_per_s": 100.0}
    found = judged([slow, ROW, ROW], [], recipe())
    assert found["generation"].value == 5000.0
    assert found["throughput"].value == pytest.approx(20 * (found["steps"].value or 0))


@pytest.mark.parametrize(
    ("name", "row", "sample"),
    [
        ("weight sync", {"weight_sync/total_s": 2.0}, {}),
        ("GPU utilisation", {}, {"gpu/0/utilization_percent": 80}),
        ("peak memory", {}, {"gpu/0/memory_used_bytes": 90}),
        ("time to first token", {"engine/first_token_p50_s": 0.1}, {}),
        ("steps", {"run/step_s": 61.0}, {}),
        ("preemptions", {"engine/preemptions": 1}, {}),
        ("padding", {"trainer/padding_tokens": 1}, {}),
        ("imbalance", {"trainer/imbalance": 1.3}, {}),
        ("policy lag", {"buffer/policy_lag_max_steps": 3}, {}),
        ("weight sync share", {"timeline/weight_sync_s": 0.5}, {}),
        ("data share", {"timeline/data_s": 0.2}, {}),
        ("other share", {"timeline/other_s": 0.5}, {}),
        ("unaccounted share", {"timeline/unaccounted_s": 0.1}, {}),
    ],
)
def test_a_value_on_the_wrong_side_misses_its_target_alone(name: str, row: dict[str, Any], sample: dict[str, Any]) -> None:
    found = judged([ROW | row] * 3, [GPU | sample], recipe())
    assert [verdict.name for verdict in found.values() if verdict.met is False] == [name]


def test_what_was_not_measured_says_so_and_is_never_met() -> None:
    found = judged([], [], recipe())
    assert {verdict.met for verdict in found.values()} == {None}
    assert {verdict.value for verdict in found.values()} == {None}
    assert found["time to first token"].why == "no step has engine/first_token_p50_s"
    assert found["GPU utilisation"].why == f"NVML gave none; {how_to_install('gpu')}"
    assert found["time to first token"].word == "not measured"


def test_a_null_is_not_a_value() -> None:
    found = judged([ROW | {"engine/first_token_p50_s": None}, ROW], [], recipe())
    assert found["time to first token"].value == 0.05
    assert found["time to first token"].why == "median of engine/first_token_p50_s in 1 of 2 steps"


def test_on_the_cpu_there_is_no_gpu_and_memory_is_the_machines() -> None:
    sample = {"host/rss_bytes": 30, "host/children_rss_bytes": 5, "host/total_bytes": 100, "memory/peak_bytes": 40}
    found = judged([ROW], [sample], recipe("cpu"))
    assert (found["GPU utilisation"].value, found["GPU utilisation"].why) == (None, "the run was on the CPU")
    assert (found["peak memory"].value, found["peak memory"].met) == (45, True)


def test_without_samples_memory_says_why() -> None:
    assert judged([ROW], [], recipe("cpu", sample_every_s=0))["peak memory"].why == "telemetry.sample_every_s is 0"


def test_thresholds_are_the_recipes() -> None:
    config = recipe(targets={"first_token_s": 0.01, "generation_tokens_per_s": 4000, "padding_tokens": None})
    found = judged([ROW], [GPU], config)
    assert (found["time to first token"].met, found["time to first token"].target) == (False, "< 0.01")
    assert (found["generation"].met, found["generation"].target) == (True, "≥ 4000")
    assert (found["padding"].met, found["padding"].target, found["padding"].value) == (None, "", 0)


def test_a_target_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="first_tokens_s"):
        recipe(targets={"first_tokens_s": 1})


def test_nothing_measured_counts_targets_alone() -> None:
    assert summary_line(verdicts([], [], recipe())) == "targets: 0 met, 0 missed, 13 not measured"


def test_people_get_counts_and_what_was_missed_on_one_line() -> None:
    found = verdicts([ROW | {"trainer/padding_tokens": 3}], [], recipe("cpu"))
    assert summary_line(found) == "targets: 10 met, 1 missed (padding 3 tokens, not ≤ 0), 2 not measured"
    assert {verdict.why for verdict in found if verdict.word == "not measured"} >= {"the run was on the CPU"}


# ── rates of a trainer that had nothing to train on ────────────────────────────────────────────────────────────────────


def test_steps_that_trained_nothing_do_not_count_for_the_speed_of_training() -> None:
    nothing = ROW | {"trainer/tokens_per_s": 0.0, "trainer/mfu": 0.0}
    found = judged([ROW, ROW | {"trainer/tokens_per_s": 11_000.0}, *[nothing] * 5], [], recipe())
    assert found["training"].value == 10_000
    assert found["training"].why == "median of trainer/tokens_per_s in the 2 of 7 steps that trained"
    assert found["MFU"].value == pytest.approx(40)


def test_a_run_that_trained_nothing_has_no_speed_of_training() -> None:
    found = judged([ROW | {"trainer/tokens_per_s": 0.0, "trainer/mfu": 0.0}] * 3, [], recipe())
    assert (found["training"].value, found["training"].why) == (None, "no step trained anything")
    assert (found["MFU"].value, found["MFU"].why) == (None, "no step trained anything")


# ── shares of two lanes ────────────────────────────────────────────────────────────────────────────────────────────────


class TwoLanes:
    """A main lane and one of rollouts, on a clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.recorder = Recorder(clock=lambda: round(self.now_s * 1e9))
        self.parts = EngineParts(self.recorder)
        self._main = ExitStack()
        self._rollouts = ExitStack()
        self._thread = ThreadPoolExecutor(1, initializer=lambda: setattr(threading.current_thread(), "name", "rollouts"))

    def main(self, span: str) -> None:
        self._switch(self._main, span)

    def rollouts(self, span: str) -> None:
        self._thread.submit(self._switch, self._rollouts, span).result()

    def row(self) -> dict[str, float]:
        """Of the step that ends now."""
        phases = by_phase(self.recorder.step_mark())
        return {**{f"timeline/{phase}_s": ns / 1e9 for phase, ns in phases.items()}, **self.parts.mark()}

    def close(self) -> None:
        self._thread.submit(self._rollouts.close).result()
        self._thread.shutdown()

    def _switch(self, lane: ExitStack, span: str) -> None:
        lane.close()
        lane.enter_context(self.recorder.span(span))


@pytest.fixture
def lanes() -> Iterator[TwoLanes]:
    lanes = TwoLanes()
    yield lanes
    lanes.close()


def play(lanes: TwoLanes, *events: tuple[float, Callable[[str], None], str]) -> None:
    """Each event at its second."""
    for at_s, lane, span in events:
        lanes.now_s = at_s
        lane(span)


def test_side_by_side_a_share_is_that_of_the_lane_that_does_it(lanes: TwoLanes) -> None:
    main, rollouts = lanes.main, lanes.rollouts
    play(lanes, (0, main, "wait.for_rollouts"), (0, rollouts, "engine.decode"), (3, main, "trainer.forward"))
    play(lanes, (6, rollouts, "wait.for_budget"), (8, main, "weight_sync.publish"), (8.5, main, "run.checkpoint"))
    play(lanes, (9, rollouts, "rollouts.dispatch"), (9.75, main, "buffer.pack"))
    lanes.now_s = 10
    row = lanes.row()
    assert sum(value for key, value in row.items() if key.startswith("timeline_rollouts/")) == 10
    found = judged([row], [], recipe(max_lag=1))
    shares = {name.removesuffix(" share"): verdict.value for name, verdict in found.items() if name.endswith(" share")}
    assert shares == {"generation": 60, "training": 50, "weight sync": 5, "data": 10, "other": 12.5, "unaccounted": 0}
    assert found["generation share"].why == "timeline_rollouts/generation_s over that lane's time in all steps"
    assert found["training share"].why == "timeline/training_s over that lane's time in all steps"


def test_a_lane_that_waits_through_a_whole_step_has_that_step_too(lanes: TwoLanes) -> None:
    play(
        lanes, (0, lanes.main, "trainer.forward"), (0, lanes.rollouts, "engine.decode"), (6, lanes.rollouts, "wait.for_budget")
    )
    rows = []
    for end_s in (10, 20, 30):
        lanes.now_s = end_s
        rows.append(lanes.row())
    assert [row["timeline_rollouts/wait_for_budget_s"] for row in rows] == [4, 10, 10]
    found = judged(rows, [], recipe(max_lag=1))
    assert found["generation share"].value == pytest.approx(20)
    assert found["training share"].value == pytest.approx(100)


def test_one_lane_is_told_as_before(lanes: TwoLanes) -> None:
    play(lanes, (0, lanes.main, "engine.decode"), (6, lanes.main, "trainer.forward"))
    lanes.now_s = 10
    row = lanes.row()
    assert not [key for key in row if key.startswith("timeline_rollouts/")]
    found = judged([row], [], recipe())
    assert (found["generation share"].value, found["training share"].value) == (60, 40)


def test_rows_without_the_lane_of_the_rollouts_do_not_say_that_nothing_was_generated() -> None:
    row = ROW | {"timeline/generation_s": 0.0, "timeline/wait_for_rollouts_s": 1.2}
    found = judged([row], [], recipe(max_lag=1))["generation share"]
    assert (found.value, found.why) == (None, "the rollouts ran beside the trainer, and no step has their timeline")
