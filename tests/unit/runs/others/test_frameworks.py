"""Figures of others under our names and in our units."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from support.other_logs import RECORDED, verl_rows, write_prime, write_verl, write_verl_console
from tensorboardX import SummaryWriter

from redline.runs.others import OtherRun, open_run
from redline.runs.others.framework import translate
from redline.runs.others.log import Log, Row
from redline.runs.others.trl import TRL
from redline.runs.others.verl import VERL

STATE, EVENTS, WANDB = (RECORDED / name for name in ("trainer_state.json", "events.out.tfevents.tiny", "run-tiny.wandb"))


@functools.cache
def opened(path: Path) -> OtherRun:
    run = open_run(path)
    assert isinstance(run, OtherRun)
    return run


def steps_of(run: OtherRun) -> list[dict]:
    return list(run.rows("metrics"))


# ── verl ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_step_of_verl_has_our_names_and_units(tmp_path: Path) -> None:
    first, *_ = steps_of(opened(write_verl(tmp_path / "tiny.jsonl")))
    wanted = {
        "step": 1,
        "run/step_s": 100.0,
        "rollouts/reward_mean": 0.22,
        "rollouts/completion_tokens_mean": 250.0,
        "rollouts/truncated_fraction": 0.05,
        "trainer/learning_rate": 1e-6,
        "trainer/recompute_s": 12.0,
        "trainer/imbalance": 1.1,
        "memory/peak_bytes": 60 * 2**30,
        "engine/tokens_per_s": 4000.0,
        "verl/perf/throughput": 50.0,
    }
    assert {name: first[name] for name in wanted} == pytest.approx(wanted)


def test_the_phases_of_a_step_of_verl_add_up_and_count_nothing_twice(tmp_path: Path) -> None:
    first, *_ = steps_of(opened(write_verl(tmp_path / "tiny.jsonl")))
    phases = {name: value for name, value in first.items() if name.startswith("timeline/")}
    assert phases == pytest.approx(
        {
            "timeline/generation_s": 30.0,
            "timeline/reward_s": 6.0,
            "timeline/training_s": 52.0,
            "timeline/data_s": 1.0,
            "timeline/weight_sync_s": 8.0,
            "timeline/unaccounted_s": 3.0,
        }
    )
    assert sum(phases.values()) == pytest.approx(first["run/step_s"])


def test_the_evaluation_before_the_first_step_is_no_step(tmp_path: Path) -> None:
    run = opened(write_verl(tmp_path / "tiny.jsonl"))
    assert [row["step"] for row in run.rows("evaluations")] == [0]
    assert [row["step"] for row in steps_of(run)] == list(range(1, 11))


def test_what_verl_prints_writes_and_puts_on_a_board_is_one_run(tmp_path: Path) -> None:
    with SummaryWriter(str(tmp_path / "board")) as writer:
        for step, row in verl_rows(10):
            for name, value in row.items():
                writer.add_scalar(name, value, step, walltime=0.0)
    written = steps_of(opened(write_verl(tmp_path / "tiny.jsonl")))
    printed = steps_of(opened(write_verl_console(tmp_path / "console.log")))
    board = steps_of(opened(tmp_path / "board"))
    assert printed == written
    for ours, theirs in zip(board, written, strict=True):
        assert {name: ours[name] for name in theirs} == pytest.approx(theirs, rel=1e-6)  # a board has floats of 32 bits


def test_rollouts_of_verl_beside_the_trainer_are_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    rows = [(step, row | {"fully_async/count/current_param_version": step}) for step, row in verl_rows(6)]
    path.write_text("".join(json.dumps({"step": step, "data": row}) + "\n" for step, row in rows))
    run = opened(path)
    assert steps_of(run)[0]["timeline/wait_for_rollouts_s"] == 30.0
    assert run.config["buffer"]["max_lag"] == 1


def test_rollouts_of_verl_that_get_weights_every_few_steps_are_waited_for_in_all_of_them() -> None:
    step = {"timing_s/step": 10.0, "timing_s/gen": 6.0, "timing_s/update_actor": 3.0}
    rows = tuple(Row(step | ({"timing_s/param_sync": 1.0} if index % 4 == 0 else {}), index) for index in range(1, 9))
    steps = translate(VERL, [Log(Path("x"), "JSON", rows)]).steps
    assert [row.get("timeline/wait_for_rollouts_s") for row in steps] == [6.0] * 8
    assert not any("timeline/generation_s" in row for row in steps)


# ── prime-rl ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_steps_of_trainer_and_orchestrator_are_told_apart(tmp_path: Path) -> None:
    run = opened(write_prime(tmp_path / "metrics.jsonl"))
    first, *_ = steps_of(run)
    wanted = {
        "step": 1,
        "run/step_s": 20.0,
        "run/time_s": 1020.0,
        "rollouts/reward_mean": 0.2,
        "rollouts/no_signal_fraction": 0.3,
        "rollouts/attempts": 64,
        "buffer/lag_mean": 1.5,
        "trainer/mfu": 0.35,
        "memory/peak_bytes": 40 * 2**30,
        "timeline/wait_for_rollouts_s": 8.0,
        "timeline/training_s": 9.0,
        "timeline/weight_sync_s": 1.5,
        "timeline/checkpoint_s": 1.0,
        "timeline_rollouts/wait_for_budget_s": 6.0,
        "timeline_rollouts/generation_s": 11.5,
    }
    assert {name: first[name] for name in wanted} == pytest.approx(wanted)
    assert list(run.rows("evaluations")) == [{"step": 10, "evaluation/reward_mean": 0.5}]


# ── TRL ────────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("path", [STATE, EVENTS, WANDB], ids=lambda path: path.suffix)
def test_every_log_of_a_run_of_TRL_says_the_same(path: Path) -> None:
    history = [row for row in json.loads(STATE.read_text())["log_history"] if "reward" in row]
    rows = steps_of(opened(path))
    assert [row["step"] for row in rows] == [row["step"] for row in history]
    for name, ours in (("reward", "rollouts/reward_mean"), ("step_time", "run/step_s"), ("grad_norm", "trainer/grad_norm")):
        assert [row[ours] for row in rows] == pytest.approx([row[name] for row in history], rel=1e-5)


@pytest.mark.parametrize("path", [STATE, EVENTS, WANDB], ids=lambda path: path.suffix)
def test_evaluations_of_TRL_are_evaluations(path: Path) -> None:
    wanted = [row["eval_reward"] for row in json.loads(STATE.read_text())["log_history"] if "eval_reward" in row]
    assert [row["evaluation/reward_mean"] for row in opened(path).rows("evaluations")] == pytest.approx(wanted, rel=1e-5)


def test_what_TRL_profiles_for_wandb_becomes_the_phases_of_a_step() -> None:
    for row in steps_of(opened(WANDB)):
        phases = {name: value for name, value in row.items() if name.startswith("timeline/")}
        assert phases["timeline/generation_s"] > 0
        assert phases["timeline/training_s"] > 0
        assert sum(phases.values()) == pytest.approx(row["run/step_s"])


def test_a_log_without_phases_says_so() -> None:
    run = opened(STATE)
    assert not any(name.startswith("timeline/") for row in steps_of(run) for name in row)
    assert run.not_told[0].startswith("The log of TRL does not say what the time of a step went to.")
    assert "report_to=wandb" in run.not_told[0]
    assert run.bound({}, None).headline == "The log of TRL does not say what the time of a step went to."


def test_settings_of_TRL_come_from_the_log() -> None:
    for path in (EVENTS, WANDB):
        config = opened(path).config
        assert config["rollouts"]["group_size"] == 4
        assert config["run"]["steps"] == 16
        assert config["trl"]["max_completion_length"] == 8


def test_a_row_for_several_steps_counts_as_several(tmp_path: Path) -> None:
    history = [{"step": step, "reward": 0.5, "step_time": 2.0, "frac_reward_zero_std": 0.0} for step in (10, 20, 30, 50)]
    state = tmp_path / "trainer_state.json"
    state.write_text(json.dumps({"log_history": history, "max_steps": 50}))
    assert [row["run/steps"] for row in steps_of(opened(state))] == [10, 10, 10, 20]


def test_a_step_that_was_logged_again_after_a_resume_counts_once(tmp_path: Path) -> None:
    path = write_verl(tmp_path / "tiny.jsonl", 4)
    with path.open("a") as file:
        for step, row in list(verl_rows(6))[3:]:
            file.write(json.dumps({"step": step, "data": row | {"critic/score/mean": 0.9}}) + "\n")
    rows = steps_of(opened(path))
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert [row["rollouts/reward_mean"] for row in rows[2:]] == [0.9] * 4


PREPARED, GENERATED, SCORED = (
    f"profiling/Time taken: GRPOTrainer.{name}" for name in ("_prepare_inputs", "vLLM.generate", "_calculate_rewards")
)


def micro_batch() -> list[Row]:
    """What TRL profiles of a micro-batch, with a row of the user's own in the middle."""
    return [Row({GENERATED: 6.0}), Row({"my_reward/format": 0.3}), Row({SCORED: 1.0}), Row({PREPARED: 8.0})]


def phases_of(rows: list[Row], **config: int) -> list[dict[str, float]]:
    found = translate(TRL, [Log(Path("x"), "W&B", tuple(rows), config)]).steps
    return [{name: row[name] for name in row if name.startswith("timeline/")} for row in found]


def trained(step: int, seconds: float = 10.0) -> Row:
    return Row({"train/global_step": float(step), "train/step_time": seconds, "train/reward": 0.5})


WANTED = {"generation": 6.0, "reward": 1.0, "other": 1.0, "training": 2.0, "unaccounted": 0.0}


def wanted(times: int = 1) -> dict[str, float]:
    return pytest.approx({f"timeline/{name}_s": seconds * times for name, seconds in WANTED.items()})


def test_rows_of_the_users_own_take_nothing_from_what_TRL_profiled() -> None:
    rows = [row for step in (1, 2, 3) for row in (*micro_batch(), trained(step))]
    assert phases_of(rows) == [wanted()] * 3


@pytest.mark.parametrize("accumulation", [1, 2])
def test_an_evaluation_of_TRL_between_two_rows_takes_only_its_own_time(accumulation: int) -> None:
    rows: list[Row] = []
    for step in range(1, 41):
        rows += micro_batch() * accumulation
        if step % 10 == 0:
            rows.append(trained(step, 10.0 * accumulation))
        if step % 5 == 0:
            rows += [*micro_batch(), Row({"train/global_step": float(step), "eval/reward": 0.5})]
    assert phases_of(rows, gradient_accumulation_steps=accumulation) == [wanted(accumulation)] * 4


@pytest.mark.parametrize(("inside", "seconds"), [(0.0, 150.0), (10.0, 150.0), (50.0, 150.0)], ids=["after", "saving in", "in"])
def test_a_test_of_verl_lies_in_the_step_or_after_it_as_the_version_has_it(inside: float, seconds: float) -> None:
    tested = {"timing_s/gen": 60.0, "timing_s/update_actor": 40.0, "timing_s/testing": 40.0, "timing_s/save_checkpoint": 10.0}
    row, *_ = translate(VERL, [Log(Path("x"), "JSON", (Row({**tested, "timing_s/step": 100.0 + inside}, 1),))]).steps
    assert row["run/step_s"] == seconds
    assert row["timeline/unaccounted_s"] == 0.0


def test_steps_and_figures_that_no_run_has_are_left_out() -> None:
    rows = (Row({"timing_s/step": 1.0, "timing_s/gen": 1.7e308}, 1), Row({"timing_s/step": 1.0}, 10**20))
    (row,) = translate(VERL, [Log(Path("x"), "JSON", rows)]).steps
    assert row == {"step": 1, "run/step_s": 1.0}


def test_times_below_zero_are_left_out() -> None:
    times = {"timing_s/step": -0.01, "timing_s/gen": -3.0, "timing_s/testing": -1.0, "timing_s/update_actor": 3.0}
    (row,) = translate(VERL, [Log(Path("x"), "JSON", (Row({**times, "critic/score/mean": -0.5}, 1),))]).steps
    assert {name: value for name, value in row.items() if not name.startswith("verl/")} == {
        "step": 1,
        "timeline/training_s": 3.0,
        "rollouts/reward_mean": -0.5,
    }


def test_steps_without_a_row_and_figures_in_quotes_are_named(tmp_path: Path) -> None:
    rows = [(step, {**row, "timing_s/gen": "30.0"}) for step, row in verl_rows(20) if 0 < step < 5 or step >= 15]
    path = tmp_path / "log.jsonl"
    path.write_text("".join(json.dumps({"step": step, "data": row}) + "\n" for step, row in rows))
    run = opened(path)
    assert run.damage == ("log.jsonl: 10 of its figures are written as text and left out.",)
    assert "10 steps have no row: each is taken to be like the next one that has." in run.not_told
    whole = opened(write_verl(tmp_path / "whole.jsonl", 20))
    assert not whole.damage
    assert not any("no row" in sentence for sentence in whole.not_told)
