"""`PolicyTrainer` on small networks and random batches, in this process or in those of `rank_processes.py`."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
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
from redline.models.files.hf import AnyDecoder, hf_tensors, load_decoder, unloaded_decoder
from redline.models.files.stored import StoredWeights
from redline.trainer import PolicyTrainer, Sampling
from redline.trainer.checkpoints.folder import load_checkpoint
from redline.trainer.parallel.processes import Parallel, connect
from redline.types import StepReport, TrainBatch

STATES = itertools.count()
"""How many states this process has looked at."""
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
    """As its checkpoint has it; on rank 0 alone, where there are several."""
    parallel = trainer._parallel
    parent = os.getppid() if parallel.place.world > 1 else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"redline-{parent}-{next(STATES)}" / "checkpoint"
    trainer.save(folder)
    trainer.flush()
    found = {name: tensor.clone() for name, tensor in load_checkpoint(folder).tensors.items()} if parallel.is_main else {}
    if parallel.is_main:
        shutil.rmtree(folder.parent)
    return found


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
    sampled_from: dict[str, Tensor]
    """The weights that an engine would sample from; rank 0 only."""


def train(
    folder: Path,
    batches: Sequence[TrainBatch],
    keys: dict[str, Any],
    start: Path | None = None,
    end: Path | None = None,
    room_of_rank: dict[int, int] | None = None,
    dtype: torch.dtype = torch.float32,
) -> Outcome:
    """On as many processes as there are, from the checkpoint `start` to the checkpoint `end`, where they are given. A rank may
    have room for so many tokens only."""
    division, of_trainer = parted(keys)
    config = recipe(**of_trainer)
    parallel = connect(division, torch.device("cpu"))
    told: list[str] = []
    options: dict[str, Any] = {"parallel": parallel, "tell": told.append, "bad_steps": folder / "bad-steps"}
    trainer = make_trainer(folder, config, dtype, **options, **weights_of(folder, parallel))
    if start:
        trainer.load(start)
    with room_for((room_of_rank or {}).get(parallel.place.rank, sys.maxsize)):
        reports = run(trainer, batches)
    if end:
        trainer.save(end)
        trainer.flush()
    sampled_from = {name: tensor.clone() for name, tensor in trainer.weights().tensors.items()} if parallel.is_main else {}
    return Outcome(reports, told, state_of(trainer), sampled_from)


def weights_of(folder: Path, parallel: Parallel) -> dict[str, Any]:
    """As `launch` gives a trainer its policy: whole, or without weights where ranks divide it."""
    if not parallel.is_divided:
        return {}
    decoder = unloaded_decoder(folder)
    return {"decoder": decoder, "stored": StoredWeights(folder, decoder.spec)}


@dataclass
class Grown:
    """How much more memory of its own a process had, at most, than before (`RssAnon`: files that it maps do not count)."""

    start: int
    """While the trainer was made."""
    save: int
    """While a checkpoint was written."""
    resume: int
    """While it was loaded by a second trainer."""
    part: int
    """Bytes of the float32 weights that are this process's."""
    memory: dict[str, int]
    """What the trainer says that it holds."""


def grow(folder: Path, checkpoint: Path, keys: dict[str, Any]) -> Grown:
    """Load a model, save a checkpoint and load that, on processes that divide the weights. No step is taken."""
    _give_back_at_once()
    division, of_trainer = parted(keys)
    parallel = connect(division, torch.device("cpu"))
    made: list[PolicyTrainer] = []

    def make() -> None:
        made.append(
            make_trainer(folder, recipe(**of_trainer), torch.bfloat16, parallel=parallel, **weights_of(folder, parallel))
        )

    def save() -> None:
        made[0].save(checkpoint)
        made[0].flush()

    start, saved = peak_of(make), peak_of(save)
    parallel.max_of(torch.zeros(1))
    part, memory = sum(master.nbytes for master in made[0]._optimizer.masters.values()), made[0].memory()
    made.clear()
    make()
    return Grown(start, saved, peak_of(lambda: made[0].load(checkpoint)), part, memory)


def peak_of(action: Callable[[], None]) -> int:
    """Bytes of its own that the process came to have, at most, beyond those before. What is free by then is given back, or it
    would be used again and not be seen."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before, highest, done = own_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            highest[0] = max(highest[0], own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    action()
    done.set()
    watcher.join()
    return max(highest[0], own_bytes()) - before


def _give_back_at_once() -> None:
    """Have glibc map every large block by itself and unmap it when it is freed. By default the first that is freed raises the
    size from which it does that, and tens of megabytes that nobody holds stay with the process, or do not, by chance."""
    ctypes.CDLL(None).mallopt(-3, 2**18)  # M_MMAP_THRESHOLD


def own_bytes() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])


@contextmanager
def room_for(room: int) -> Iterator[list[int]]:
    """Inside, more tokens than this run out of memory: in the first layer's backward pass, when the last layer's gradients are
    summed already, or in the forward pass where there is no other. Gives the tokens of every attempt that did not fit."""
    refused: list[int] = []
    first: list[int] = []  # the layer that runs first in this process

    def refuse(tokens: int) -> None:
        refused.append(tokens)
        raise torch.OutOfMemoryError(f"no room for {tokens} tokens")

    def look(module: nn.Module, inputs: Any, outputs: Any) -> None:
        if not isinstance(module, DecoderLayer):
            return
        first.append(module.index)
        if module.index != first[0] or len(outputs[0]) <= room:
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
