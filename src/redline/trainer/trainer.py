"""The trainer: one `TrainBatch` in, one step out: one version of the policy, by one update of AdamW or several.

    batch ──► reference, values, old logprobs (only where the recipe needs them) ──► an advantage for every token
          ──► mini-batches, each an update:
                micro-batches ──► forward ──► logprobs of the chosen tokens ──► loss ──► backward, each of them
                ──► AdamW ──► weights in place

The weights of the mean are those of the whole mini-batch, so its loss is a sum over tokens: micro-batches of any size, on any
number of processes, add up to the same gradient. By default the batch is the one mini-batch.

This is the order of a step. `passes/` has its parts: `first_look.py` what is known before it, `training.py` its gradients,
`room.py` how many tokens go through the network at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.config.algorithms import recomputes_old_logprobs
from redline.config.sections.trainer import TrainerConfig
from redline.errors import ConfigError
from redline.models.files.hf import AnyDecoder
from redline.models.files.stored import StoredWeights
from redline.models.lora.trainable import add_adapter
from redline.models.sizes.flops import NetworkCost, training_flops
from redline.telemetry import span
from redline.trainer.batches.micro_batches import MicroBatchPlan
from redline.trainer.batches.mini_batches import UpdatePlace, divide, part_of
from redline.trainer.checkpoints.background import CheckpointWriter
from redline.trainer.checkpoints.folder import Checkpoint, load_checkpoint
from redline.trainer.checkpoints.random_state import restore_random_state
from redline.trainer.checkpoints.tensors import SavedTensors
from redline.trainer.held import held_bytes
from redline.trainer.loss.token_numbers import token_numbers, weighed
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.optimizer.finite import BadStep, BadSteps
from redline.trainer.parallel.processes import Parallel
from redline.trainer.parallel.sampled_from import SampledFrom
from redline.trainer.passes.critic import CriticReport, TrainedCritic
from redline.trainer.passes.first_look import FirstLook
from redline.trainer.passes.policy import TrainedPolicy, recompute_in_backward
from redline.trainer.passes.reference import Reference
from redline.trainer.passes.reports import step_report
from redline.trainer.passes.room import Room
from redline.trainer.passes.routing import WatchedRouting
from redline.trainer.passes.totals import PlannedStep, SeenStep, StepTotals
from redline.trainer.passes.training import Numbers, TrainingPass
from redline.trainer.sampling import Sampling
from redline.types import StepReport, TrainBatch, WeightSet

CRITIC = "critic/"
"""What the names of the critic's state begin with."""


class PolicyTrainer:
    """Packed micro-batches, any algorithm of `docs/algorithms.md`. Implements `ports.Trainer`."""

    def __init__(
        self,
        decoder: AnyDecoder,
        dtype: torch.dtype,
        config: TrainerConfig,
        sampling: Sampling,
        *,
        seed: int = 0,
        parallel: Parallel | None = None,
        stored: StoredWeights | None = None,
        bad_steps: Path = Path("bad-steps"),
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Takes the network over: converts it to `dtype`, and freezes it where an adapter is trained. Ranks that divide a
        network without weights read each its part from `stored`. A batch that is not finite may end in the folder `bad_steps`;
        `tell` is called with what a user had better know."""
        recomputes, _ = recomputes_old_logprobs(config, str(dtype).removeprefix("torch."))
        config = config.model_copy(update={"recompute_old_logprobs": recomputes})
        has_anchor = recomputes and config.updates_per_step > 1
        self._seed, self._version = seed, 0
        self._dtype, self._config, self._sampling = dtype, config, sampling
        self._parallel = parallel or Parallel()
        self._tell = tell
        if config.lora.rank:
            add_adapter(decoder, config.lora, dtype, seed)
        recompute_in_backward(decoder, config.gradient_checkpointing)
        self._trained = [name for name, parameter in decoder.named_parameters() if parameter.requires_grad]
        num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
        self._flops = NetworkCost.of(decoder)
        self._sampled_from = SampledFrom(decoder, dtype, self._parallel)
        self._decoder = decoder = self._parallel.cut(decoder)
        self.network: AnyDecoder = self._sampled_from.network(decoder)
        """The policy as one network, to sample from."""
        pipeline = self._parallel.pipeline(dtype)
        self._reference = self._make_reference(stored) if config.kl_coef else None
        self._critic = self._make_critic(seed + 1) if sampling.advantages == "gae" else None
        self._weights = self._parallel.wrap(decoder, dtype, stored)
        self._optimizer = MasterAdamW(self._weights.owned, torch.float32 if self._weights.are_masters else dtype, config)
        if self._parallel.is_divided:
            self._optimizer.sum_squares = self._weights.sum_squares
            self._sampled_from.fill(self._weights, self._weights.parameters, self._version)
        temperature = sampling.temperature
        policy = TrainedPolicy(decoder, num_parameters, dtype, self._weights, self._parallel, pipeline, temperature)
        self._device = policy.device
        self._first_look = FirstLook(policy, self._reference, self._critic, recomputes=has_anchor)
        self._training = TrainingPass(policy, self._optimizer, config, has_anchor=has_anchor)
        self._room = Room(policy, self._optimizer, config, tell)
        self._routing = WatchedRouting(decoder, self._device, replays=config.replay_routing)
        self._bad_steps = BadSteps(config.max_bad_steps, bad_steps if self._parallel.is_main else None)
        self._writer = CheckpointWriter(self._parallel.checkpoint())
        self.writing: Callable[[], AbstractContextManager[None]] = nullcontext
        """What is open while a step overwrites the weights, from its first update to its last: in between they are no version
        of the policy. `ports.WeightSync.writing` keeps an engine that reads them waiting."""
        self._written = ExitStack()
        """Holds it until the last update."""

    def _make_reference(self, stored: StoredWeights | None) -> Reference:
        return Reference(
            self._decoder,
            self._dtype,
            self._sampling.temperature,
            offload=self._config.reference_offload,
            wrap=lambda network: self._parallel.wrap(network, self._dtype, stored),
        )

    def _make_critic(self, seed: int) -> TrainedCritic:
        if self._parallel.place.world > 1:
            raise ConfigError("rollouts.advantages = gae: the critic is trained by one process", "start one, without torchrun")
        return TrainedCritic(self._decoder, self._dtype, self._config, seed)

    @property
    def version(self) -> int:
        return self._version

    @property
    def masters(self) -> dict[str, Tensor]:
        """The float32 weights that are trained, by our parameter names. Where ranks divide them, all must ask at once, and
        rank 0 gets them, in host memory."""
        if not self._parallel.is_divided:
            return self._optimizer.masters
        whole = self._weights.full(self._optimizer.masters, torch.float32)
        return {name: tensor.cpu() for name, tensor in whole if self._parallel.is_main}

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, batch: TrainBatch) -> StepReport:
        with span("trainer.other", version=self._version):  # what of a step is none of its parts
            return self._step(batch)

    def _step(self, batch: TrainBatch) -> StepReport:
        self._room.find()
        found = self._look_first(batch)
        config, sampling = self._config, self._sampling
        # Made when the device has something to do meanwhile.
        numbers = cache(lambda: token_numbers(batch, config, sampling, found))
        parts = divide(batch, config.mini_batches, config.epochs, (self._seed, self._version))
        updates: list[StepReport] = []
        critic: list[CriticReport] = []
        bad: list[BadStep] = []
        with self._written:
            for number, groups in enumerate(parts):
                part, place = part_of(batch, groups), UpdatePlace(number, len(parts))
                own = numbers if part is batch else cache(lambda part=part: weighed(numbers(), part, config, sampling))
                updates.append(self._take_update(part, own, place, bad))
                if self._critic and not updates[-1].skipped:
                    critic.append(self._critic.train(part, own(), found["values"], self._room, self._version))
        if bad:
            self._bad_steps.bad(bad[0], batch)
        else:
            self._bad_steps.good()
        self._version += 1
        return step_report(batch, config, numbers(), found, updates, critic, self._room.take_retries())

    def _look_first(self, batch: TrainBatch) -> dict[str, np.ndarray]:
        """What other passes than the step's own have to say of each token: float32[T] by name, only what the recipe needs."""
        if not self._first_look.is_needed:
            return {}
        version = self._version
        looked = self._room.run(batch, self._room.forward, lambda plan: self._first_look.look(plan, version), version)
        return self._first_look.of_all(batch, looked)

    def _take_update(self, part: TrainBatch, numbers: Numbers, place: UpdatePlace, bad: list[BadStep]) -> StepReport:
        """One update of the policy by a mini-batch. One that is not finite is skipped, and `bad` gets to know why."""
        version = self._version
        plan, totals = self._room.train(part, lambda plan: self._train(plan, numbers), self._optimizer, version)
        if self._parallel.place.stages > 1:
            totals.agree(self._parallel)
        known = PlannedStep.of(plan, self._optimizer.learning_rate(version), training_flops(self._flops, plan.load))
        seen = self._update(totals, known.learning_rate, place, bad)
        beside = dict(zip(self._routing.names, seen.beside, strict=True))
        if plan.num_ranks > 1:
            beside["rank_imbalance"] = plan.rank_imbalance
        return totals.report(known, seen, beside)

    def _train(self, plan: MicroBatchPlan, numbers: Numbers) -> StepTotals:
        self._routing.clear()
        return self._training.run(plan, numbers, self._version)

    def _update(self, totals: StepTotals, learning_rate: float, place: UpdatePlace, bad: list[BadStep]) -> SeenStep:
        """Update the weights, unless the loss or the gradient is not finite, and return what was seen of it. The step's
        `writing` is open from its first update to its last."""
        with span("trainer.optimizer", device=True, version=self._version):
            self._weights.sum_gradients(self._optimizer.gradients())
            loss = self._parallel.sum_of(totals.loss)
            norms = self._optimizer.norms(loss)
            sent = totals.send(self._parallel, norms, self._routing.take(self._parallel))
            if place.is_first:
                self._written.enter_context(self.writing())
            self._optimizer.update(learning_rate, norms)
            self._weights.changed()
            if place.is_last:
                self._sampled_from.fill(self._weights, self._weights.owned, self._version)
                self._written.close()
            seen = sent.read()
        if seen.skipped:
            names, tokens = tuple(norms.bad_parameters()), tuple(totals.bad_tokens(self._parallel))
            bad.append(BadStep(self._version, float(loss), seen.grad_norm, names, tokens, place.name))
            self._tell(f"skipped: {bad[-1]}")
        return seen

    # ── what others get to see ─────────────────────────────────────────────────────────────────────────────────────────

    def weights(self) -> WeightSet:
        held = dict(self.network.named_parameters())
        return WeightSet(self._version, {name: held[name].detach() for name in self._trained})

    def memory(self) -> dict[str, int]:
        """Bytes by kind that this process holds now; `offloaded` are those in host memory for a device. Of weights that ranks
        divide, its part counts, and on rank 0 the copy to sample from; what a pass puts together or gets from other stages
        counts as activations."""
        parameters = (
            *self._weights.parameters.values(),
            *self._sampled_from.parameters,
            *(self._reference.parameters if self._reference else ()),
            *(self._critic.network.parameters() if self._critic else ()),
        )
        optimizers = [self._optimizer, *([self._critic.optimizer] if self._critic else [])]
        held = held_bytes(parameters, optimizers, self._device, offloads=self._config.offload_optimizer)
        return {**held, "activations_planned": self._room.activation_bytes}

    def queues(self) -> dict[str, float]:
        """For how long the other ranks have been silent, by name; none where there are no others. Does not block."""
        return {}

    # ── checkpoints ────────────────────────────────────────────────────────────────────────────────────────────────────

    def save(self, folder: Path) -> None:
        """Copies the state and returns; `flush` waits until it is on the disk. Where ranks divide the weights, all must call
        it, and each writes its part."""
        if not (self._parallel.is_main or self._parallel.is_divided):
            return
        state = dict(self._weights.written(self._optimizer.state()))
        if self._critic:
            state |= {CRITIC + name: tensor for name, tensor in self._critic.optimizer.state().items()}
        self._writer.save(folder, self._version, state)

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is on its way to the disk. Does not block."""
        return self._writer.is_writing

    def flush(self) -> None:
        """Wait until the last checkpoint is on the disk; raises what went wrong with it."""
        self._writer.flush()

    def load(self, folder: Path) -> None:
        self.load_state(load_checkpoint(folder))

    def load_state(self, saved: Checkpoint) -> None:
        """Go on from a checkpoint that was opened. Where ranks divide the weights, all must be given the same one; each reads
        what it holds, one tensor at a time."""
        tensors = saved.tensors
        if isinstance(tensors, SavedTensors):
            own = self._weights.own_state(tensors)
            self._optimizer.load_state(own, own.like)
        else:
            self._optimizer.load_state(tensors)
        self._weights.changed()
        self._sampled_from.fill(self._weights, self._weights.owned, self._version)
        if self._critic:
            critic = {name.removeprefix(CRITIC): tensors[name] for name in tensors if name.startswith(CRITIC)}
            self._critic.optimizer.load_state(critic)
        restore_random_state(saved.random)
        self._version = saved.version

    def share_state(self, version: int, random: Mapping[str, Any]) -> None:
        """Take over what rank 0 has loaded, tensor by tensor: for ranks that each hold all of it. All must call it at once."""
        state = self._optimizer.state()
        for tensor in state.values():
            self._parallel.broadcast(tensor)
        if not self._parallel.is_main:
            self._optimizer.load_state(state)
            restore_random_state(random)
            self._version = version

    def close(self) -> None:
        """Write the last checkpoint to its end, end the thread that writes them, and part from the other ranks, where there are
        some."""
        try:
            self._writer.close()
        finally:
            self._parallel.close()
