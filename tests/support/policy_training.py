"""`PolicyTrainer` on small networks and random batches, in this process or in those of `rank_processes.py`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from support.fakes import Attempt, train_batch
from support.parallel_training import parted
from support.small_models import CONFIGS, VOCAB_SIZE, write_model
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from redline.config.algorithms import fill_algorithm
from redline.config.load import validate
from redline.config.schema import Config
from redline.models.decoder import DecoderLayer
from redline.models.files.hf import AnyDecoder, hf_tensors, load_decoder
from redline.trainer import PolicyTrainer, Sampling
from redline.trainer.parallel.processes import connect
from redline.types import StepReport, TrainBatch

TEMPERATURE = 0.8
MAX_NEW_TOKENS = 30
OPTIMIZER: dict[str, Any] = {"learning_rate": 1e-2, "betas": (0.0, 0.9), "eps": 1e-3, "weight_decay": 0.1, "max_grad_norm": 1e9}
"""With β₁ = 0 AdamW's first moment is the gradient itself, and the checkpoint shows it. With so large an eps, a gradient that
differs by rounding makes an update that differs by rounding."""


@dataclass
class Bench:
    """One set of weights: a folder for redline, and the same as transformers has it."""

    folder: Path
    oracle: PreTrainedModel

    def trainer(self, dtype: torch.dtype = torch.float32, options: dict[str, Any] | None = None, **keys: Any) -> PolicyTrainer:
        return make_trainer(self.folder, recipe(**keys), dtype, **(options or {}))

    def batches(self, count: int, noise: float = 0.3) -> list[TrainBatch]:
        return [random_batch(self.oracle, seed, noise) for seed in range(count)]


def make_bench(folder: Path, family: str = "llama, tied") -> Bench:
    return Bench(folder, write_model(folder, CONFIGS[family], seed=1, std=0.15))


def recipe(**trainer: Any) -> Config:
    """The sections that a trainer is made of, the keys of its algorithm filled in; `advantages` goes to the rollouts. A batch
    is one update unless the keys say otherwise."""
    rollouts = {"task": {"kind": "import", "path": "nowhere:Tasks"}, "max_new_tokens": MAX_NEW_TOKENS}
    if "advantages" in trainer:
        rollouts["advantages"] = trainer.pop("advantages")
    values = {"model": {"path": "builtin:tiny"}, "rollouts": rollouts, "trainer": OPTIMIZER | {"mini_batches": 1} | trainer}
    return fill_algorithm(validate(values))[0]


def make_trainer(
    folder: Path, config: Config, dtype: torch.dtype = torch.float32, decoder: AnyDecoder | None = None, **options: Any
) -> PolicyTrainer:
    return PolicyTrainer(
        decoder or load_decoder(folder),
        dtype,
        config.trainer,
        Sampling(TEMPERATURE, config.rollouts.advantages, config.rollouts.max_new_tokens),
        **options,
    )


# ── batches ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def random_batch(model: PreTrainedModel, seed: int, noise: float) -> TrainBatch:
    """Three groups; old logprobs are the model's own, moved by `noise`. Some attempts were left out."""
    generator = np.random.default_rng(seed)
    groups = []
    for attempts in (3, 1, 4):
        prompt = generator.integers(2, VOCAB_SIZE, generator.integers(1, 20)).tolist()
        groups.append([random_attempt(model, prompt, generator, noise) for _ in range(attempts)])
    return train_batch(groups, num_sequences_sampled=11, num_tokens_left_out=37)


@torch.no_grad()
def random_attempt(model: PreTrainedModel, prompt: list[int], generator: np.random.Generator, noise: float) -> Attempt:
    answer = generator.integers(2, VOCAB_SIZE, generator.integers(1, MAX_NEW_TOKENS)).tolist()
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
    logprobs = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(answer)[:, None]).squeeze(1).numpy()
    old = logprobs + noise * generator.standard_normal(len(answer)).astype(np.float32)
    return Attempt([(prompt, False), (answer, True)], float(generator.normal()), old.tolist())


# ── what a trainer holds ───────────────────────────────────────────────────────────────────────────────────────────────


def state_of(trainer: PolicyTrainer) -> dict[str, Tensor]:
    """As its checkpoint has it."""
    with tempfile.TemporaryDirectory() as folder:
        trainer.save(Path(folder) / "checkpoint")
        trainer.flush()
        path = Path(folder) / "checkpoint" / "trainer.safetensors"
        return load_file(path) if path.exists() else {}


def part_of(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def by_hugging_face_name(bench: Bench, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(hf_tensors(load_decoder(bench.folder), tensors))


def gradient(bench: Bench, batch: TrainBatch, options: dict[str, Any] | None = None, **keys: Any) -> dict[str, Tensor]:
    """Of one step, by our names."""
    trainer = bench.trainer(options=options, **keys)
    trainer.step(batch)
    return part_of(state_of(trainer), "exp_avg/")


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    """Each tensor within `tolerance` of the largest entry of them all."""
    assert found.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    assert largest > 0
    apart = {name: float((found[name] - expected[name]).abs().max()) / largest for name in expected}
    too_far = {name: difference for name, difference in apart.items() if not difference < tolerance}
    assert not too_far, too_far


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def trained_rows(batch: TrainBatch) -> Iterator[tuple[int, int]]:
    """Where each sequence begins and ends."""
    yield from zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)


def run(trainer: PolicyTrainer, batches: Sequence[TrainBatch]) -> list[StepReport]:
    """A step on each; the reports."""
    return [trainer.step(batch) for batch in batches]


# ── on several processes ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Outcome:
    reports: list[StepReport]
    told: list[str]
    state: dict[str, Tensor]
    """As a checkpoint has it; rank 0 only."""


def train(
    folder: Path,
    batches: Sequence[TrainBatch],
    keys: dict[str, Any],
    start: Path | None = None,
    end: Path | None = None,
    room_of_rank: dict[int, int] | None = None,
) -> Outcome:
    """On as many processes as there are, from the checkpoint `start` to the checkpoint `end`, where they are given. A rank may
    have room for so many tokens only."""
    division, of_trainer = parted(keys)
    config = recipe(**of_trainer)
    parallel = connect(division, torch.device("cpu"))
    told: list[str] = []
    trainer = make_trainer(folder, config, parallel=parallel, tell=told.append, bad_steps=folder / "bad-steps")
    if start:
        trainer.load(start)
    with room_for((room_of_rank or {}).get(parallel.place.rank, sys.maxsize)):
        reports = run(trainer, batches)
    if end:
        trainer.save(end)
        trainer.flush()
    return Outcome(reports, told, state_of(trainer))


@contextmanager
def room_for(room: int) -> Iterator[list[int]]:
    """Inside, more tokens than this run out of memory: in the first layer's backward pass, when the last layer's gradients are
    summed already, or in the forward pass where there is no other. Gives the tokens of every attempt that did not fit."""
    refused: list[int] = []

    def refuse(tokens: int) -> None:
        refused.append(tokens)
        raise torch.OutOfMemoryError(f"no room for {tokens} tokens")

    def look(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not isinstance(module, DecoderLayer) or module.index or len(outputs[0]) <= room:
            return
        tokens = len(outputs[0])
        if outputs[1].requires_grad:
            outputs[1].register_hook(lambda _: refuse(tokens))
        else:
            refuse(tokens)

    hook = register_module_forward_hook(look)
    try:
        yield refused
    finally:
        hook.remove()
