from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from support.fakes import Attempt, Calls, FakeTrainer, train_batch
from support.small_models import CONFIGS, write_model
from support.watched import FakeStages

from redline.config import validate
from redline.config.sections.trainer import TrainerConfig
from redline.errors import DamagedCheckpointError, RunFolderError
from redline.models.files.hf import load_decoder
from redline.telemetry import MetricsLog, Progress, Recorder, RunFolder
from redline.trainer import PolicyTrainer
from redline.trainer.checkpoints.folder import Checkpoint, load_checkpoint, save_checkpoint
from redline.trainer.checkpoints.random_state import restore_random_state
from redline.types import TrainBatch
from redline.watch.checkpoints import checkpoints
from redline.watch.outputs import Outputs
from redline.watch.run_watch import RunWatch

STATE = {
    "master/embed": torch.randn(5, 3),
    "exp_avg/embed": torch.randn(5, 3),
    "step/embed": torch.tensor(7.0),
    "rows": torch.randn(6, 4).T,
}


# ── the files ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def assert_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_a_checkpoint_gives_back_every_bit(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-000012", Checkpoint(12, STATE))
    found = load_checkpoint(tmp_path / "step-000012")
    version, state = found.version, found.tensors
    assert version == 12
    assert_state(state, STATE)


def test_nothing_but_the_checkpoint_is_left_behind(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-000012", Checkpoint(12, STATE))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000012"]


def test_what_a_kill_left_half_written_is_neither_found_nor_in_the_way(tmp_path: Path) -> None:
    partial = tmp_path / ".step-000012.partial"
    partial.mkdir()
    (partial / "trainer.safetensors").write_bytes(b"half")
    (partial / "stray").write_bytes(b"from an older version")
    assert list(tmp_path.glob("step-*")) == []
    save_checkpoint(tmp_path / "step-000012", Checkpoint(12, STATE))
    assert [path.name for path in tmp_path.iterdir()] == ["step-000012"]
    assert sorted(path.name for path in (tmp_path / "step-000012").iterdir()) == ["state.json", "trainer.safetensors"]
    assert_state(load_checkpoint(tmp_path / "step-000012").tensors, STATE)


class Killed(BaseException):
    """Stands for kill -9: nothing after it runs."""


def test_a_kill_at_the_last_moment_of_writing_a_step_again_leaves_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt right after a scheduled checkpoint writes the same step twice."""
    save_checkpoint(tmp_path / "step-000012", Checkpoint(12, STATE))

    def killed(self: Path, target: Path) -> None:
        raise Killed

    monkeypatch.setattr(Path, "rename", killed)
    monkeypatch.setattr(Path, "replace", killed)
    with contextlib.suppress(Killed):
        save_checkpoint(tmp_path / "step-000012", Checkpoint(12, STATE))
    assert_state(load_checkpoint(tmp_path / "step-000012").tensors, STATE)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "no weights": lambda folder: (folder / "trainer.safetensors").unlink(),
    "empty weights": lambda folder: (folder / "trainer.safetensors").write_bytes(b""),
    "cut weights": lambda folder: cut(folder / "trainer.safetensors"),
    "no state": lambda folder: (folder / "state.json").unlink(),
    "empty state": lambda folder: (folder / "state.json").write_text(""),
    "torn state": lambda folder: cut(folder / "state.json"),
    "noise": lambda folder: (folder / "state.json").write_bytes(b"\xff\x00\xfe"),
    "state of another kind": lambda folder: (folder / "state.json").write_text("[]"),
    "state without a version": lambda folder: (folder / "state.json").write_text("{}"),
    "flipped weight": lambda folder: flip(folder / "trainer.safetensors", -3),
    "flipped header": lambda folder: flip(folder / "trainer.safetensors", 20),
    "another version": lambda folder: replace(folder / "state.json", '"version": ', '"version": 1'),
    "another data position": lambda folder: replace(folder / "state.json", '"data": {}', '"data": {"task": 1}'),
    "weights of another step": lambda folder: write_other_weights(folder),
}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip(path: Path, index: int) -> None:
    """One bit."""
    content = bytearray(path.read_bytes())
    content[index] ^= 4
    path.write_bytes(content)


def replace(path: Path, old: str, new: str) -> None:
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def write_other_weights(folder: Path) -> None:
    tensors = load_file(folder / "trainer.safetensors")
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, folder / "trainer.safetensors")


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_checkpoint_is_an_error_with_a_hint(damage: Callable[[Path], object], tmp_path: Path) -> None:
    folder = tmp_path / "step-000012"
    save_checkpoint(folder, Checkpoint(12, STATE))
    damage(folder)
    with pytest.raises(DamagedCheckpointError, match="step-000012: damaged checkpoint") as caught:
        load_checkpoint(folder)
    assert "another checkpoint" in caught.value.hint


def test_a_checkpoint_that_cannot_be_read_at_the_moment_is_not_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A digest or a missing file says that a checkpoint is damaged; memory, descriptors or a network disk do not."""
    folder = tmp_path / "step-000012"
    save_checkpoint(folder, Checkpoint(12, STATE))

    def no_memory(path: Path) -> dict[str, torch.Tensor]:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("redline.trainer.checkpoints.folder.load_file", no_memory)
    with pytest.raises(RunFolderError, match=r"cannot be read at the moment: .*Cannot allocate memory") as caught:
        load_checkpoint(folder)
    assert not isinstance(caught.value, DamagedCheckpointError)
    assert "nothing was changed" in caught.value.hint


def test_a_checkpoint_of_another_format_names_both(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "step-000012", Checkpoint(12, STATE))
    for written in (1, 99):
        (tmp_path / "step-000012" / "state.json").write_text(json.dumps({"format": written, "version": 12}))
        with pytest.raises(RunFolderError, match=f"checkpoint format {written}, this version reads 2") as caught:
            load_checkpoint(tmp_path / "step-000012")
        assert "version of redline that began it" in caught.value.hint


def test_a_checkpoint_keeps_where_the_data_stood(tmp_path: Path) -> None:
    position = {"next_task": 17, "epochs": [1, 2], "name": "größer"}
    save_checkpoint(tmp_path / "step-000003", Checkpoint(3, STATE, position))
    assert load_checkpoint(tmp_path / "step-000003").data == position


def draws() -> list[float]:
    return [random.random(), random.gauss(0, 1), float(np.random.normal()), float(np.random.rand()), float(torch.randn(1))]


def test_random_numbers_go_on_where_the_checkpoint_left_them(tmp_path: Path) -> None:
    draws()
    save_checkpoint(tmp_path / "step-000003", Checkpoint(3, STATE))
    expected = draws()
    draws()
    restore_random_state(load_checkpoint(tmp_path / "step-000003").random)
    assert draws() == expected


# ── the trainer ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder, CONFIGS["qwen3, biases"])
    return folder


def make_trainer(model: Path, dtype: torch.dtype) -> PolicyTrainer:
    config = TrainerConfig(learning_rate=1e-3, schedule={"warmup_steps": 4}, weight_decay=0.1, max_tokens_per_micro_batch=20)
    return PolicyTrainer(load_decoder(model), dtype, 1.0, config)


def batch(step: int) -> TrainBatch:
    attempts = [Attempt([([5, 6, 7], False), ([20 + step, 30 + i, 40], True)], 1.0 - i, [-5.0] * 3) for i in range(3)]
    return train_batch([attempts, attempts[:2]])


def final_state(trainer: PolicyTrainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.save(folder)
    trainer.flush()
    return load_file(folder / "trainer.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("saved_after", [0, 1, 3])
def test_a_trainer_that_is_saved_and_loaded_continues_bit_for_bit(
    model: Path, dtype: torch.dtype, saved_after: int, tmp_path: Path
) -> None:
    straight = make_trainer(model, dtype)
    for step in range(5):
        if step == saved_after:
            straight.save(tmp_path / "middle")
        straight.step(batch(step))
    resumed = make_trainer(model, dtype)
    resumed.load(tmp_path / "middle")
    assert resumed.version == saved_after
    for step in range(saved_after, 5):
        resumed.step(batch(step))
    assert_state(final_state(resumed, tmp_path / "resumed"), final_state(straight, tmp_path / "straight"))
    for name, tensor in straight.weights().tensors.items():
        assert torch.equal(resumed.weights().tensors[name], tensor)


def test_saving_changes_nothing(model: Path, tmp_path: Path) -> None:
    often, never = make_trainer(model, torch.bfloat16), make_trainer(model, torch.bfloat16)
    for step in range(3):
        often.save(tmp_path / f"{step}")
        often.step(batch(step))
        never.step(batch(step))
    assert_state(final_state(often, tmp_path / "often"), final_state(never, tmp_path / "never"))


@pytest.mark.parametrize("saved_after", [0, 2])
def test_loading_forgets_what_the_trainer_did_since(model: Path, saved_after: int, tmp_path: Path) -> None:
    trainer, fresh = make_trainer(model, torch.float32), make_trainer(model, torch.float32)
    for step in range(saved_after):
        trainer.step(batch(step))
    trainer.save(tmp_path / "early")
    trainer.flush()
    for step in range(5, 9):
        trainer.step(batch(step))
    for each in (trainer, fresh):
        each.load(tmp_path / "early")
        each.step(batch(1))
    assert_state(final_state(trainer, tmp_path / "trainer"), final_state(fresh, tmp_path / "fresh"))


# ── the run folder ─────────────────────────────────────────────────────────────────────────────────────────────────────


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

    def fails(path: Path) -> dict[str, torch.Tensor]:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("redline.trainer.checkpoints.folder.load_file", fails)
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
