from __future__ import annotations

import contextlib
import errno
import json
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.checkpointed import DAMAGES, STATE, batch, make_trainer, write_small_model

from redline.errors import DamagedCheckpointError, RunFolderError
from redline.trainer import PolicyTrainer
from redline.trainer.checkpoints.folder import Checkpoint, load_checkpoint, save_checkpoint
from redline.trainer.checkpoints.random_state import restore_random_state

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

    def no_memory(path: Path, framework: str) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("redline.trainer.checkpoints.tensors.safe_open", no_memory)
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
    return write_small_model(tmp_path_factory.mktemp("model"))


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
