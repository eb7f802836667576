"""What a run saves of itself as it goes, and what it goes on from."""

from __future__ import annotations

import errno
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from support.checkpointed import DAMAGES, STATE, batch, cut, make_trainer, write_small_model
from support.fakes import Calls, FakeTrainer
from support.watched_stages import FakeStages

from redline.config import validate
from redline.errors import RunFolderError
from redline.telemetry import MetricsLog, Progress, Recorder, RunFolder
from redline.trainer import PolicyTrainer
from redline.trainer.checkpoints.folder import Checkpoint, save_checkpoint
from redline.watch.checkpoints import checkpoints
from redline.watch.outputs import Outputs
from redline.watch.run_watch import RunWatch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_model(tmp_path_factory.mktemp("model"))


def make_watch(
    folder: RunFolder, trainer: PolicyTrainer | FakeTrainer, console: io.StringIO | None = None, **run: int
) -> RunWatch:
    task = {"kind": "import", "path": "tests:Fake"}
    config = validate(
        {"model": {"path": "builtin:tiny"}, "rollouts": {"task": task}, "run": run, "telemetry": {"trace_max_bytes": 0}}
    )
    progress = Progress(10, console=Console(file=console or io.StringIO(), width=500))
    return RunWatch(config, Outputs(folder, Recorder(), progress), FakeStages(trainer))


class SavingTrainer(FakeTrainer):
    def save(self, folder: Path) -> None:
        super().save(folder)
        save_checkpoint(folder, Checkpoint(self.version, STATE))


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    calls: Calls = []
    trainer = SavingTrainer(calls)
    folder = RunFolder.create(tmp_path, "run")
    watch = make_watch(folder, trainer, keep_checkpoints=2)
    for trainer.version in (5, 10, 15, 20):
        watch.checkpoint()
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["step-000015", "step-000020"]


def trained_run(model: Path, parent: Path) -> tuple[RunFolder, dict[str, torch.Tensor]]:
    """Checkpoints after steps 1 and 2, metrics up to 3; and the masters after step 1."""
    folder = RunFolder.create(parent, "run")
    trainer = make_trainer(model, torch.float32)
    masters = {}
    with MetricsLog(folder.metrics) as metrics:
        for step in range(3):
            trainer.step(batch(step))
            metrics.append(step + 1, {"trainer/loss": 0.0})
            if step < 2:
                trainer.save(folder.checkpoints / f"step-{step + 1:06d}")
                trainer.flush()
            if step == 0:
                masters = {name: tensor.detach().clone() for name, tensor in trainer.masters.items()}
    return folder, masters


def steps_logged(folder: RunFolder) -> list[int]:
    return [row["step"] for row in MetricsLog.read(folder.metrics)]


def test_a_run_continues_from_its_newest_checkpoint_and_forgets_what_was_logged_after(model: Path, tmp_path: Path) -> None:
    folder, _ = trained_run(model, tmp_path)
    trainer = make_trainer(model, torch.float32)
    make_watch(folder, trainer).resume()
    assert trainer.version == 2
    assert steps_logged(folder) == [1, 2]


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_skipped_for_the_one_before(
    model: Path, damage: Callable[[Path], object], tmp_path: Path
) -> None:
    folder, masters = trained_run(model, tmp_path)
    damage(folder.checkpoints / "step-000002")
    trainer, console = make_trainer(model, torch.float32), io.StringIO()
    make_watch(folder, trainer, console=console).resume()
    assert "skipping a damaged checkpoint" in console.getvalue()
    assert "using step-000001 instead" in console.getvalue()
    assert "2 steps after step 1 are lost and taken again, what there is of them is in set-aside-001" in console.getvalue()
    assert trainer.version == 1
    assert all(torch.equal(trainer.masters[name], masters[name]) for name in masters)
    assert steps_logged(folder) == [1]
    aside = folder.path / "set-aside-001"
    assert [row["step"] for row in MetricsLog.read(aside / "metrics.jsonl")] == [2, 3]
    assert (aside / "step-000002").is_dir()


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_run_whose_checkpoints_are_all_damaged_is_refused_and_nothing_is_changed(
    model: Path, damage: Callable[[Path], object], tmp_path: Path
) -> None:
    folder, _ = trained_run(model, tmp_path)
    for checkpoint in folder.checkpoints.iterdir():
        damage(checkpoint)
    before = content(folder)
    with pytest.raises(RunFolderError, match=r"no checkpoint is whole \(step-000002, step-000001\)") as caught:
        make_watch(folder, make_trainer(model, torch.float32)).resume()
    assert "--from-scratch" in caught.value.hint
    assert content(folder) == before


def test_a_run_whose_checkpoint_cannot_be_read_at_the_moment_is_refused_and_nothing_is_changed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = trained_run(model, tmp_path)
    before = content(folder)

    def fails(path: Path, framework: str) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("redline.trainer.checkpoints.tensors.safe_open", fails)
        with pytest.raises(RunFolderError, match="step-000002: the checkpoint cannot be read at the moment"):
            make_watch(folder, make_trainer(model, torch.float32)).resume()
    assert content(folder) == before
    trainer = make_trainer(model, torch.float32)
    make_watch(folder, trainer).resume()
    assert trainer.version == 2


def content(folder: RunFolder) -> dict[str, bytes]:
    """Every file but the evaluations, which a watch makes when there are none."""
    files = (path for path in folder.path.rglob("*") if path.is_file() and path != folder.evaluations)
    return {str(path.relative_to(folder.path)): path.read_bytes() for path in files}


def test_past_a_million_steps_the_newest_checkpoint_is_still_the_newest(tmp_path: Path) -> None:
    trainer = SavingTrainer([])
    folder = RunFolder.create(tmp_path, "run")
    watch = make_watch(folder, trainer, keep_checkpoints=1)
    for trainer.version in (999_990, 1_000_000):
        watch.checkpoint()
    assert [path.name for path in checkpoints(folder)] == ["step-1000000"]


def test_a_damaged_checkpoint_is_out_of_the_way_when_its_step_is_saved_again(model: Path, tmp_path: Path) -> None:
    folder, _ = trained_run(model, tmp_path)
    cut(folder.checkpoints / "step-000002" / "trainer.safetensors")
    trainer = make_trainer(model, torch.float32)
    watch = make_watch(folder, trainer)
    watch.resume()
    trainer.step(batch(1))
    watch.checkpoint()
    trainer.flush()
    again = make_trainer(model, torch.float32)
    make_watch(folder, again).resume()
    assert again.version == 2
    assert all(torch.equal(again.masters[name], trainer.masters[name]) for name in again.masters)


def test_a_partial_checkpoint_is_not_one(model: Path, tmp_path: Path) -> None:
    folder, _ = trained_run(model, tmp_path)
    (folder.checkpoints / "step-000002").rename(folder.checkpoints / ".step-000002.partial")
    trainer = make_trainer(model, torch.float32)
    make_watch(folder, trainer).resume()
    assert trainer.version == 1


def test_a_run_without_a_checkpoint_begins_again(model: Path, tmp_path: Path) -> None:
    folder, _ = trained_run(model, tmp_path)
    for checkpoint in folder.checkpoints.iterdir():
        checkpoint.rename(tmp_path / checkpoint.name)
    trainer = make_trainer(model, torch.float32)
    make_watch(folder, trainer).resume()
    assert trainer.version == 0
    assert steps_logged(folder) == []
    assert [row["step"] for row in MetricsLog.read(folder.path / "set-aside-001" / "metrics.jsonl")] == [1, 2, 3]


def test_a_checkpoint_of_another_format_is_not_taken_for_a_damaged_one(model: Path, tmp_path: Path) -> None:
    """Nothing is wrong with it but our age: beginning again would throw a good run away."""
    folder, _ = trained_run(model, tmp_path)
    for checkpoint in folder.checkpoints.iterdir():
        (checkpoint / "state.json").write_text(json.dumps({"format": 99, "version": 2}))
    with pytest.raises(RunFolderError, match="format 99"):
        make_watch(folder, make_trainer(model, torch.float32)).resume()
    assert steps_logged(folder) == [1, 2, 3]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again_by_itself(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    with MetricsLog(folder.metrics) as metrics:
        for step in range(1, 6):
            metrics.append(step, {"trainer/loss": 0.0})
    folder.checkpoints.rmdir()
    before = folder.metrics.read_bytes()
    with pytest.raises(RunFolderError, match="no checkpoint is there, though 5 steps were logged") as caught:
        make_watch(folder, FakeTrainer([]), checkpoint_every=2).resume()
    assert "--from-scratch" in caught.value.hint
    assert folder.metrics.read_bytes() == before
    assert not list(folder.path.glob("set-aside-*"))


@pytest.mark.parametrize("has_folder", [True, False])
def test_a_run_that_was_killed_while_its_first_checkpoint_was_written_begins_again(tmp_path: Path, has_folder: bool) -> None:
    folder = RunFolder.create(tmp_path, "run")
    with MetricsLog(folder.metrics) as metrics:
        for step in range(1, 5):
            metrics.append(step, {"trainer/loss": 0.0})
    if not has_folder:
        folder.checkpoints.rmdir()
    make_watch(folder, FakeTrainer([]), checkpoint_every=2).resume()
    assert steps_logged(folder) == []
    assert len((folder.path / "set-aside-001" / "metrics.jsonl").read_text().splitlines()) == 4


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_rows_are_on_the_disk_before_the_checkpoint_that_comes_after_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    fsync = os.fsync

    def noting(descriptor: int) -> None:
        flushed.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    watch = make_watch(RunFolder.create(tmp_path, "run"), SavingTrainer([]))
    watch.checkpoint()
    assert flushed[:2] == ["metrics.jsonl", "evaluations.jsonl"]
    assert "trainer.safetensors" in flushed[2:]


def test_rows_that_are_missing_before_the_checkpoint_are_said_to_be(model: Path, tmp_path: Path) -> None:
    folder, _ = trained_run(model, tmp_path)
    folder.metrics.write_text(folder.metrics.read_text().splitlines(keepends=True)[0])
    console = io.StringIO()
    watch = make_watch(folder, make_trainer(model, torch.float32), console=console)
    watch.resume()
    assert "metrics.jsonl ends at step 1: the rows of the steps up to 2 are missing" in console.getvalue()
    assert watch.rows.num_groups_counted is None
