"""Efficiencies from saved results, and plans held against measurements."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from points import CPU_POINTS, CUDA_POINTS, Point, generation, training
from probe import measure_generation, measure_training, probe
from validate import Row, again, document, point_setup, render, rows_of

from redline.lab.measure.machine import Machine
from redline.lab.measure.roofline import Load, step_seconds
from redline.lab.plan.calibration import ASSUMED, Observation, fit, rates_of, read_observations, results_folder
from redline.lab.plan.devices import DEVICES, Device
from redline.lab.plan.rates import Cost, Efficiency
from redline.lab.plan.timing import decode_cost, network_cost, optimizer_cost, read_context, training_flops

H200 = DEVICES["h200"]
CPU = Device("cpu", 24 * 2**30, 0.5e12, 20e9, 10e9, 10e9, 0, 0.1, "cpu")
COSTS = [Cost(1.0, 0.1, layers=1000), Cost(0.1, 1.0, layers=1000), Cost(0.2, 0.2, layers=50_000), Cost(0.5, 0.3, 0.2, 10)]


def observed(planted: Efficiency, costs: list[Cost], noise: float = 0.0) -> list[Observation]:
    signs = (1, -1, 1, -1)
    return [
        Observation("training", cost, cost.seconds(planted) * (1 + sign * noise), f"run {i}")
        for i, (cost, sign) in enumerate(zip(costs, signs, strict=True))
    ]


# ── the fit ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "planted", [Efficiency(0.6, 0.9, 40e-6, ""), Efficiency(0.3, 0.5, 5e-6, ""), Efficiency(0.9, 0.7, 0.0, "")]
)
def test_planted_efficiencies_are_found(planted: Efficiency) -> None:
    found = fit(observed(planted, COSTS), ASSUMED["generation"])
    for cost in COSTS:
        assert cost.seconds(found) == pytest.approx(cost.seconds(planted), rel=0.03)
    assert "4 runs (run 0, run 1, run 2, run 3)" in found.how


@pytest.mark.parametrize("layer_s", [40e-6, 300e-6, 1.5e-3])
def test_of_a_host_that_works_ahead_both_sides_are_found(layer_s: float) -> None:
    planted = Efficiency(0.6, 0.9, layer_s, "", host_ahead=True)
    found = fit(observed(planted, COSTS), ASSUMED["training"])
    assert found.host_ahead
    for cost in COSTS:
        assert cost.seconds(found) == pytest.approx(cost.seconds(planted), rel=0.03)


def test_a_host_that_works_ahead_counts_only_where_it_falls_behind() -> None:
    each = Efficiency(0.5, 0.5, 1e-3, "", host_ahead=True)
    assert Cost(1.0, 0.5, layers=1000).seconds(each) == 3.0
    assert Cost(1.0, 0.5, 0.25, layers=5000).seconds(each) == 5.25
    assert Cost(1.0, 0.5, layers=1000).bound(each) == "products"
    assert Cost(1.0, 0.5, layers=5000).bound(each) == "small kernels and launches"


def test_noise_moves_them_no_further_than_itself() -> None:
    planted = Efficiency(0.6, 0.9, 40e-6, "")
    found = fit(observed(planted, COSTS, noise=0.05), ASSUMED["generation"])
    assert found.products == pytest.approx(0.6, rel=0.15)
    assert all(cost.seconds(found) == pytest.approx(cost.seconds(planted), rel=0.08) for cost in COSTS)


def test_nothing_is_faster_than_the_device() -> None:
    found = fit(
        [Observation("training", cost, 0.5 * (cost.products + cost.memory), "broken clock") for cost in COSTS],
        ASSUMED["training"],
    )
    assert found.products <= 1
    assert found.memory <= 1
    assert found.layer_s >= 0


def test_one_run_is_met_and_the_rest_stays_as_assumed() -> None:
    cost = Cost(products=1.0, memory=0.2, layers=100)
    found = fit([Observation("training", cost, 2.5, "one")], ASSUMED["training"])
    assert cost.seconds(found) == pytest.approx(2.5, rel=0.02)


def test_nothing_measured_is_said() -> None:
    assert fit([], ASSUMED["training"]) is ASSUMED["training"]
    assert "assumed" in ASSUMED["training"].how


# ── saved results ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_is_saved_for_the_h200_is_met() -> None:
    rates, runs = rates_of(H200), read_observations(H200, results_folder())
    assert {"generate-w1", "generate-w2", "generate-w3", "n-sampling-n1"} <= {run.source for run in runs}
    for run in runs:
        if run.phase == "generation":
            assert run.cost.seconds(rates.generation) == pytest.approx(run.seconds, rel=0.25)


def test_a_device_without_results_takes_those_of_the_nearest_and_says_so(tmp_path: Path) -> None:
    assert "measured on h200" in rates_of(DEVICES["h100"]).generation.how
    assert "assumed" in rates_of(DEVICES["h100"], tmp_path).generation.how
    assert rates_of(DEVICES["h100"]).bandwidth == DEVICES["h100"].bandwidth


def test_a_saved_training_bench_gives_the_training_efficiency(tmp_path: Path) -> None:
    settings = {**TRAINING.settings, "sequences": 32, "tokens": 512}
    parts = {"data": 0.001, "forward": 0.04, "backward": 0.08, "optimizer": 0.006, "other": 0.0}
    saved = {
        "case": "trainer",
        "identity": {"config": settings},
        "results": [{"name": "step", "parts": parts, "bound": {"why": ""}}],
    }
    (tmp_path / "h200").mkdir()
    (tmp_path / "h200" / "trainer-t1.json").write_text(json.dumps(saved))
    rates = rates_of(H200, tmp_path)
    assert "trainer-t1" in rates.training.how
    (passes, optimizer) = read_observations(H200, tmp_path)
    assert (passes.seconds, optimizer.seconds) == (pytest.approx(0.121), 0.006)
    assert passes.cost.seconds(rates.training) == pytest.approx(0.121, rel=0.05)
    assert optimizer.cost.seconds(rates.optimizer) == pytest.approx(0.006, rel=0.05)
    settings["replay"] = "run-001"  # whose sizes the document does not have
    (tmp_path / "h200" / "trainer-t1.json").write_text(json.dumps(saved))
    assert read_observations(H200, tmp_path) == []


def test_of_a_cpu_only_results_in_the_same_dtype_count() -> None:
    """Matrix units of one processor reach a third of their bfloat16 rate, and another's float32 nearly all of its own."""
    wide, half = (read_observations(CPU, results_folder(), dtype) for dtype in ("float32", "bfloat16"))
    assert {run.source for run in wide} == {"generate-c1", "trainer"}
    assert {run.source for run in half} == {"generate-c1", "plan", "trainer"}
    assert rates_of(CPU, dtype="float32").training.products > 1.5 * rates_of(CPU, dtype="bfloat16").training.products


def test_other_documents_are_left_alone(tmp_path: Path) -> None:
    shutil.copytree(results_folder() / "cpu", tmp_path / "cpu")
    (tmp_path / "cpu" / "other.json").write_text('{"case": "serialize", "results": []}')
    assert all(run.source != "other" for run in read_observations(CPU, tmp_path))


# ── costs ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

TRAINING = training("half a billion", "random:qwen2.5-0.5b", 8, 512)


def test_no_step_is_planned_faster_than_the_roofline() -> None:
    setup = point_setup(generation("g", "random:qwen2.5-0.5b", 64, 512, 2).as_json(), H200, 0)
    cost = network_cost(setup.model, setup.dtype)
    rates = rates_of(H200)
    for batch in (1, 64, 1024):
        load = Load(prompts=batch, prompt_tokens=511, n=1, new_tokens=2, max_num_seqs=batch)
        least = step_seconds(cost, load, Machine(H200.bandwidth, H200.flops, ""))
        planned = decode_cost(cost, 24, setup.model.shape.vocab_size, batch, 512, rates)
        assert planned.products + planned.memory >= 0.99 * least
        assert planned.seconds(rates.generation) > least


def test_rows_that_share_a_prompt_read_less_of_it() -> None:
    assert read_context(512, 128, 1) == 512 + 64
    assert 512 / 8 + 64 < read_context(512, 128, 8) < 512 + 64


def test_computing_again_and_freezing_change_the_products_by_a_third() -> None:
    def flops(**trainer: Any) -> float:
        point = training("t", "random:qwen2.5-7b", 8, 512, **trainer)
        return training_flops(point_setup(point.as_json(), H200, 0), 4096, 0, 0)

    none = flops()
    assert flops(gradient_checkpointing="full") / none == pytest.approx(4 / 3)
    assert 1 < flops(gradient_checkpointing="selective") / none < 4 / 3
    assert flops(lora={"rank": 16}) / none == pytest.approx(2 / 3, rel=0.02)


@pytest.mark.parametrize(
    ("device", "dtype", "num_bytes"),
    [(H200, "bfloat16", 34), (H200, "float32", 32), (CPU, "float32", 36), (CPU, "bfloat16", 42)],
)
def test_an_update_moves_what_the_optimizer_reads_and_writes(device: Device, dtype: str, num_bytes: int) -> None:
    """Gradient 4 + 4, moments 8 + 8, then 4 + 4 of the float32 weights, or of masters and 2 of the weights; on a CPU 4 of the
    clipped gradient, and 4 of the masters that are copied."""
    point = training("t", "random:qwen2.5-0.5b", 8, 512)
    setup = point_setup({**point.as_json(), "settings": {**point.settings, "dtype": dtype}}, device, 0)
    rates = rates_of(device, dtype=dtype)
    moved = optimizer_cost(setup, rates).memory * rates.bandwidth
    assert moved == pytest.approx(num_bytes * setup.model.parameters)


def test_torchs_update_on_a_cpu_writes_the_clipped_gradient() -> None:
    weight, first, second = (torch.zeros(8) for _ in range(3))
    gradient, one = torch.ones(8), torch.tensor(1.0)
    rates = {"lr": 0.1, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
    torch._fused_adamw_([weight], [gradient], [first], [second], [], [one], **rates, grad_scale=2 * one, found_inf=0 * one)
    assert gradient.tolist() == [0.5] * 8


def test_offloaded_state_crosses_the_bus() -> None:
    here = point_setup(TRAINING.as_json(), H200, 0)
    away = here.changed(trainer={"offload_optimizer": True})
    rates = rates_of(H200)
    assert optimizer_cost(here, rates).link == 0
    cost = optimizer_cost(away, rates)
    assert cost.link + cost.memory == pytest.approx(12 * here.model.parameters / H200.host_bandwidth)


# ── validation ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_there_are_enough_points_of_every_kind() -> None:
    held = [point for point in CUDA_POINTS if not point.calibrates]
    assert len(held) >= 12
    assert {point.phase for point in held} == {"training", "generation"}
    text = [json.dumps(point.settings) for point in held]
    for word in ("0.5b", "7b", "selective", "full", "lora", "offload_optimizer", "int8"):
        assert any(word in settings for settings in text), word
    assert len([point for point in CPU_POINTS if not point.calibrates]) >= 6
    for points in (CUDA_POINTS, CPU_POINTS):
        assert len({point.name for point in points}) == len(points)


def test_every_point_can_be_planned() -> None:
    for point, device in [*((point, H200) for point in CUDA_POINTS), *((point, CPU) for point in CPU_POINTS)]:
        found = {"peaks": {"generation": 1}, "seconds": 1.0}
        if point.phase == "training":
            found = {"peaks": {"forward/backward": 1, "optimizer step": 1}, "forward_backward_s": 1.0, "optimizer_s": 1.0}
        rows = list(rows_of({**point.as_json(), "measured": found}, device, 0, rates_of(H200)))
        assert all(row.planned > 0 for row in rows)
        assert ("time" in [row.kind for row in rows]) != point.calibrates


def test_a_measurement_as_planned_is_within_and_one_far_off_is_a_miss() -> None:
    exact = Row("p", "generation", "memory", 100, 100, 0.08)
    assert exact.within
    assert not replace(exact, measured=110).within
    assert replace(exact, measured=80).error == pytest.approx(0.25)


def test_points_that_failed_are_shown_and_the_rest_still_counts() -> None:
    found = {"peaks": {"forward/backward": 10**10, "optimizer step": 8 * 10**9}, "forward_backward_s": 0.1, "optimizer_s": 0.01}
    calibrating = replace(TRAINING, name="calibrates", calibrates=True)
    measured = [(calibrating, found), (TRAINING, found), (replace(TRAINING, name="too large"), {"error": "out of memory"})]
    saved = document(H200, 0, {"flops": H200.flops, "bandwidth": H200.bandwidth}, measured, {"memory_bytes": 1})
    assert {row["point"] for row in saved["rows"]} == {"calibrates", "half a billion"}
    assert [point.get("error") for point in saved["points"]] == [None, None, "out of memory"]
    step = next(row for row in saved["rows"] if row["kind"] == "time")
    assert step["measured"] == pytest.approx(0.11)
    assert step["error"] == pytest.approx(0, abs=0.05)  # it is what the plan was calibrated by
    assert "calibration points" in saved["efficiency"]["training"]
    assert json.loads(json.dumps(again(saved)))["rows"] == saved["rows"]
    shown = render(saved)
    assert shown.table.row_count == len(saved["rows"]) + 1


@pytest.mark.slow
def test_a_point_is_measured_in_a_process_of_its_own_and_a_failure_is_an_answer() -> None:
    broken = Point("broken", "training", {**TRAINING.settings, "model": "random:none"})
    assert "no such shape" in probe(broken, "cpu")["stderr"]
    assert "not done after" in probe(replace(broken, limit_s=0.01), "cpu")["error"]


def test_both_phases_can_be_measured_here() -> None:
    device = torch.device("cpu")
    trained = measure_training(training("t", "builtin:tiny", 2, 16).settings, device)
    assert trained["peaks"].keys() == {"forward/backward", "optimizer step"}
    assert min(trained["forward_backward_s"], trained["optimizer_s"], *trained["peaks"].values()) > 0
    generated = measure_generation(generation("g", "builtin:tiny", 2, 4, 4).settings, device)
    assert generated["seconds"] > 0
    assert generated["peaks"]["generation"] > 0
