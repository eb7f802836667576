"""Rollouts beside the trainer, from recipe to trained model: it learns, keeps to the lag budget, and ends when it should."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from safetensors.torch import load_file, save_file
from support.crashing_runs import deeds, end_of, forked, newest_run, output, run_to_end, wait_until
from support.processes import LETTERS, assert_finite, num_rows, rows, write_letters

from redline.buffer.store.group_store import GroupState
from redline.buffer.store.index import GroupIndex, GroupRow
from redline.models.files.sources import model_folder
from redline.telemetry import RunFolder

STEPS = 50
GROUPS = 4
SMALL: dict[str, Any] = {"groups_per_step": 2, "group_size": 4, "max_new_tokens": 8, "evaluation": {"num_tasks": 0}}


def index_of(folder: RunFolder) -> list[GroupRow]:
    index = GroupIndex(folder.trajectories)
    found = list(index.rows())
    index.close()
    return found


def attempts(folder: RunFolder) -> dict[tuple[int, int], dict[str, Any]]:
    """By group and attempt."""
    paths = sorted(folder.trajectories.glob("segment-*.arrow"))
    table = pa.concat_tables(pa.ipc.open_file(path).read_all() for path in paths)
    return {(row["group"], row["attempt"]): row for row in table.to_pylist()}


def assert_ended_with(code: int, cwd: Path, *arguments: str) -> str:
    """What it printed."""
    found = run_to_end(cwd, "train", "letters.yaml", *arguments)
    assert found == code, output(cwd)
    return output(cwd)


# ── it learns ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Finished:
    max_lag: int
    folder: RunFolder


@pytest.fixture(scope="module", params=[1, *(pytest.param(lag, marks=pytest.mark.slow) for lag in (2, 4))])
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """One run to the end for each lag."""
    cwd = tmp_path_factory.mktemp("beside")
    write_letters(cwd, run={"steps": STEPS, "checkpoint_every": 20}, buffer={"max_lag": request.param})
    assert run_to_end(cwd, "train", "letters.yaml", is_profiled=False) == 0, output(cwd)
    return Finished(request.param, newest_run(cwd))


def test_the_reward_rises_from_chance(finished: Finished) -> None:
    rewards = [row["rollouts/reward_mean"] for row in rows(finished.folder.metrics) if row["rollouts/groups"]]
    before, after = rows(finished.folder.evaluations)
    assert np.mean(rewards[:5]) < 0.15
    assert np.mean(rewards[-5:]) > 0.4
    assert before["evaluation/reward_mean"] < 0.1
    assert after["evaluation/reward_mean"] > 0.4


def test_every_step_has_its_row_and_no_batch_is_over_the_lag_budget(finished: Finished) -> None:
    found = rows(finished.folder.metrics)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    for row in found:
        assert_finite(row)
    lags = [row["buffer/policy_lag_steps"] for row in found]
    assert max(lags) <= finished.max_lag
    assert max(lags) > 0, "nothing was sampled beside the trainer"
    for row in found:
        at_lag = {key: value for key, value in row.items() if key.startswith("buffer/groups_at_lag_")}
        assert sum(at_lag.values()) == GROUPS
        assert at_lag.keys() <= {f"buffer/groups_at_lag_{lag}" for lag in range(finished.max_lag + 1)}


@pytest.mark.slow  # shares of times, which a machine that is busy for a while changes
def test_the_engine_is_as_fast_as_its_own_time_says(finished: Finished) -> None:
    """It works for a part of every step; at its speeds, its tokens take no longer than there was, and not nearly nothing."""
    found = rows(finished.folder.metrics)
    needed_s = sum(row["engine/generated_tokens"] / row["engine/tokens_per_s"] for row in found if row["engine/tokens_per_s"])
    assert 0.1 < needed_s / sum(row["run/step_s"] for row in found) <= 1.05


def test_every_group_is_somewhere_and_was_trained_on_within_the_budget(finished: Finished) -> None:
    found = index_of(finished.folder)
    assert [row.index for row in found] == list(range(len(found)))
    trained = [row for row in found if row.state is GroupState.TRAINED]
    assert sorted(row.trained_version or 0 for row in trained) == sorted(list(range(STEPS)) * GROUPS)
    for row in trained:
        assert row.oldest_version is not None
        assert row.trained_version is not None
        assert 0 <= row.trained_version - row.oldest_version <= finished.max_lag
    assert len(trained) == len(found), "none is dropped, and none is under way at the end for nothing"


def test_both_sides_account_for_their_time_and_say_what_they_waited_for(finished: Finished) -> None:
    lanes = json.loads(finished.folder.ledger.read_text())["lanes"]
    assert {"main", "rollouts"} <= lanes.keys()
    for lane in lanes.values():
        assert sum(lane["rows"].values()) + lane["unaccounted_ns"] == lane["wall_ns"]
    for name in ("main", "rollouts"):
        working_ns = lanes[name]["wall_ns"] - lanes[name]["rows"].get("run.startup", 0)
        assert lanes[name]["unaccounted_ns"] < 0.3 * working_ns, name
    assert {"trainer.backward", "buffer.pack", "wait.for_rollouts", "wait.for_engine"} <= lanes["main"]["rows"].keys()
    assert {"engine.decode", "wait.for_weights"} <= lanes["rollouts"]["rows"].keys()
    assert {"rollouts.reward", "wait.for_completions"} <= lanes["rewards"]["rows"].keys()


def test_a_reward_that_raises_is_a_recorded_failure(finished: Finished) -> None:
    failures = [row["failure"] for row in attempts(finished.folder).values() if row["failure"] is not None]
    assert failures
    assert all("there is a q in it" in failure for failure in failures)
    assert sum(row["rollouts/failures"] for row in rows(finished.folder.metrics)) > 0


def test_every_wait_is_a_span_under_its_name_and_every_lane_adds_up(tmp_path: Path) -> None:
    """Trainer for data, rollouts for budget, engine for requests, anyone for weights."""
    write_letters(tmp_path, run={"steps": 30}, rollouts=dict(SMALL), buffer={"max_lag": 2, "depth": 2})
    rewrite(tmp_path, '        if "q"', '        time.sleep(0.001)\n        if "q"')
    assert run_to_end(tmp_path, "train", "letters.yaml", is_profiled=False) == 0, output(tmp_path)
    lanes = json.loads(newest_run(tmp_path).ledger.read_text())["lanes"]
    for name, lane in lanes.items():
        assert sum(lane["rows"].values()) + lane["unaccounted_ns"] == lane["wall_ns"], name
        assert lane["unaccounted_ns"] < 0.3 * lane["wall_ns"], name  # moments, of which a busy machine makes long ones
    waits = {name: {row for row in lane["rows"] if row.startswith("wait.")} for name, lane in lanes.items()}
    assert {"wait.for_rollouts", "wait.for_engine"} <= waits["main"]
    assert {"wait.for_budget", "wait.for_requests", "wait.for_weights"} <= waits["rollouts"]
    assert {"wait.for_completions"} <= waits["rewards"]


@pytest.mark.slow  # what the trainer waits for depends on how fast the machine is
def test_slow_rewards_get_workers_and_steps_become_shorter(tmp_path: Path) -> None:
    """Four attempts a step, each of which waits for 50 ms: one worker takes 200."""
    seconds: dict[int, float] = {}
    for most in (1, 4):
        cwd = tmp_path / f"{most}"
        cwd.mkdir()
        rollouts = SMALL | {"group_size": 2, "max_reward_workers": most}
        write_letters(cwd, run={"steps": 16}, rollouts=rollouts, buffer={"max_lag": 2})
        rewrite(cwd, '        if "q"', '        time.sleep(0.05)\n        if "q"')
        assert run_to_end(cwd, "train", "letters.yaml", is_profiled=False) == 0, output(cwd)
        found = rows(newest_run(cwd).metrics)
        seconds[most] = float(np.mean([row["run/step_s"] for row in found[10:]]))
        lanes = json.loads(newest_run(cwd).ledger.read_text())["lanes"]
        workers = [name for name in lanes if name.startswith("rewards") and "/" not in name]
        for name in workers:
            assert lanes[name]["rows"].keys() == {"rollouts.reward", "rollouts.advantages", "wait.for_completions"}
            assert sum(lanes[name]["rows"].values()) + lanes[name]["unaccounted_ns"] == lanes[name]["wall_ns"]
        assert len(workers) == max(row["buffer/reward_workers"] for row in found)
        if most == 1:
            assert "rollouts.max_reward_workers allows no more than 1" in output(cwd)
        else:
            assert [row["buffer/reward_workers"] for row in found[:2]] == [1, 1]
            assert found[-1]["buffer/reward_workers"] == 4
            assert "buffer: 1 → 4 workers for rewards, the trainer waited for" in output(cwd)
    assert seconds[1] > 0.15
    assert seconds[4] < 0.8 * seconds[1]  # a half of it on a machine that does nothing else


# ── lengths ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_of_long_answers(cwd: Path, **buffer: Any) -> RunFolder:
    """A policy that never changes, whose answers have any length up to 300 tokens."""
    cwd.mkdir()
    write_letters(
        cwd,
        run={"steps": 12, "checkpoint_every": 0},
        rollouts={"groups_per_step": 4, "group_size": 2, "max_new_tokens": 300, "evaluation": {"num_tasks": 0}},
        trainer={"learning_rate": 1e-30},
        buffer=buffer,
    )
    (cwd / "letters.py").write_text(LETTERS.replace('raise ValueError("there is a q in it")', "pass"))
    assert run_to_end(cwd, "train", "letters.yaml", is_profiled=False) == 0, output(cwd)
    return newest_run(cwd)


def trained_lengths(folder: RunFolder) -> dict[tuple[int, int], int]:
    """Tokens that the policy chose in each attempt that was trained on."""
    return {key: sum(row["loss_mask"]) for key, row in attempts(folder).items() if row["version"] >= 0}


@pytest.mark.slow
def test_the_lengths_trained_on_are_the_same_at_every_lag_unless_late_groups_are_dropped(tmp_path: Path) -> None:
    truth = trained_lengths(run_of_long_answers(tmp_path / "0"))
    assert np.std(list(truth.values())) > 50, "long and short ones"
    for lag in (1, 2, 4):
        folder = run_of_long_answers(tmp_path / f"{lag}", max_lag=lag)
        found = trained_lengths(folder)
        assert found.keys() == truth.keys(), "the same attempts, each once"
        same = sum(found[key] == truth[key] for key in truth)
        assert same >= 0.95 * len(truth), "the engine's last bits depend on what it computes together"
        assert rows(folder.metrics)[-1]["buffer/dropped_overdue"] == rows(folder.metrics)[-1]["buffer/dropped_stale"] == 0
        lanes = json.loads(folder.ledger.read_text())["lanes"]
        assert sum(lanes["main"]["rows"].values()) + lanes["main"]["unaccounted_ns"] == lanes["main"]["wall_ns"]
    folder = run_of_long_answers(tmp_path / "drop", max_lag=1, late_groups="drop")
    dropping = rows(folder.metrics)
    late = [row for row in dropping if row["buffer/dropped_late"]]
    assert late, "dropping is what it was asked for"
    assert all(0 < row["buffer/dropped_tokens_mean"] <= 300 for row in late)
    by_reason = dropping[-1]["buffer/dropped_stale"] + dropping[-1]["buffer/dropped_overdue"]
    assert sum(row["buffer/dropped_late"] for row in late) == by_reason
    assert trained_lengths(folder).keys() != truth.keys()


# ── evaluations ────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_without_learning(cwd: Path, **buffer: Any) -> RunFolder:
    cwd.mkdir()
    write_letters(
        cwd,
        run={"steps": 8},
        rollouts=SMALL | {"evaluation": {"num_tasks": 2, "every": 1}},
        trainer={"learning_rate": 1e-30},
        buffer=buffer,
    )
    assert_ended_with(0, cwd)
    return newest_run(cwd)


@pytest.mark.slow
def test_evaluations_and_updates_leave_groups_under_way_as_they_were(tmp_path: Path) -> None:
    """With a policy that never changes, an attempt must be the same whenever it is made and whatever interrupts it."""
    alone = attempts(run_without_learning(tmp_path / "alone"))
    folder = run_without_learning(tmp_path / "beside", max_lag=2, depth=3)
    beside = attempts(folder)
    assert any(row["oldest_version"] < row["newest_version"] for row in beside.values()), "no group was interrupted"
    for key in alone.keys() & beside.keys():
        assert beside[key]["token_ids"] == alone[key]["token_ids"]
        np.testing.assert_allclose(beside[key]["logprobs"], alone[key]["logprobs"], atol=1e-4)
    assert len(alone.keys() & beside.keys()) > 4 * 8
    evaluations = rows(folder.evaluations)
    assert [row["step"] for row in evaluations] == list(range(9))
    assert len({json.dumps(row["evaluation/samples"]) for row in evaluations}) == 1
    [process] = deeds(tmp_path / "beside")
    assert process.attempted == list(range(len(process.attempted))), "one was begun twice"


@pytest.mark.slow
def test_an_evaluation_longer_than_the_limit_of_a_group_costs_no_group_under_way(tmp_path: Path) -> None:
    prepare(
        tmp_path,
        steps=3,
        rollouts=SMALL | {"evaluation": {"num_tasks": 2, "every": 1}},
        buffer={"max_lag": 2, "group_timeout_s": 4.0},
    )
    slow = '        if "held" in task.id:\n            time.sleep(2.5)\n        if "q"'
    rewrite(tmp_path, '        if "q"', slow)
    assert_ended_with(0, tmp_path)
    folder = newest_run(tmp_path)
    assert all(row["evaluation/seconds"] > 4.0 for row in rows(folder.evaluations))
    *_, last = rows(folder.metrics)
    assert last["buffer/dropped_timed_out"] == 0


# ── it ends ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def prepare(cwd: Path, *, steps: int = 12, learning_rate: float = 3e-3, **sections: dict[str, Any]) -> None:
    write_letters(
        cwd,
        run={"steps": steps, "checkpoint_every": 5},
        trainer={"learning_rate": learning_rate},
        **{"rollouts": dict(SMALL), "buffer": {"max_lag": 2}} | sections,
    )


def rewrite(cwd: Path, old: str, new: str) -> None:
    """Change the task."""
    assert old in LETTERS
    (cwd / "letters.py").write_text("import os, sys, time\n" + LETTERS.replace(old, new))


def interrupt(cwd: Path, moment: Callable[[], bool], *, times: int = 1) -> int:
    """Ctrl-C at the moment; how many steps there were in the end."""
    with forked(cwd, "train", "letters.yaml") as process:
        wait_until(moment, process)
        for _ in range(times):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGINT)
            wait_until(lambda: "stopping after" in output(cwd), process)
        assert end_of(process, cwd) == 130, output(cwd)
    found = rows(newest_run(cwd).metrics)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    return len(found)


def assert_resumes(cwd: Path, steps: int) -> None:
    assert_ended_with(0, cwd, "--resume", f"run.steps={steps}")
    folder = newest_run(cwd)
    assert [row["step"] for row in rows(folder.metrics)] == list(range(1, steps + 1))
    trained = [row.trained_version or 0 for row in index_of(folder) if row.state is GroupState.TRAINED]
    assert sorted(trained) == sorted(list(range(steps)) * 2)
    assert all(lag <= 2 for process in deeds(cwd) for lag in process.lags)


def test_an_interrupt_ends_after_the_step_and_leaves_a_run_to_resume(tmp_path: Path) -> None:
    prepare(tmp_path, steps=10_000)
    stopped_at = interrupt(tmp_path, lambda: any(num_rows(path) >= 3 for path in tmp_path.glob("runs/*/metrics.jsonl")))
    assert 3 <= stopped_at < 10_000
    assert max(newest_run(tmp_path).checkpoints.iterdir()).name == f"step-{stopped_at:06d}"
    assert_resumes(tmp_path, stopped_at + 5)


def test_a_group_whose_reward_never_comes_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    prepare(tmp_path, steps=6, buffer={"max_lag": 2, "group_timeout_s": 3.0})
    rewrite(tmp_path, '        if "q"', '        if task.id == "letters/2":\n            time.sleep(1000)\n        if "q"')
    assert_ended_with(0, tmp_path)
    folder = newest_run(tmp_path)
    fate = {row.index: (row.state, row.reason) for row in index_of(folder)}
    assert fate[2] == (GroupState.DROPPED, "timed_out")
    *_, last = rows(folder.metrics)
    assert last["step"] == 6
    assert last["buffer/dropped_timed_out"] == sum(reason == "timed_out" for _, reason in fate.values())


def test_a_run_whose_every_reward_hangs_stops_with_the_reason_after_three_limits(tmp_path: Path) -> None:
    prepare(tmp_path, rollouts=SMALL | {"reward_timeout_s": 1.0})
    hang = """        open("calls.txt", "a").write("a call\\n")\n        time.sleep(1000)\n        if "q\""""
    rewrite(tmp_path, '        if "q"', hang)
    said = assert_ended_with(2, tmp_path)
    assert "every attempt of step 1, the first of this process, failed (" in said
    assert "`score` was not called: the 3 calls before did not return within 1 s" in said
    assert (tmp_path / "calls.txt").read_text() == "a call\n" * 3


@pytest.mark.slow
def test_a_second_interrupt_ends_at_once_and_leaves_a_run_to_resume(tmp_path: Path) -> None:
    prepare(tmp_path, steps=20)
    hang = '        if task.id == "letters/10":\n            open("hangs", "w").close(), time.sleep(1000)\n'
    rewrite(tmp_path, '        if "q"', hang + '        if "q"')
    assert interrupt(tmp_path, (tmp_path / "hangs").exists, times=2) <= 5
    rewrite(tmp_path, '        if "q"', '        if "q"')
    assert_resumes(tmp_path, 20)


def test_a_model_of_nan_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    shutil.copytree(model_folder("builtin:tiny"), tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    for tensor in weights.values():
        tensor.fill_(float("nan"))
    save_file(weights, tmp_path / "broken" / "model.safetensors", {"format": "pt"})
    prepare(tmp_path, model={"path": "broken"})
    assert "error: the model gave NaN" in assert_ended_with(2, tmp_path)


@pytest.mark.slow
def test_a_model_that_bursts_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    write_letters(tmp_path, run={"steps": 100}, trainer={"learning_rate": 1e30}, buffer={"max_lag": 2})
    printed = assert_ended_with(2, tmp_path)
    assert "error: " in printed
    assert "NaN" in printed or "not finite" in printed


@pytest.mark.slow
def test_a_reward_that_leaves_the_process_ends_the_run_with_the_reason(tmp_path: Path) -> None:
    prepare(tmp_path)
    rewrite(tmp_path, '        if "q" in text:', "        if True:\n            sys.exit(5)")
    printed = assert_ended_with(2, tmp_path)
    assert "error: every attempt of step 1, the first of this process, failed" in printed
    assert "SystemExit: 5, at letters.py:" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deed", "reason"),
    [("raise ValueError('no 9')", "ValueError: no 9"), ("sys.exit(5)", "SystemExit: 5")],
    ids=["raises", "leaves the process"],
)
def test_a_task_that_does_not_come_is_a_recorded_failure_and_the_run_goes_on(deed: str, reason: str, tmp_path: Path) -> None:
    prepare(tmp_path)
    rewrite(tmp_path, "        return Task(f", f"        if index == 9: {deed}\n        return Task(f")
    assert_ended_with(0, tmp_path)
    failures = {group: row["failure"] or "" for (group, _), row in attempts(newest_run(tmp_path)).items()}
    assert f"task: {reason}, at letters.py:" in failures.pop(9)
    assert not any(failure.startswith("task: ") for failure in failures.values())
    assert [row["step"] for row in rows(newest_run(tmp_path).metrics)] == list(range(1, 13))


# ── with other keys ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
@pytest.mark.parametrize(
    "sections",
    [
        {"buffer": {"max_lag": 2, "max_bytes": 0}},
        {"buffer": {"max_lag": 1, "max_reuses": 1}},
        {"buffer": {"max_lag": 4, "depth": 1, "order": "signal_first"}},
        {"rollouts": SMALL | {"max_extra_rounds": 2}, "buffer": {"max_lag": 2}},
    ],
    ids=["nothing kept", "replays", "shallow", "silent replaced"],
)
def test_other_buffers_keep_to_the_budget_too_and_resume(sections: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    prepare(tmp_path, **sections)
    assert_ended_with(0, tmp_path)
    assert_ended_with(0, tmp_path, "run.steps=15", "--resume")
    found = rows(newest_run(tmp_path).metrics)
    assert [row["step"] for row in found] == list(range(1, 16))
    assert all(row["buffer/policy_lag_steps"] <= sections["buffer"]["max_lag"] for row in found)
