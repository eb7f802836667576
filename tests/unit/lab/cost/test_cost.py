"""What a run costs, beside sums done by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from support.other_logs import write_prime, write_verl
from typer.testing import CliRunner

from redline.cli import app
from redline.errors import ConfigError
from redline.lab.cost.cost import Asked, Cost, amount, cost_of, duration
from redline.runs import Run
from redline.runs.others import open_run
from redline.telemetry import Ledger, write_json
from redline.telemetry.ledger import LaneLedger

PHASES = {"generation": 3.0, "training": 4.0, "weight_sync": 1.0, "reward": 1.5, "unaccounted": 0.5}
"""Seconds of a step of ten."""


def run_of(path: Path, rows: Iterable[dict[str, Any]], samples: Iterable[dict[str, Any]] = (), **config: Any) -> Run:
    """A folder with these logs."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"run": {"steps": 100, "device": "cpu"}, **config}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return Run.open(path)


def step(number: int, **more: Any) -> dict[str, Any]:
    phases = {f"timeline/{name}_s": seconds for name, seconds in PHASES.items()}
    return {"step": number, "run/step_s": 10.0, "run/time_s": 1000.0 + 10 * number, **phases, **more}


def rising(count: int = 36) -> list[dict[str, Any]]:
    return [step(number, **{"rollouts/reward_mean": 0.02 * number}) for number in range(1, count + 1)]


def costed(run: Run, **asked: Any) -> Cost:
    return cost_of(run, Asked(**asked))


def test_a_run_costs_its_device_hours(tmp_path: Path) -> None:
    found = costed(run_of(tmp_path / "run", [step(number) for number in range(1, 37)]), price=5.0, devices=2)
    assert found.money(found.seconds) == pytest.approx(360 / 3600 * 2 * 5.0)
    assert found.sentences[0] == "1.00 for 6 min in 36 steps (2 devices at 5 per device-hour)."


@pytest.mark.parametrize(("device", "count"), [("cuda", 4), ("cpu", 1)])
def test_ranks_of_torchrun_have_a_device_each(tmp_path: Path, device: str, count: int) -> None:
    run = run_of(tmp_path / "run", [step(number) for number in range(1, 37)], run={"steps": 36, "device": device})
    names = ["main", *(f"rank-{rank}-471{rank}/main" for rank in (1, 2, 3)), "engine-1-rank-7-99/main"]
    lanes = {name: LaneLedger(10, {"run.step": 10}, 0) for name in names}
    write_json(run.folder.ledger, Ledger(lanes).to_json())
    found = costed(run, price=10.0)
    assert found.devices.count == count
    assert ("read from the ledger" in found.sentences[0]) == (count > 1)


def test_in_lockstep_idle_is_what_is_neither_sampling_nor_training(tmp_path: Path) -> None:
    found = costed(run_of(tmp_path / "run", [step(number) for number in range(1, 37)]), price=10.0)
    assert found.idle is not None
    assert found.idle.low_s == found.idle.high_s == pytest.approx(36 * 2.0)
    assert "Devices stood still 20% of the time, which cost 0.2 " in found.sentences[1]


def test_a_model_that_scores_works_too(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [step(number) for number in range(1, 11)], rollouts={"reward_model": {"path": "judge"}})
    found = costed(run, price=1.0)
    assert found.idle is not None
    assert found.idle.low_s == pytest.approx(10 * 0.5)


def test_engines_on_gpus_of_their_own_stand_still_while_the_trainer_works(tmp_path: Path) -> None:
    config = {"run": {"steps": 36, "device": "cuda"}, "placement": {"engines": 3, "trainers": 1}}
    found = costed(run_of(tmp_path / "run", [step(number) for number in range(1, 37)], **config), price=1.0)
    assert (found.devices.count, found.devices.engines) == (4, 3)
    assert found.idle is not None
    assert found.idle.low_s == pytest.approx(36 * (1 * (10 - 5) + 3 * (10 - 4)))


def test_beside_the_trainer_on_one_device_idle_is_a_range(tmp_path: Path) -> None:
    beside = {"timeline/generation_s": 0.0, "timeline_rollouts/generation_s": 3.5, "timeline/training_s": 4.0}
    rows = [step(number, **beside) for number in range(1, 11)]
    found = costed(run_of(tmp_path / "run", rows, buffer={"max_lag": 1}), price=3.6)
    assert found.idle is not None
    assert (found.idle.low_s, found.idle.high_s) == (pytest.approx(10 * (10 - 5 - 3.5)), pytest.approx(10 * (10 - 5)))
    assert "15% to 50% of the time" in found.sentences[1]


def test_samples_of_the_gpu_say_more_than_phases(tmp_path: Path) -> None:
    samples = [{"time": 1000.0 + second, "gpu/0/utilization_percent": 90 if second % 2 else 50} for second in range(361)]
    config = {"run": {"steps": 36, "device": "cuda"}}
    found = costed(run_of(tmp_path / "run", [step(number) for number in range(1, 37)], samples, **config), price=1.0)
    assert found.idle is not None
    assert found.idle.low_s == pytest.approx(0.3 * 360, rel=0.01)
    assert "no kernel ran" in found.idle.source


def test_samples_of_one_gpu_say_nothing_of_two(tmp_path: Path) -> None:
    samples = [{"time": 1000.0 + second, "gpu/0/utilization_percent": 90} for second in range(361)]
    found = costed(run_of(tmp_path / "run", [step(number) for number in range(1, 37)], samples), price=1.0, devices=2)
    assert found.idle is not None
    assert "phases" in found.idle.source


def test_time_and_money_to_a_target_follow_from_the_curve(tmp_path: Path) -> None:
    found = costed(run_of(tmp_path / "run", rising()), price=2.0, devices=4, target=0.9)
    assert found.target is not None
    assert found.target.found is not None
    assert found.target.found.step == pytest.approx(45, rel=0.03)
    assert found.target.seconds[1] == pytest.approx(450, rel=0.03)
    money = found.as_json()["target"]["money"]
    assert money[1] == pytest.approx(450 / 3600 * 4 * 2, rel=0.03)
    assert found.sentences[-1].startswith("A mean reward of 0.9 (sampled attempts) is expected after about 4")


def test_a_target_inside_the_recording_takes_the_time_that_was_measured(tmp_path: Path) -> None:
    rows = [row | {"run/step_s": 1.0 if row["step"] <= 10 else 10.0} for row in rising()]
    found = costed(run_of(tmp_path / "run", rows), target=0.4)
    assert found.target is not None
    assert found.target.seconds[1] == pytest.approx(10 + 10 * 10, rel=0.06)
    assert " was reached after about 20 steps" in found.sentences[-1]
    assert "per device-hour" not in " ".join(found.sentences)


def test_a_flat_curve_is_not_reached_at_this_rate_and_nothing_is_claimed_beyond(tmp_path: Path) -> None:
    rows = [row | {"rollouts/reward_mean": 0.3 + 0.01 * (row["step"] % 3)} for row in rising()]
    found = costed(run_of(tmp_path / "run", rows), price=1.0, target=0.9)
    assert "is not reached at this rate: the curve is flat at 0.3" in found.sentences[-1]
    assert "Beyond step 72, 2 times what was recorded, nothing is claimed." in found.sentences[-1]
    assert found.as_json()["target"]["money"] == [None, None, None]


def test_a_target_of_the_recipe_needs_no_flag_and_held_out_tasks_come_first(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", rising(), rollouts={"evaluation": {"stop_at": 0.5}})
    rows = [{"step": 4 * number, "evaluation/reward_mean": 0.05 * number} for number in range(10)]
    (run.path / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = costed(run, price=1.0)
    assert found.target is not None
    assert (found.target.reward, found.target.of) == (0.5, "held-out tasks")
    assert found.target.found is not None
    assert found.target.found.step == pytest.approx(40, rel=0.05)


def test_too_few_points_are_said_to_be_too_few(tmp_path: Path) -> None:
    found = costed(run_of(tmp_path / "run", rising(5)), target=0.9)
    assert "too few points to tell, at least 8 are needed" in found.sentences[-1]


def test_a_run_without_times_costs_nothing_that_is_known(tmp_path: Path) -> None:
    found = costed(run_of(tmp_path / "run", [{"step": 1, "trainer/loss": 1.0}]), price=1.0)
    assert found.sentences[0] == "What 1 steps cost cannot be told: they do not say how long they took."
    assert "cannot be told" in found.sentences[1]
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))["money"] is None


def test_steps_that_do_not_say_how_long_they_took_are_neither_free_nor_idle(tmp_path: Path) -> None:
    rows = rising()
    for row in rows[20:26]:
        row["run/step_s"] = None
    whole, some = (
        costed(run_of(tmp_path / name, each), price=1.0, target=0.9) for name, each in (("a", rising()), ("b", rows))
    )
    assert some.sentences[1] == "6 of these steps do not say how long they took: they are not included."
    assert whole.idle is not None
    assert some.idle is not None
    assert some.idle.low_s / some.seconds == pytest.approx(whole.idle.low_s / whole.seconds)
    assert some.target is not None
    assert whole.target is not None
    assert some.target.seconds[1] == pytest.approx(whole.target.seconds[1] - 60)


def test_a_log_of_verl_has_idle_time_and_a_curve(tmp_path: Path) -> None:
    found = cost_of(open_run(write_verl(tmp_path / "tiny.jsonl", 20)), Asked(price=4.0, devices=8, target=0.7))
    assert found.money(found.seconds) == pytest.approx(20 * 100 / 3600 * 8 * 4)
    assert found.idle is not None
    assert found.idle.low_s == pytest.approx(8 * 20 * (100 - 30 - 52 - 8))
    assert found.target is not None
    assert found.target.found is not None
    assert found.target.found.step == pytest.approx(25, rel=0.03)


def test_trainer_and_engines_of_prime_rl_never_share_a_device(tmp_path: Path) -> None:
    run = open_run(write_prime(tmp_path / "metrics.jsonl", 12))
    unknown = cost_of(run, Asked(price=1.0))
    assert (unknown.devices.count, unknown.devices.engines) == (2, None)
    assert unknown.idle is not None
    trainer, engine = 20 - 9 - 1.5, 20 - 11.5
    assert (unknown.idle.low_s, unknown.idle.high_s) == (pytest.approx(12 * 2 * engine), pytest.approx(12 * 2 * trainer))


def test_rows_that_stand_for_several_steps_are_paid_for_as_several(tmp_path: Path) -> None:
    history = [{"step": 10 * n, "reward": 0.01 * n, "step_time": 2.0, "frac_reward_zero_std": 0.0} for n in range(1, 11)]
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": history}))
    found = cost_of(open_run(state), Asked(price=1.0, target=0.05))
    assert found.seconds == pytest.approx(200)
    assert found.target is not None
    assert found.target.seconds[1] == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("asked", [{"price": -1.0}, {"price": float("inf")}, {"devices": 0}, {"target": float("nan")}])
def test_a_price_that_is_none_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="--"):
        Asked(**asked)


def test_the_doctor_prints_the_cost_where_somebody_gives_a_price(tmp_path: Path) -> None:
    path = str(write_prime(tmp_path / "metrics.jsonl", 12))
    plain = CliRunner().invoke(app, ["doctor", path]).stdout
    priced = CliRunner().invoke(app, ["doctor", path, "--price", "2", "--devices", "4"]).stdout
    assert priced.startswith(plain.rstrip("\n"))
    assert "0.533 for 4 min in 12 steps (4 devices at 2 per device-hour)." in priced
    document = json.loads(CliRunner().invoke(app, ["doctor", path, "--json", "--price", "2"]).stdout)
    assert document["cost"]["price_per_device_hour"] == 2.0


def test_numbers_are_written_for_people() -> None:
    assert [amount(value) for value in (0, 0.01234, 1.5, 12345.678)] == ["0.00", "0.0123", "1.50", "12,345.68"]
    assert [duration(value) for value in (3.14159, 600, 86400)] == ["3.14 s", "10 min", "24 h"]


def used(moment: float, *percents: float) -> dict[str, float]:
    return {"time": moment, **{f"gpu/{index}/utilization_percent": value for index, value in enumerate(percents)}}


def test_the_sample_before_a_stop_does_not_stand_for_all_of_it(tmp_path: Path) -> None:
    rows = [step(number, **({"run/time_s": 41000.0 + 10 * number} if number > 10 else {})) for number in range(1, 21)]
    samples = [used(time, 0.0 if time == 1100 else 100.0) for start in (1000, 41100) for time in range(start, start + 101)]
    found = costed(run_of(tmp_path / "run", rows, samples), price=1.0)
    assert found.idle is not None
    assert found.idle.high_s == pytest.approx(200 * 3 / 204)


def test_of_more_gpus_than_are_paid_for_the_busiest_count(tmp_path: Path) -> None:
    samples = [used(1000.0 + moment, 5.0, 80.0, 0.0, 60.0) for moment in range(0, 101, 5)]
    found = costed(run_of(tmp_path / "run", [step(number) for number in range(1, 11)], samples), price=1.0, devices=2)
    assert found.idle is not None
    assert found.idle.low_s == pytest.approx(0.3 * 100 * 2)
    assert "the 2 busiest GPUs of 4" in found.idle.source


def test_steps_before_the_first_of_a_log_are_named_and_neither_free_nor_paid(tmp_path: Path) -> None:
    rows = [step(number, **{"rollouts/reward_mean": number / 2000}) for number in range(501, 1001)]
    found = costed(run_of(tmp_path / "run", rows), price=3.6, devices=1, target=0.4)
    assert (found.steps, found.missing) == (500, 500)
    assert found.sentences[1].startswith("The log begins at step 501: ")
    assert found.target is not None
    assert found.target.seconds[1] == pytest.approx(300 * 10.0, rel=0.02)
    assert "From step 501, the first of the log, on that takes" in found.sentences[-1]


def test_steps_that_were_delayed_on_purpose_say_nothing_of_those_to_come(tmp_path: Path) -> None:
    slow = {"run/step_s": 90.0, "delays/plan": "x"}
    rows = [{**row, **(slow if row["step"] > 24 else {})} for row in rising(36)]
    plain, delayed = (costed(run_of(tmp_path / name, given), target=0.8) for name, given in (("a", rising(36)), ("b", rows)))
    assert plain.target is not None
    assert delayed.target is not None
    assert plain.target.seconds[1] is not None
    assert delayed.target.seconds[1] == pytest.approx(plain.target.seconds[1] + 12 * 80.0)


def test_a_step_that_no_float_holds_is_no_step(tmp_path: Path) -> None:
    found = costed(run_of(tmp_path / "run", [*rising(10), {"step": 10**400, "run/step_s": 1.0}]), price=1.0)
    assert found.steps == 10
