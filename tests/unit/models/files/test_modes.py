"""Files of a run have the mode of any other new file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.fakes import train_batch

from redline.models.files.hf import load_decoder, save_folder
from redline.models.files.tiny import write_tiny_model
from redline.models.lora.peft import write_adapter
from redline.trainer.checkpoints.folder import Checkpoint, save_checkpoint
from redline.trainer.optimizer.finite import save_batch


@pytest.fixture(params=[0o022, 0o027])
def usual(request: pytest.FixtureRequest) -> Iterator[int]:
    """The mode of a new file under this umask."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


def test_every_file_of_a_trained_model_has_the_usual_mode(tmp_path: Path, usual: int) -> None:
    write_tiny_model(tmp_path / "in")
    save_folder(tmp_path / "model", load_decoder(tmp_path / "in"), tmp_path / "in", torch.float32)
    found = modes(tmp_path / "model")
    assert "model.safetensors" in found
    assert set(found.values()) == {usual}


def test_every_file_of_an_adapter_has_the_usual_mode(tmp_path: Path, usual: int) -> None:
    write_adapter(
        tmp_path, {"a": torch.zeros(2, 2)}, rank=2, alpha=1.0, use_rslora=False, targets=("q_proj",), base="somewhere"
    )
    assert modes(tmp_path) == {"adapter_model.safetensors": usual, "adapter_config.json": usual}


def test_every_file_of_a_checkpoint_has_the_usual_mode(tmp_path: Path, usual: int) -> None:
    save_checkpoint(tmp_path / "step-000001", Checkpoint(1, {"a": torch.zeros(2)}))
    assert modes(tmp_path / "step-000001") == {"trainer.safetensors": usual, "state.json": usual}


def test_a_batch_that_is_kept_for_replay_has_the_usual_mode(tmp_path: Path, usual: int) -> None:
    save_batch(tmp_path, train_batch([], num_sequences_sampled=4))
    assert set(modes(tmp_path).values()) == {usual}
