"""How runs end that do not come to their last step: what they leave, what they say, and how they go on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.crashing_runs import Unread, end_of, forked, output, run_to_end, wait_until
from support.processes import num_rows, only_run, rows, write_letters

from redline.models.files.sources import model_folder
from redline.runs.reader import RunReader
from redline.telemetry import RunFolder
from redline.telemetry.files.failure import read_failure
from redline.web.report import write_report

SMALL = {"groups_per_step": 2, "group_size": 4, "max_new_tokens": 4, "evaluation": {"num_tasks": 2}}


def prepare(cwd: Path, model: str = "builtin:tiny", **run: object) -> Path:
    return write_letters(
        cwd,
        run={"steps": 4, "checkpoint_every": 2, **run},
        model={"path": model, "dtype": "float32"},
        rollouts=SMALL,
        telemetry={"sample_every_s": 0},
    )


def redline(cwd: Path, *arguments: str) -> int:
    """Run to the end; the exit code."""
    return run_to_end(cwd, *arguments, is_profiled=False)


def runs(cwd: Path) -> list[str]:
    return sorted(path.name for path in (cwd / "runs").iterdir()) if (cwd / "runs").exists() else []


# ── refused, failed ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_that_is_refused_for_its_task_leaves_no_folder(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "letters.py").write_text("raise RuntimeError('no letters today')")
    assert redline(tmp_path, "train", "letters.yaml") == 2
    assert "no letters today" in output(tmp_path)
    assert runs(tmp_path) == []


def test_a_run_whose_sink_cannot_start_leaves_no_folder(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    path = prepare(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        telemetry = f"  sinks: [prometheus]\n  prometheus: {{port: {port}}}\n"
        path.write_text(path.read_text().replace("telemetry:\n", f"telemetry:\n{telemetry}"))
        assert redline(tmp_path, "train", "letters.yaml") == 2
    assert runs(tmp_path) == []


@pytest.fixture
def wrong_model(tmp_path: Path) -> Path:
    """A model folder whose weights cannot be used, which shows when they are loaded; `mend` beside it has the right ones."""
    folder, whole = tmp_path / "model", model_folder("builtin:tiny")
    folder.mkdir()
    for path in whole.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "model.safetensors").rename(tmp_path / "mend")
    tensors = load_file(tmp_path / "mend")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name][:, :-1].contiguous()}, folder / "model.safetensors")
    return folder


def test_a_run_whose_model_cannot_be_loaded_says_why_wherever_one_looks(wrong_model: Path, tmp_path: Path) -> None:
    prepare(tmp_path, str(wrong_model))
    assert redline(tmp_path, "train", "letters.yaml") != 0
    folder = only_run(tmp_path)
    failure = read_failure(folder)
    assert failure is not None
    assert failure.step == 0
    assert failure.message
    assert "Traceback" in failure.traceback
    head = RunReader(folder.path).document()["head"]
    assert (head["status"], head["failure"]["line"]) == ("failed", failure.line)
    write_report(folder.path, tmp_path / "report.html")
    assert json.dumps(failure.line)[1:-1] in (tmp_path / "report.html").read_text()
    redline(tmp_path, "show", str(folder.path))
    assert f"{folder.path.name} failed before its first step" in output(tmp_path)


def test_a_run_that_failed_before_its_first_step_is_continued_only_by_its_folder(wrong_model: Path, tmp_path: Path) -> None:
    prepare(tmp_path, str(wrong_model))
    redline(tmp_path, "train", "letters.yaml")
    assert redline(tmp_path, "train", "letters.yaml", "--resume") == 2
    assert "letters-001 failed before its first step" in output(tmp_path)
    (tmp_path / "mend").replace(wrong_model / "model.safetensors")
    assert redline(tmp_path, "train", "runs/letters-001", "--resume") == 0
    assert runs(tmp_path) == ["letters-001"]
    assert read_failure(only_run(tmp_path)) is None
    assert RunReader(only_run(tmp_path).path).document()["head"]["status"] == "finished"


OBSTACLE = '''
import pathlib

class Obstructing(Letters):
    """Puts a file where checkpoints go, once."""

    def train(self, index):
        place, told = pathlib.Path("runs/letters-001/checkpoints"), pathlib.Path("told")
        if index >= 6 and place.is_dir() and not told.exists():
            told.touch()
            place.rename("checkpoints")
            place.touch()
        return super().train(index)
'''


def test_a_run_that_fails_later_records_the_step_and_no_longer_shows_it_once_continued(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    path.write_text(path.read_text().replace("letters:Letters", "letters:Obstructing"))
    (tmp_path / "letters.py").write_text((tmp_path / "letters.py").read_text() + OBSTACLE)
    assert redline(tmp_path, "train", "letters.yaml") == 2
    folder = only_run(tmp_path)
    failure = read_failure(folder)
    assert failure is not None
    assert failure.step == num_rows(folder.metrics) == 4
    assert "the checkpoint could not be written" in failure.line
    assert RunReader(folder.path).summary()["status"] == "failed"
    folder.checkpoints.unlink()
    (tmp_path / "checkpoints").rename(folder.checkpoints)
    assert redline(tmp_path, "train", "letters.yaml", "--resume") == 0
    assert read_failure(folder) is None
    assert RunReader(folder.path).summary()["status"] == "finished"
    assert [row["step"] for row in rows(folder.metrics)] == [1, 2, 3, 4]


# ── damaged checkpoints ────────────────────────────────────────────────────────────────────────────────────────────────


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def steps(path: Path) -> list[int]:
    return [row["step"] for row in rows(path)]


def test_a_run_with_one_damaged_checkpoint_is_continued_only_when_told_to_begin_again(tmp_path: Path) -> None:
    prepare(tmp_path, keep_checkpoints=1)
    assert redline(tmp_path, "train", "letters.yaml") == 0
    folder = only_run(tmp_path)
    flip_a_bit(folder.checkpoints / "step-000004" / "trainer.safetensors")
    assert redline(tmp_path, "train", "letters.yaml", "--resume", "run.steps=6") == 2
    assert "no checkpoint is whole (step-000004); nothing was changed" in output(tmp_path)
    assert steps(folder.metrics) == [1, 2, 3, 4]
    assert json.loads(folder.config.read_text())["run"]["steps"] == 4
    assert (folder.checkpoints / "step-000004").is_dir()
    assert redline(tmp_path, "train", "letters.yaml", "--from-scratch") == 2
    assert redline(tmp_path, "train", "letters.yaml", "--resume", "--from-scratch", "run.steps=2") == 0
    assert steps(folder.metrics) == [1, 2]
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step-000002"]
    aside = folder.path / "set-aside-001"
    assert steps(aside / "metrics.jsonl") == [1, 2, 3, 4]
    assert {"checkpoints", "trajectories", "model", "evaluations.jsonl"} <= {path.name for path in aside.iterdir()}
    assert RunReader(folder.path).summary()["status"] == "finished"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def damage_checkpoints(folder: RunFolder) -> None:
    for path in folder.checkpoints.glob("*/trainer.safetensors"):
        flip_a_bit(path)


def remove_checkpoints(folder: RunFolder) -> None:
    shutil.rmtree(folder.checkpoints)
    folder.checkpoints.mkdir()


def damage_the_index(folder: RunFolder) -> None:
    [path] = folder.trajectories.glob("index.sqlite")
    path.write_bytes(path.read_bytes()[:100] + bytes(path.stat().st_size - 100))


def take_the_model(folder: RunFolder) -> None:
    config = json.loads(folder.config.read_text())
    folder.config.write_text(json.dumps(config | {"model": config["model"] | {"path": str(folder.path / "nowhere")}}))


REFUSED = {
    "no whole checkpoint": (damage_checkpoints, ["run.steps=6"], "no checkpoint is whole"),
    "no checkpoint": (remove_checkpoints, ["run.steps=6"], "no checkpoint is there"),
    "damaged trajectories": (damage_the_index, ["run.steps=6"], "redline repair"),
    "no model": (take_the_model, ["run.steps=6"], "nowhere"),
    "fewer steps than it has taken": (lambda folder: None, ["run.steps=3"], "has taken 5 steps already; nothing was changed"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_a_refused_resume_leaves_the_folder_of_a_finished_run_byte_for_byte_as_it_was(why: str, tmp_path: Path) -> None:
    spoil, overrides, said = REFUSED[why]
    prepare(tmp_path, steps=5, checkpoint_every=2)
    assert redline(tmp_path, "train", "letters.yaml") == 0
    folder = only_run(tmp_path)
    spoil(folder)
    before = contents(folder.path)
    assert redline(tmp_path, "train", f"runs/{folder.path.name}", "--resume", *overrides) == 2
    assert said in output(tmp_path)
    assert contents(folder.path) == before
    assert RunReader(folder.path).summary()["status"] == "finished"


@pytest.mark.parametrize("overrides", [[], ["run.steps=4"]])
def test_a_resume_with_nothing_left_to_do_says_how_to_train_longer_and_changes_nothing(
    overrides: list[str], tmp_path: Path
) -> None:
    prepare(tmp_path)
    assert redline(tmp_path, "train", "letters.yaml") == 0
    folder = only_run(tmp_path)
    before = contents(folder.path)
    assert redline(tmp_path, "train", "letters.yaml", "--resume", *overrides) == 0
    assert "nothing to do" in output(tmp_path)
    assert "has taken all 4 steps" in output(tmp_path)
    assert "--resume run.steps=8" in output(tmp_path)
    assert contents(folder.path) == before


def test_a_resume_of_a_run_that_reached_its_target_says_how_to_train_its_model_further(tmp_path: Path) -> None:
    path = prepare(tmp_path)
    target = "evaluation:\n    every: 1\n    stop_at: -1.0\n"
    path.write_text(path.read_text().replace("evaluation:\n", target))
    assert redline(tmp_path, "train", "letters.yaml") == 0
    folder = only_run(tmp_path)
    assert steps(folder.metrics) == [1]
    before = contents(folder.path)
    assert redline(tmp_path, "train", "letters.yaml", "--resume") == 0
    assert "has reached rollouts.evaluation.stop_at = -1" in output(tmp_path)
    assert contents(folder.path) == before


def test_a_run_that_was_stopped_can_be_ended_where_it_is(tmp_path: Path) -> None:
    """`run.steps` of as many as it has taken: it is evaluated, and its model is written."""
    prepare(tmp_path)
    assert redline(tmp_path, "train", "letters.yaml") == 0
    folder = only_run(tmp_path)
    shutil.rmtree(folder.model)
    assert redline(tmp_path, "train", "letters.yaml", "--resume") == 0
    assert (folder.model / "model.safetensors").exists()


def test_with_the_newest_checkpoint_damaged_the_run_continues_from_the_one_before(tmp_path: Path) -> None:
    prepare(tmp_path)
    assert redline(tmp_path, "train", "letters.yaml") == 0
    folder = only_run(tmp_path)
    learnt = (folder.model / "model.safetensors").read_bytes()
    flip_a_bit(folder.checkpoints / "step-000004" / "trainer.safetensors")
    assert redline(tmp_path, "train", "letters.yaml", "--resume") == 0
    assert "2 steps after step 2 are lost and taken again" in output(tmp_path)
    assert steps(folder.metrics) == [1, 2, 3, 4]
    assert steps(folder.path / "set-aside-001" / "metrics.jsonl") == [3, 4]
    assert (folder.model / "model.safetensors").read_bytes() == learnt


# ── output that nobody reads, signals ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("unread", ["pipe", "closed"])
def test_a_run_whose_output_nobody_reads_goes_on_to_its_end(unread: Unread, tmp_path: Path) -> None:
    prepare(tmp_path)
    assert run_to_end(tmp_path, "train", "letters.yaml", is_profiled=False, unread=unread) == 0
    folder = only_run(tmp_path)
    assert steps(folder.metrics) == [1, 2, 3, 4]
    assert (folder.model / "model.safetensors").exists()


def test_a_run_that_is_refused_has_its_exit_code_though_nobody_reads_why(tmp_path: Path) -> None:
    prepare(tmp_path)
    (tmp_path / "letters.py").write_text("raise RuntimeError")
    assert run_to_end(tmp_path, "train", "letters.yaml", is_profiled=False, unread="pipe") == 2


def test_a_closed_terminal_ends_the_run_after_its_step_and_it_can_go_on(tmp_path: Path) -> None:
    prepare(tmp_path, steps=1000)
    with forked(tmp_path, "train", "letters.yaml", is_profiled=False, unread="pipe") as process:
        wait_until(lambda: any(num_rows(path) >= 3 for path in tmp_path.glob("runs/*/metrics.jsonl")), process)
        os.kill(process.pid, signal.SIGHUP)
        assert end_of(process, tmp_path) == 130
    folder, last = only_run(tmp_path), steps(only_run(tmp_path).metrics)[-1]
    assert (folder.checkpoints / f"step-{last:06d}").is_dir()
    assert RunReader(folder.path).summary()["status"] == "stopped"
    assert redline(tmp_path, "train", "letters.yaml", "--resume", f"run.steps={last + 1}") == 0


SLOW = """
import time, pathlib

class Slow(Letters):
    def score(self, task, text):
        while pathlib.Path("slow").exists():
            pathlib.Path("waiting").touch()
            time.sleep(0.05)
        return super().score(task, text)
"""


@pytest.mark.parametrize("max_lag", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_after_a_second_ctrl_c_the_run_says_how_to_continue_and_can(max_lag: int, tmp_path: Path) -> None:
    path = prepare(tmp_path, steps=1000)
    path.write_text(path.read_text().replace("letters:Letters", "letters:Slow") + f"buffer: {{max_lag: {max_lag}}}\n")
    (tmp_path / "letters.py").write_text((tmp_path / "letters.py").read_text() + SLOW)
    with forked(tmp_path, "train", "letters.yaml", is_profiled=False) as process:
        wait_until(lambda: any(tmp_path.glob("runs/*/checkpoints/step-*")), process)
        (tmp_path / "slow").touch()
        wait_until((tmp_path / "waiting").exists, process)
        os.kill(process.pid, signal.SIGINT)
        wait_until(lambda: "once more stops at once" in output(tmp_path), process)
        os.kill(process.pid, signal.SIGINT)
        wait_until(lambda: "stopped at once; continue after step-" in output(tmp_path), process)
        assert end_of(process, tmp_path) == 130
    (tmp_path / "slow").unlink()
    folder = only_run(tmp_path)
    assert f"with: redline train {folder.path.relative_to(tmp_path)} --resume" in output(tmp_path)
    assert "Traceback" not in output(tmp_path)
    assert redline(tmp_path, "train", "letters.yaml", "--resume", f"run.steps={steps(folder.metrics)[-1] + 1}") == 0


# ── another folder ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_can_be_continued_from_another_folder(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    (here / "model").symlink_to(model_folder("builtin:tiny"))
    prepare(here, "model", steps=2)
    assert redline(here, "train", "letters.yaml") == 0
    assert redline(elsewhere, "train", str(only_run(here).path), "--resume", "run.steps=4") == 0
    assert steps(only_run(here).metrics) == [1, 2, 3, 4]


def test_a_run_that_was_begun_with_relative_paths_in_its_config_goes_on_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "model").symlink_to(model_folder("builtin:tiny"))
    prepare(tmp_path, "model", steps=2)
    assert redline(tmp_path, "train", "letters.yaml") == 0
    folder = only_run(tmp_path)
    config = json.loads(folder.config.read_text())
    config["model"]["path"], config["run"]["folder"] = "model", "runs"
    del config["rollouts"]["task"]["folder"]
    folder.config.write_text(json.dumps(config))
    assert redline(tmp_path, "train", "letters.yaml", "--resume", "run.steps=3") == 0
    assert steps(folder.metrics) == [1, 2, 3]


def test_a_reward_that_changes_the_working_folder_moves_no_checkpoint(tmp_path: Path) -> None:
    path = prepare(tmp_path, steps=2)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    tasks = tmp_path / "letters.py"
    tasks.write_text(f"{tasks.read_text()}\n\nimport os\nos.chdir({str(elsewhere)!r})\n")
    assert redline(tmp_path, "train", path.name) == 0
    folder = only_run(tmp_path)
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000002"]
    assert (folder.model / "config.json").is_file()
    assert not list(elsewhere.iterdir())


def test_a_run_of_an_earlier_version_gets_no_keys_of_its_algorithm_half_way(tmp_path: Path) -> None:
    """A key that there was not yet stays as the run had it: at its default."""
    path = prepare(tmp_path, steps=2)
    assert redline(tmp_path, "train", path.name, "trainer.algorithm=cispo", "trainer.mini_batches=1") == 0
    folder = only_run(tmp_path)
    config = json.loads(folder.config.read_text())
    del config["trainer"]["mini_batches"]
    folder.config.write_text(json.dumps(config))
    assert redline(tmp_path, "train", path.name, "--resume", "run.steps=3") == 0
    assert json.loads(folder.config.read_text())["trainer"]["mini_batches"] == 1


# ── a power cut ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_after_a_power_cut_the_run_goes_on_by_itself_and_says_what_was_lost(tmp_path: Path) -> None:
    prepare(tmp_path, steps=1000, checkpoint_every=0)
    with forked(tmp_path, "train", "letters.yaml", is_profiled=False) as process:
        wait_until(lambda: any(num_rows(path) >= 2 for path in tmp_path.glob("runs/*/metrics.jsonl")), process)
        os.kill(process.pid, signal.SIGKILL)
        end_of(process, tmp_path)
    folder = only_run(tmp_path)
    [segment] = folder.trajectories.glob("*.open.arrow")
    segment.write_bytes(b"")  # its name was on the disk, and nothing of what it held
    assert redline(tmp_path, "train", "letters.yaml", "--resume", "run.steps=3") == 0
    assert "a power cut took what was written after the last checkpoint" in output(tmp_path)
    assert steps(folder.metrics) == [1, 2, 3]
