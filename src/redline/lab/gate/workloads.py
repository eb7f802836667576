"""What is watched: a training step, a batch of generation, a step of the whole loop. Small, and the same every time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import torch

from redline.config import resolve, validate
from redline.config.sections.engine import EngineConfig
from redline.config.sections.trainer import TrainerConfig
from redline.lab.material.networks import make_network
from redline.lab.material.prompts import random_prompts
from redline.lab.material.train_batches import long_tailed_lengths, random_batch
from redline.lab.measure.scratch_run import StepWatch, scratch_stages
from redline.lab.peers.generation_sides import Batch, EngineSide
from redline.lab.peers.training_sides import RedlineTraining
from redline.launch.engines import make_engine

Work = Callable[[], object]
GROUPS, GROUP_SIZE, PROMPT_TOKENS, TOKENS, LONGEST = 4, 4, 16, 48, 96
MICRO_BATCH_TOKENS = 384
"""Several micro-batches, so that packing has something to do."""
SEQUENCES, NEW_TOKENS = 8, 32


@contextlib.contextmanager
def trainer_step(model: str, device: torch.device) -> Iterator[Work]:
    """Groups of long-tailed answers that share their prompts, in float32."""
    decoder = make_network(model, device, torch.float32, seed=0).decoder
    side = RedlineTraining(decoder, torch.float32, TrainerConfig(max_tokens_per_micro_batch=MICRO_BATCH_TOKENS))
    sequences = GROUPS * GROUP_SIZE
    lengths = long_tailed_lengths(sequences, sequences * TOKENS, PROMPT_TOKENS + 1, LONGEST, seed=0)
    vocab_size = decoder.spec.vocab_size
    batch = random_batch(lengths, prompt_tokens=PROMPT_TOKENS, group_size=GROUP_SIZE, vocab_size=vocab_size, key=(0,))
    yield lambda: side.step(batch)


@contextlib.contextmanager
def generation(model: str, device: torch.device) -> Iterator[Work]:
    """Random prompts of one length, completions of one length, all at once."""
    decoder = make_network(model, device, torch.float32, seed=0).decoder
    engine = make_engine(decoder, EngineConfig(max_num_seqs=SEQUENCES, max_model_len=PROMPT_TOKENS + NEW_TOKENS))
    prompts: list[np.ndarray] = random_prompts(SEQUENCES, PROMPT_TOKENS, decoder.spec.vocab_size, (0,))
    side = EngineSide(engine, device)
    yield lambda: side.run(Batch(prompts, 1, NEW_TOKENS, seed=0))


@contextlib.contextmanager
def loop_step(model: str, device: torch.device) -> Iterator[Work]:
    """Rollouts, buffer, trainer and weight sync in lockstep, without a learning rate: every step samples from one policy."""
    recipe = {
        "run": {"device": device.type, "num_threads": 1, "steps": 1000, "checkpoint_every": 0},
        "model": {"path": model, "dtype": "float32"},
        "rollouts": {
            "task": {"kind": "import", "path": "redline.lab.material.tasks:Letters"},
            "groups_per_step": GROUPS,
            "group_size": GROUP_SIZE,
            "max_new_tokens": NEW_TOKENS,
            "evaluation": {"num_tasks": 0},
        },
        "buffer": {"max_bytes": 0},
        "trainer": {"learning_rate": 1e-12},
        "engine": {"max_num_seqs": GROUPS * GROUP_SIZE},
    }
    config = resolve(validate(recipe, "redline perf")).config
    with scratch_stages(config) as stages:
        yield lambda: stages.run(StepWatch(), stages.trainer.version + 1)


WORKLOADS = {"trainer step": trainer_step, "generation": generation, "loop step": loop_step}
SAMPLED = ("loop step",)
"""Those whose work is as long as what the policy says."""
