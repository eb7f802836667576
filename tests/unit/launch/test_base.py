"""A run that needs the weights it began with does not go on from others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from redline.config import Config
from redline.errors import ModelError
from redline.launch.base import fingerprint, refuse_another_base, remember_base
from redline.telemetry import RunFolder


def write(folder: Path, change: float = 0.0) -> Path:
    folder.mkdir(exist_ok=True)
    weights = torch.arange(2**18, dtype=torch.float32) + change
    save_file({"layer": weights}, folder / "model.safetensors")
    return folder


def config(**trainer: object) -> Config:
    task = {"kind": "reasoning_gym", "dataset": "chain_sum"}
    return Config.model_validate({"model": {"path": "base"}, "rollouts": {"task": task}, "trainer": trainer})


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    (tmp_path / "run").mkdir()
    return RunFolder(tmp_path / "run")


def test_a_fingerprint_follows_the_weights_and_not_their_place(tmp_path: Path) -> None:
    assert fingerprint(write(tmp_path / "a")) == fingerprint(write(tmp_path / "b"))
    assert fingerprint(write(tmp_path / "a")) != fingerprint(write(tmp_path / "b", change=1e-2))


@pytest.mark.parametrize("trainer", [{"lora": {"rank": 4}}, {"kl_coef": 0.01}])
def test_an_adapter_or_a_reference_needs_the_weights_it_began_with(
    run: RunFolder, tmp_path: Path, trainer: dict[str, object]
) -> None:
    remember_base(run, write(tmp_path / "base"))
    refuse_another_base(config(**trainer), run, tmp_path / "base")
    write(tmp_path / "base", change=1e-2)
    with pytest.raises(ModelError, match="not those that run began with"):
        refuse_another_base(config(**trainer), run, tmp_path / "base")


def test_a_run_whose_checkpoint_holds_all_weights_goes_on(run: RunFolder, tmp_path: Path) -> None:
    remember_base(run, write(tmp_path / "base"))
    refuse_another_base(config(), run, write(tmp_path / "base", change=1e-2))


def test_so_does_one_that_was_recorded_before_they_were_written_down(run: RunFolder, tmp_path: Path) -> None:
    refuse_another_base(config(lora={"rank": 4}), run, write(tmp_path / "base"))
