"""Verdicts from rows and samples made by hand: a value is judged only if it was measured."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from redline.config.load import validate
from redline.config.schema import Config, TargetsConfig
from redline.errors import ConfigError
from redline.telemetry.targets import METRICS, Verdict, summary_line, target_table, verdicts

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


def recipe(device: str = "cuda", **telemetry: Any) -> Config:
    rollouts = {"task": {"kind": "import", "path": "nowhere:Tasks"}}
    values = {"model": {"path": "builtin:tiny"}, "run": {"device": device}, "rollouts": rollouts, "telemetry": telemetry}
    return validate(values)


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
    assert found["GPU utilisation"].why == "NVML gave none; pip install 'redline-rl[gpu]'"
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


def test_people_get_counts_and_a_table() -> None:
    found = verdicts([ROW | {"trainer/padding_tokens": 3}], [], recipe("cpu"))
    assert summary_line(found) == "targets: 10 met, 1 missed, 2 not measured"
    console = Console(width=120, file=io.StringIO())
    console.print(target_table(found))
    text = console.file.getvalue()
    assert "not measured: the run was on the CPU" in text
    assert any(line.split() == ["padding", "3", "tokens", "≤", "0", "missed"] for line in text.splitlines())
