"""Checkpoints to save, and what a disk may do to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from support.fakes import Attempt, train_batch
from support.small_models import CONFIGS, write_model

from redline.config.sections.trainer import TrainerConfig
from redline.models.files.hf import load_decoder
from redline.trainer import PolicyTrainer, Sampling
from redline.types import TrainBatch

STATE = {
    "master/embed": torch.randn(5, 3),
    "exp_avg/embed": torch.randn(5, 3),
    "step/embed": torch.tensor(7.0),
    "rows": torch.randn(6, 4).T,
}


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


def write_small_model(folder: Path) -> Path:
    write_model(folder, CONFIGS["qwen3, biases"])
    return folder


def make_trainer(model: Path, dtype: torch.dtype) -> PolicyTrainer:
    config = TrainerConfig(learning_rate=1e-3, schedule={"warmup_steps": 4}, weight_decay=0.1, max_tokens_per_micro_batch=20)
    return PolicyTrainer(load_decoder(model), dtype, config, Sampling())


def batch(step: int) -> TrainBatch:
    attempts = [Attempt([([5, 6, 7], False), ([20 + step, 30 + i, 40], True)], 1.0 - i, [-5.0] * 3) for i in range(3)]
    return train_batch([attempts, attempts[:2]])
