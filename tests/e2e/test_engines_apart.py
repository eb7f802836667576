"""Engines in processes of their own take the same steps as one in the trainer's, outlive kills, and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from support.processes import (
    digest,
    num_rows,
    only_run,
    redline,
    rows,
    started,
    succeed,
    wait_for_run,
    wait_until,
    write_letters,
)

from redline.telemetry import RunFolder

STEPS = 8
SMALL: dict[str, Any] = {"groups_per_step": 2, "group_size": 4, "max_new_tokens": 8, "evaluation": {"num_tasks": 4}}


def write_recipe(cwd: Path, engines: int, max_lag: int = 0, steps: int = STEPS) -> None:
    cwd.mkdir(exist_ok=True)
    write_letters(
        cwd,
        run={"steps": steps, "checkpoint_every": 4, "device": "cpu"},
        rollouts=SMALL,
        buffer={"max_lag": max_lag},
        placement={"engines": engines},
    )


def trained(cwd: Path, engines: int, max_lag: int = 0) -> RunFolder:
    """Train to the end, in a folder of its own."""
    write_recipe(cwd, engines, max_lag)
    before = shared_memory()
    succeed("train", "letters.yaml", cwd=cwd)
    assert shared_memory() <= before
    return only_run(cwd)


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("*") if "redline" in path.name or "torch" in path.name}


def losses(folder: RunFolder) -> list[tuple[int, float, float]]:
    return [(row["step"], row["trainer/loss"], row["rollouts/reward_mean"]) for row in rows(folder.metrics)]


def weights(folder: RunFolder) -> list[str]:
    return [digest(path) for path in sorted(folder.model.glob("*.safetensors"))]


def engines_of(process: psutil.Process) -> list[psutil.Process]:
    """The processes of engines that a run has started and that live."""
    return [child for child in process.children(recursive=True) if _is_engine(child)]


def _is_engine(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and any("engine_worker" in part for part in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def assert_all_gone(processes: Sequence[psutil.Process], within_s: float = 10.0) -> None:
    _, alive = psutil.wait_procs(processes, within_s)
    assert not alive, f"left behind: {alive}"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("one"), 0)


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return trained(tmp_path_factory.mktemp("apart"), 1)


def assert_same_run(found: RunFolder, expected: RunFolder) -> None:
    assert losses(found) == losses(expected)
    assert [row["evaluation/reward_mean"] for row in rows(found.evaluations)] == [
        row["evaluation/reward_mean"] for row in rows(expected.evaluations)
    ]
    assert weights(found) == weights(expected)


def assert_same_tokens(found: RunFolder, expected: RunFolder) -> None:
    """The same rewards, and losses that differ by no more than the rounding of batches of another size."""
    assert [reward for *_, reward in losses(found)] == [reward for *_, reward in losses(expected)]
    assert [loss for _, loss, _ in losses(found)] == pytest.approx([loss for _, loss, _ in losses(expected)], abs=1e-6)


@pytest.mark.slow
def test_in_lockstep_an_engine_apart_takes_the_same_steps(one_process: RunFolder, apart: RunFolder) -> None:
    assert len(losses(apart)) == STEPS
    assert_same_run(apart, one_process)


@pytest.mark.slow
def test_ledger_and_trace_have_the_time_of_the_engine_s_process(apart: RunFolder) -> None:
    lanes = json.loads(apart.ledger.read_text())["lanes"]
    engines = {name: lane for name, lane in lanes.items() if name.startswith("engine-")}
    assert any("engine.decode" in lane["rows"] for lane in engines.values()), list(lanes)
    for name, lane in lanes.items():
        assert sum(lane["rows"].values()) + lane["unaccounted_ns"] == lane["wall_ns"]
        assert lane["unaccounted_ns"] < 0.02 * lane["wall_ns"], name
    events = json.loads(apart.trace.read_text())
    assert len({event["pid"] for event in events if event.get("name") == "engine.decode"}) == 1


@pytest.mark.slow
def test_weights_move_at_every_step_from_the_first_gradient_on_and_the_row_says_how_many_bytes(apart: RunFolder) -> None:
    first = next(at for at, row in enumerate(rows(apart.metrics)) if row["trainer/grad_norm"] > 0)
    moved = [row["weight_sync/bytes_moved"] for row in rows(apart.metrics)]
    assert not any(moved[:first]), "nothing had changed"
    assert all(moved[first:]), "the optimizer's momentum goes on changing them"


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["broadcast", "checkpoint_engine"])
def test_by_any_transport_the_steps_are_the_same(transport: str, one_process: RunFolder, tmp_path: Path) -> None:
    write_recipe(tmp_path, 1)
    succeed("train", "letters.yaml", f"placement.transport={transport}", cwd=tmp_path)
    assert_same_run(only_run(tmp_path), one_process)


@pytest.mark.slow
def test_two_engines_take_the_same_steps(one_process: RunFolder, tmp_path: Path) -> None:
    assert_same_tokens(trained(tmp_path / "two", 2), one_process)


@pytest.mark.slow
@pytest.mark.parametrize("engines", [1, 2])
def test_beside_the_trainer_no_batch_is_over_the_lag_budget(engines: int, tmp_path: Path) -> None:
    folder = trained(tmp_path / "lag", engines, max_lag=1)
    found = rows(folder.metrics)
    assert [row["step"] for row in found] == list(range(1, STEPS + 1))
    assert max(row["buffer/policy_lag_steps"] for row in found) <= 1


@pytest.mark.slow
def test_a_killed_engine_is_started_again_and_the_losses_stay_the_same(one_process: RunFolder, tmp_path: Path) -> None:
    write_recipe(tmp_path, 2)
    with started("train", "letters.yaml", cwd=tmp_path) as process:
        folder = wait_for_run(tmp_path, process)
        assert wait_until(lambda: num_rows(folder.metrics) >= 2, process)
        engines = engines_of(psutil.Process(process.pid))
        engines[0].kill()
        assert process.wait(120) == 0, (tmp_path / "stderr.txt").read_text()
    assert_same_tokens(folder, one_process)
    assert_all_gone(engines)


@pytest.mark.slow
def test_engines_that_die_more_often_than_they_may_end_the_run_with_who_died(tmp_path: Path) -> None:
    write_recipe(tmp_path, 1, steps=10_000)
    before = shared_memory()
    with started("train", "letters.yaml", "placement.max_restarts=1", cwd=tmp_path) as process:
        folder = wait_for_run(tmp_path, process)
        killed: set[int] = set()
        while len(killed) < 2:
            assert wait_until(lambda: bool(engines_of(psutil.Process(process.pid))) and num_rows(folder.metrics) > 1, process)
            for engine in engines_of(psutil.Process(process.pid)):
                if engine.pid not in killed:
                    killed.add(engine.pid)
                    engine.kill()
            time.sleep(0.2)
        assert process.wait(120) != 0
    said = (tmp_path / "stderr.txt").read_text()
    assert "engine 1" in said
    assert "Traceback" not in said
    assert shared_memory() <= before


@pytest.mark.slow
@pytest.mark.alone  # nobody else's memory is there
@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_ends_early_leaves_no_process_behind_and_goes_on(
    kind: signal.Signals, one_process: RunFolder, tmp_path: Path
) -> None:
    write_recipe(tmp_path, 1)
    before = shared_memory()
    with started("train", "letters.yaml", cwd=tmp_path) as process:
        folder = wait_for_run(tmp_path, process)
        assert wait_until(lambda: num_rows(folder.metrics) >= 5, process)
        engines = engines_of(psutil.Process(process.pid))
        os.kill(process.pid, kind)
        process.wait(120)
    assert engines
    assert_all_gone(engines)
    assert shared_memory() <= before
    succeed("train", "letters.yaml", "--resume", cwd=tmp_path)
    for resumed, straight in zip(losses(folder), losses(one_process), strict=True):
        assert resumed == pytest.approx(
            straight, rel=1e-6
        )  # means of rewards that were read back from the store are of float32
    assert weights(folder) == weights(one_process)


def test_a_dry_run_prints_the_placement_and_starts_nothing(tmp_path: Path) -> None:
    write_recipe(tmp_path, 2)
    done = redline("train", "letters.yaml", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "engine: process 2, thread engine (cpu, 1 CPU thread); weights by cuda_ipc" in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["cuda_ipc", "broadcast", "checkpoint_engine"])
def test_an_adapter_alone_moves_and_the_losses_are_those_of_one_process(tmp_path: Path, transport: str) -> None:
    found = {}
    for engines in (0, 1):
        cwd = tmp_path / str(engines)
        write_recipe(cwd, engines)
        apart = [f"placement.transport={transport}"] if engines else []
        succeed("train", "letters.yaml", "trainer.lora.rank=4", *apart, cwd=cwd)
        found[engines] = only_run(cwd)
    assert losses(found[0]) == losses(found[1])
    adapter = load_file(found[1].path / "adapter" / "adapter_model.safetensors")
    moved = [row["weight_sync/bytes_moved"] for row in rows(found[1].metrics)]
    assert any(moved)
    assert all(count <= 2 * sum(tensor.nbytes for tensor in adapter.values()) for count in moved)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["cuda_ipc", "broadcast"])
def test_weights_that_did_not_change_do_not_move_and_the_losses_are_those_of_one_process(
    tmp_path: Path, transport: str
) -> None:
    """A step so small that float32 cannot tell: what is left to move is what was zero before, if anything."""
    found = {}
    for engines in (0, 1):
        cwd = tmp_path / str(engines)
        write_recipe(cwd, engines, steps=3)
        apart = [f"placement.transport={transport}"] if engines else []
        succeed("train", "letters.yaml", "trainer.learning_rate=1e-30", *apart, cwd=cwd)
        found[engines] = only_run(cwd)
    assert losses(found[0]) == losses(found[1])
    size = sum(tensor.nbytes for path in found[1].model.glob("*.safetensors") for tensor in load_file(path).values())
    moved = [row["weight_sync/bytes_moved"] for row in rows(found[1].metrics)]
    assert len(moved) == 3
    assert all(count < size / 2 for count in moved), moved
    assert all(row["weight_sync/pause_s"] > 0 for row in rows(found[1].metrics)), "it is a version all the same"
