"""The one way to make a trainer, in the process that runs everything and in those that follow it. Imports no rollouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from redline.config import Config
from redline.errors import ModelError, RankLostError
from redline.launch.models import LoadedModel
from redline.launch.rank_samples import take_samples
from redline.launch.rank_spans import mark_of, take_spans
from redline.launch.ranks import num_ranks
from redline.telemetry import RunFolder, span
from redline.telemetry.files.failure import record_failure
from redline.telemetry.machine.hosts import HostSamples
from redline.trainer import PolicyTrainer, Sampling
from redline.trainer.parallel.led import LeadingTrainer
from redline.trainer.parallel.orders import Order
from redline.trainer.parallel.place import Division
from redline.trainer.parallel.processes import Parallel, connect, local_device
from redline.trainer.parallel.pulse import HINT
from redline.trainer.parallel.ranks import Ranks, join

BEGIN = "begin"
DIGESTS = 2**62
"""Digests of weights are below it, so that an int64 holds them and their negatives."""
STUCK = 10
"""How many times `trainer.rank_timeout_s` a rank that is alive may keep the others waiting inside a step."""

Tell = Callable[[str], None]


def meet_ranks(config: Config, folder: RunFolder, hosts: HostSamples | None = None) -> Parallel:
    """Meet the other ranks, where there are some, and tell them what to do: called once by rank 0, before its model loads, so
    that all load at the same time. Their spans come into the folder; `hosts` takes the samples of their machines."""
    if num_ranks() == 1:
        return Parallel()
    ranks = join()
    ranks.pulse.at_loss = lambda message: record_failure(folder, RankLostError(message, HINT))
    sampling = asdict(hosts.sampling) if hosts else None
    place = {"folder": str(folder.path.absolute()), "mark": mark_of(folder.path)}
    ranks.orders.give(Order(BEGIN, {"config": config.model_dump(mode="json"), **place, "sampling": sampling}))
    take_spans(ranks.connection(), folder.spans, ranks.over)
    if hosts:
        take_samples(ranks.connection(), hosts)
    return connect_ranks(config, ranks)


def connect_ranks(config: Config, ranks: Ranks) -> Parallel:
    """Connect to the ranks for the exchanges of a step. Blocks until all have called it."""
    ranks.pulse.patience_s = config.trainer.rank_timeout_s
    with span("wait.for_ranks"), ranks.naming_who_is_lost():
        return connect(Division.of(config.trainer), local_device(config.run.device), STUCK * config.trainer.rank_timeout_s)


def make_trainer(config: Config, model: LoadedModel, folder: RunFolder, tell: Tell, parallel: Parallel) -> PolicyTrainer:
    """Make the trainer of a policy that was loaded in float32. Steps that went wrong leave their batches in the run folder."""
    with span("trainer.setup"):
        if parallel.place.world == 1:
            return PolicyTrainer(*_policy(config, model), **_options(config, model, folder.path, tell))
        ranks = join()
        with ranks.naming_who_is_lost():
            check_same_weights(config, model, parallel)
            options = _options(config, model, folder.path, tell)
            trainer = LeadingTrainer(ranks, *_policy(config, model), **options, parallel=parallel)
            ranks.pulse.is_writing = lambda: trainer.is_saving
            return trainer


def make_following_trainer(config: Config, model: LoadedModel, parallel: Parallel) -> PolicyTrainer:
    """Make the trainer of a rank that follows: the same, but it writes and says nothing."""
    with span("trainer.setup"):
        check_same_weights(config, model, parallel)
        options = _options(config, model, Path(), lambda text: None)
        trainer = PolicyTrainer(*_policy(config, model), **options, parallel=parallel)
        join().pulse.is_writing = lambda: trainer.is_saving
        return trainer


def check_same_weights(config: Config, model: LoadedModel, parallel: Parallel) -> None:
    """Raise ModelError, on every rank, unless all have loaded the same weights: each reads them from its own disk or cache, and
    gradients of two models would be added up without a word. Blocks until all ranks have called it."""
    digests = _digests(model, parallel) if model.stored else [_digest(model)]
    nobody = torch.iinfo(torch.int64).min
    highest = parallel.max_of(torch.tensor([nobody if digest is None else digest for digest in digests]))
    lowest = -parallel.max_of(torch.tensor([nobody if digest is None else -digest for digest in digests]))
    if (highest != lowest).any():
        raise ModelError(
            f"model.path = {config.model.path}: the ranks have loaded different weights",
            "every rank reads them from its own disk or cache: bring the same files to each",
        )


def _digest(model: LoadedModel) -> int:
    """A number that differs, as good as always, where weights do."""
    tensors = [parameter.detach().contiguous().view(torch.int32) for parameter in model.decoder.parameters()]
    return sum(place * int(tensor.sum(dtype=torch.int64)) for place, tensor in enumerate(tensors, start=1)) % DIGESTS


def _digests(model: LoadedModel, parallel: Parallel) -> list[int | None]:
    """For each part of the weights a number of that kind, from this rank's files: of the part that it will hold and of the next
    one, which another rank holds. None of the others, so that no rank reads them all."""
    assert model.stored is not None
    own, parts, layers = parallel.part, parallel.num_parts, model.decoder.spec.num_layers
    found: list[int | None] = [None] * parts
    for part in {own, (own + 1) % parts}:
        digests = (
            model.stored.digest(name, *parallel.rows_of(part, name, len(parameter), layers), parameter.shape[1:])
            for name, parameter in model.decoder.named_parameters()
        )
        found[part] = sum(digests) % DIGESTS
    return found


def _policy(config: Config, model: LoadedModel) -> tuple:
    rollouts = config.rollouts
    sampling = Sampling(rollouts.temperature, rollouts.advantages, rollouts.max_new_tokens)
    return model.decoder, getattr(torch, config.model.dtype), config.trainer, sampling


def _options(config: Config, model: LoadedModel, folder: Path, tell: Tell) -> dict:
    return {"seed": config.run.seed, "stored": model.stored, "bad_steps": folder / "bad-steps", "tell": tell}
