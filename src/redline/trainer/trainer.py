"""The trainer: one `TrainBatch` in, one step out: one version of the policy, by one update of AdamW or several.

    batch ──► reference, values, old logprobs (only where the recipe needs them) ──► an advantage for every token
          ──► mini-batches, each an update:
                micro-batches ──► forward ──► logprobs of the chosen tokens ──► loss ──► backward, each of them
                ──► AdamW ──► weights in place

The weights of the mean are those of the whole mini-batch, so its loss is a sum over tokens: micro-batches of any size, on any
number of processes, add up to the same gradient. By default the batch is the one mini-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from redline.config.algorithms import recomputes_old_logprobs
from redline.config.sections.rollouts import AdvantageEstimator
from redline.config.sections.trainer import TrainerConfig
from redline.errors import ConfigError
from redline.models.copies import empty_copy
from redline.models.decoder import Decoder
from redline.models.files.hf import AnyDecoder
from redline.models.files.stored import StoredWeights
from redline.models.lora.trainable import add_adapter
from redline.models.sizes.flops import NetworkCost, training_flops
from redline.models.sizes.in_use import tensor_bytes
from redline.models.sizes.memory import parameter_bytes, token_bytes
from redline.models.stage import Stage
from redline.models.value_head import value_network
from redline.telemetry import span
from redline.trainer.batches.budget import Budgets, TokenBudget, find_budgets, with_oom_retry
from redline.trainer.batches.cost import CostModel
from redline.trainer.batches.micro_batches import MicroBatch, MicroBatchPlan, plan_micro_batches
from redline.trainer.batches.mini_batches import UpdatePlace, divide, part_of
from redline.trainer.batches.staging import Staging, Values
from redline.trainer.checkpoints.background import CheckpointWriter
from redline.trainer.checkpoints.folder import Checkpoint, load_checkpoint
from redline.trainer.checkpoints.random_state import restore_random_state
from redline.trainer.checkpoints.tensors import SavedTensors
from redline.trainer.loss.algorithm import LossInputs, policy_loss
from redline.trainer.loss.off_policy import correction_for
from redline.trainer.loss.policy import PolicyLoss
from redline.trainer.loss.token_numbers import TokenNumbers, batch_advantages, batch_weights, reward_kl
from redline.trainer.optimizer import schedule
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.optimizer.finite import BadStep, BadSteps
from redline.trainer.optimizer.quantized_states import bytes_per_moments
from redline.trainer.parallel.passing import Found, Items, Passing
from redline.trainer.parallel.processes import Parallel
from redline.trainer.passes.critic import Critic, CriticReport, critic_settings, explained_variance
from redline.trainer.passes.forward import Recompute, by_token, chosen_logprobs, network_inputs, recompute
from redline.trainer.passes.reference import Reference
from redline.trainer.passes.reports import of_step
from redline.trainer.passes.totals import PlannedStep, SeenStep, StepTotals
from redline.types import StepReport, TrainBatch, WeightSet

if TYPE_CHECKING:
    from redline.trainer.parallel.pipeline import Pipeline

FORWARD_RATIO = 4
"""Tokens of a pass without gradients for each of one with them, where only the latter's budget is given."""
CRITIC = "critic/"
"""What the names of the critic's state begin with."""

Result = TypeVar("Result")


@dataclass(slots=True, frozen=True)
class Sampling:
    """What the trainer has to know of the rollouts that make its batches, as the recipe's section says."""

    temperature: float = 1.0
    advantages: AdvantageEstimator = "group"
    max_new_tokens: int = 1


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
        self._has_anchor = recomputes and config.updates_per_step > 1
        self._seed, self._version = seed, 0
        self._decoder, self._dtype, self._config, self._sampling = decoder, dtype, config, sampling
        self._parallel = parallel or Parallel()
        self._tell = tell
        if config.lora.rank:
            add_adapter(decoder, config.lora, dtype, seed)
        self._recompute_in_backward()
        self._trained = [name for name, parameter in decoder.named_parameters() if parameter.requires_grad]
        num_parameters = sum(parameter.numel() for parameter in decoder.parameters())
        self._cost = CostModel.of(decoder.spec, num_parameters)
        self._flops = NetworkCost.of(decoder)
        is_divided = self._parallel.is_divided
        whole: AnyDecoder | None = None
        if is_divided and self._parallel.is_main:
            assert self._parallel.device is not None
            whole = empty_copy(decoder, dtype, self._parallel.device)
        self._decoder = decoder = self._parallel.cut(decoder)
        self.network: AnyDecoder = decoder if whole is None else whole
        """The policy as one network, to sample from: the trainer's own, or where ranks divide its weights a copy that rank 0
        alone has and every step fills."""
        self._pipeline = self._parallel.pipeline(dtype)
        self._reference: Reference | None = None
        if config.kl_coef:
            self._reference = Reference(
                decoder,
                dtype,
                sampling.temperature,
                offload=config.reference_offload,
                wrap=lambda network: self._parallel.wrap(network, dtype, stored),
            )
        self._critic_settings = critic_settings(config)
        self._critic_optimizer: MasterAdamW | None = None
        self._critic = self._make_critic(seed + 1) if sampling.advantages == "gae" else None
        self._weights = self._parallel.wrap(decoder, dtype, stored)
        self._device = next(iter(self._weights.parameters.values())).device
        self._optimizer = MasterAdamW(self._weights.owned, torch.float32 if self._weights.are_masters else dtype, config)
        if is_divided:
            self._optimizer.sum_squares = self._weights.sum_squares
            self._fill_network(self._weights.parameters)
        code = decoder.training_code(dtype)
        self._token_bytes = token_bytes(decoder.spec, num_parameters, dtype, config.gradient_checkpointing, code)
        self._largest_micro_batch = 0
        self._staging = Staging(self._device)
        self._budget: TokenBudget | None = None
        self._forward_budget = TokenBudget(0, "trainer.max_tokens_per_forward")
        self._critic_budget = TokenBudget(config.critic.max_tokens_per_micro_batch, "trainer.critic.max_tokens_per_micro_batch")
        self._bad_steps = BadSteps(config.max_bad_steps, bad_steps if self._parallel.is_main else None)
        self._writer = CheckpointWriter(self._parallel.checkpoint())
        self.writing: Callable[[], AbstractContextManager[None]] = nullcontext
        """What is open while a step overwrites the weights, from its first update to its last: in between they are no version
        of the policy. `ports.WeightSync.writing` keeps an engine that reads them waiting."""
        self._written = ExitStack()
        """Holds it until the last update."""

    def _recompute_in_backward(self) -> None:
        kind = self._config.gradient_checkpointing
        if isinstance(self._decoder, Decoder):
            self._decoder.recompute_in_backward(kind)
        elif kind != "none":
            raise ConfigError(
                f"trainer.gradient_checkpointing = {kind}: model family {self._decoder.spec.family!r} is run by transformers",
                "set trainer.gradient_checkpointing=none",
            )

    def _make_critic(self, seed: int) -> Critic:
        if self._parallel.place.world > 1:
            raise ConfigError("rollouts.advantages = gae: the critic is trained by one process", "start one, without torchrun")
        settings = self._critic_settings
        network = value_network(self._decoder, settings.lora, self._dtype, seed)
        self._critic_optimizer = MasterAdamW(network, self._dtype, settings)
        return Critic(network, self._critic_optimizer, settings.critic.clip)

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
        budget = self._budgets()
        found = self._look_first(batch)
        numbers = cache(lambda: self._numbers(batch, found))  # made when the device has something to do meanwhile
        parts = divide(batch, self._config.mini_batches, self._config.epochs, (self._seed, self._version))
        updates: list[StepReport] = []
        critic: list[CriticReport] = []
        bad: list[BadStep] = []
        with self._written:
            for number, groups in enumerate(parts):
                part, place = part_of(batch, groups), UpdatePlace(number, len(parts))
                weighed = numbers if part is batch else cache(lambda part=part: self._weighed(numbers(), part))
                updates.append(self._take_update(part, budget, weighed, place, bad))
                if self._critic and not updates[-1].skipped:
                    critic.append(self._train_critic(part, weighed(), found["values"]))
        if bad:
            self._bad_steps.bad(bad[0], batch)
        else:
            self._bad_steps.good()
        self._version += 1
        return self._report(batch, numbers(), updates, critic, found)

    def _take_update(
        self,
        part: TrainBatch,
        budget: TokenBudget,
        numbers: Callable[[], TokenNumbers],
        place: UpdatePlace,
        bad: list[BadStep],
    ) -> StepReport:
        """One update of the policy by a mini-batch. One that is not finite is skipped, and `bad` gets to know why."""
        plan, totals = self._in_memory(part, budget, lambda plan: (plan, self._run(plan, numbers)), self._optimizer)
        self._largest_micro_batch = max(self._largest_micro_batch, plan.largest_micro_batch)
        known = PlannedStep.of(plan, self._optimizer.learning_rate(self._version), training_flops(self._flops, plan.load))
        return totals.report(known, self._update(totals, known.learning_rate, place, bad), {})

    def _weighed(self, numbers: TokenNumbers, part: TrainBatch) -> TokenNumbers:
        """The numbers of the batch, with the weights of the mean over a part of it."""
        return replace(numbers, weights_T=batch_weights(part, self._config, self._sampling.max_new_tokens))

    def _report(
        self,
        batch: TrainBatch,
        numbers: TokenNumbers,
        updates: list[StepReport],
        critic: list[CriticReport],
        found: Mapping[str, np.ndarray],
    ) -> StepReport:
        report = of_step(updates) if self._config.updates_per_step > 1 else updates[0]
        extra = dict(report.extra)
        if numbers.reward_kl is not None:
            extra["kl"] = numbers.reward_kl
        if critic:
            assert numbers.returns_T is not None
            explained = explained_variance(found["values"][batch.loss_mask], numbers.returns_T[batch.loss_mask])
            extra |= CriticReport.of_step(critic, explained).metrics
        if correction_for(batch.lags, self._config) is not self._config:
            extra["lag_corrected"] = 1.0
        if retries := sum(budget.take_retries() for budget in (self._budgets(), self._forward_budget, self._critic_budget)):
            extra["oom_retries"] = float(retries)
        return replace(report, extra=extra)

    def _plan(self, batch: TrainBatch, max_tokens: int) -> MicroBatchPlan:
        place = self._parallel.place
        with span("trainer.pack", version=self._version):
            ranks, limit = place.data_ranks * place.stages, self._decoder.spec.max_positions
            plan = plan_micro_batches(batch, max_tokens * place.sequence_ranks, ranks, self._cost, limit)
            return plan if place.stages == 1 else plan.in_turn(place.data_ranks)

    def _in_memory(
        self,
        batch: TrainBatch,
        budget: TokenBudget,
        run: Callable[[MicroBatchPlan], Result],
        optimizer: MasterAdamW | None = None,
    ) -> Result:
        """`run` a plan under the budget, again under a smaller one where memory runs out: what `optimizer` has got by then is
        discarded."""
        if self._parallel.is_divided or self._parallel.place.sequence_ranks > 1:
            # Ranks that meet inside a pass would wait forever for one that ran out.
            return run(self._plan(batch, budget.current))
        undo = optimizer.discard if optimizer else lambda: None
        return with_oom_retry(budget, lambda tokens: self._plan(batch, tokens), run, undo, self._tell, self._on_any_rank)

    def _run(self, plan: MicroBatchPlan, numbers: Callable[[], TokenNumbers]) -> StepTotals:
        """Forward and backward of every micro-batch."""
        totals = StepTotals.on(self._device)
        config = correction_for(plan.batch.lags, self._config)
        items = self._staging.sent(self._inputs(plan))
        if self._pipeline is not None:
            return self._run_stage(self._pipeline, plan, items, numbers, config, totals)
        for number, (micro_batch, inputs) in enumerate(items):
            with self._weights.micro_batch(last=number == plan.num_micro_batches - 1):
                self._train_on(micro_batch, inputs, numbers, config, totals)
            self._optimizer.accumulate()
        return totals

    def _inputs(self, plan: MicroBatchPlan) -> Iterator[tuple[MicroBatch, dict[str, Values]]]:
        """Each micro-batch with what the network needs of it. What the loss needs can wait until the network is at work."""
        parts = plan.of_rank(self._parallel.place.data_rank)
        while True:
            with span("trainer.pack", version=self._version):
                if (micro_batch := next(parts, None)) is None:
                    return
                inputs = network_inputs(micro_batch, self._parallel.share(micro_batch))
            yield micro_batch, inputs

    def _train_on(
        self,
        micro_batch: MicroBatch,
        inputs: dict[str, Tensor],
        numbers: Callable[[], TokenNumbers],
        config: TrainerConfig,
        totals: StepTotals,
    ) -> None:
        share = self._parallel.share(micro_batch)
        with span("trainer.forward", device=True, version=self._version):
            found = chosen_logprobs(self._decoder, micro_batch, share, inputs, self._sampling.temperature)
            policy, seen = self._loss(micro_batch, found, numbers, config)
        with span("trainer.backward", device=True, version=self._version):
            policy.loss.backward()
        totals.add(micro_batch, policy, seen, found[1].detach())

    def _loss(
        self,
        micro_batch: MicroBatch,
        found: Found,
        numbers: Callable[[], TokenNumbers],
        config: TrainerConfig,
    ) -> tuple[PolicyLoss, dict[str, Tensor]]:
        """The loss of a micro-batch from the logprobs and entropies of its trained tokens, and what of them totals look at."""
        logprobs_M, entropy_M = found
        with span("trainer.pack", version=self._version):
            given = self._staging.send(numbers().of(micro_batch))
        bonus_M = entropy_M if config.entropy_coef else None
        seen = {
            "logprob": logprobs_M.detach(),
            "old logprob": given["old_logprobs_M"],
            "advantage": given["advantages_M"],
            **({"anchor logprob": given["anchor_logprobs_M"]} if self._has_anchor else {}),
        }
        return policy_loss(LossInputs(logprobs_M, **given, entropy_M=bonus_M), config), seen

    def _run_stage(
        self,
        pipeline: Pipeline,
        plan: MicroBatchPlan,
        items: Items,
        numbers: Callable[[], TokenNumbers],
        config: TrainerConfig,
        totals: StepTotals,
    ) -> StepTotals:
        """This stage's part of `_run`. The last stage alone computes the loss, and has totals of its own."""

        def finish(micro_batch: MicroBatch, found: Found) -> Tensor:
            policy, seen = self._loss(micro_batch, found, numbers, config)
            totals.add(micro_batch, policy, seen, found[1].detach())
            return policy.loss

        longest = int(plan.tokens_RN[self._parallel.place.data_rank].max(initial=1))
        size, temperature = (plan.num_micro_batches, longest), self._sampling.temperature
        assert isinstance(self._decoder, Stage)
        pipeline.train(Passing(self._decoder, items, *size, temperature, finish, version=self._version))
        self._optimizer.accumulate()
        totals.agree(self._parallel)
        return totals

    def _update(self, totals: StepTotals, learning_rate: float, place: UpdatePlace, bad: list[BadStep]) -> SeenStep:
        """Update the weights, unless the loss or the gradient is not finite, and return what was seen of it. The step's
        `writing` is open from its first update to its last."""
        with span("trainer.optimizer", device=True, version=self._version):
            self._weights.sum_gradients(self._optimizer.gradients())
            loss = self._parallel.sum_of(totals.loss)
            norms = self._optimizer.norms(loss)
            sent = totals.send(self._parallel, norms)
            if place.is_first:
                self._written.enter_context(self.writing())
            self._optimizer.update(learning_rate, norms)
            self._weights.changed()
            if place.is_last:
                self._fill_network(self._weights.owned)
                self._written.close()
            seen = sent.read()
        if seen.skipped:
            names, tokens = tuple(norms.bad_parameters()), tuple(totals.bad_tokens(self._parallel))
            bad.append(BadStep(self._version, float(loss), seen.grad_norm, names, tokens, place.name))
            self._tell(f"skipped: {bad[-1]}")
        return seen

    @torch.no_grad()
    def _fill_network(self, parts: Mapping[str, Tensor]) -> None:
        """Put weights that ranks divide together in rank 0's copy, one tensor at a time."""
        if not self._parallel.is_divided:
            return
        with span("weight_sync.gather", device=True, version=self._version):
            into = dict(self.network.named_parameters()) if self._parallel.is_main else {}
            for name, whole in self._weights.full(parts, self._dtype):
                if self._parallel.is_main:
                    into[name].copy_(whole)

    def _on_any_rank(self, here: bool) -> bool:
        if self._parallel.place.world == 1:
            return here  # asking the device would wait for all it was given to do
        return bool(self._parallel.max_of(torch.tensor([float(here)], device=self._device)))

    # ── what a step needs to know first ────────────────────────────────────────────────────────────────────────────────

    def _look_first(self, batch: TrainBatch) -> dict[str, np.ndarray]:
        """What other passes than the step's own have to say of each token: float32[T] by name, only what the recipe needs."""
        if not (self._reference or self._critic or self._has_anchor):
            return {}
        parts, values = self._in_memory(batch, self._forward_budget, self._look)
        return {name: self._by_token(batch, parts, each) for name, each in values.items()}

    def _numbers(self, batch: TrainBatch, found: Mapping[str, np.ndarray]) -> TokenNumbers:
        """What each token brings into the loss."""
        config, reference_T = self._config, found.get("reference")
        kl_M = reward_kl(batch, config, reference_T)
        advantages_T, returns_T = batch_advantages(batch, self._sampling.advantages, config, kl_M, found.get("values"))
        weights_T = batch_weights(batch, config, self._sampling.max_new_tokens)
        in_loss = reference_T if config.kl_in == "loss" else None
        mean_kl = None if kl_M is None else float(kl_M.mean())
        return TokenNumbers(weights_T, advantages_T, found.get("anchor"), in_loss, returns_T, mean_kl)

    def _look(self, plan: MicroBatchPlan) -> tuple[list[MicroBatch], dict[str, list[Tensor]]]:
        """Passes without gradients over this process's micro-batches: float32[M] of each, by what they are."""
        parts = list(plan.of_rank(self._parallel.place.data_rank))
        found: dict[str, list[Tensor]] = {}
        if self._reference:
            found["reference"] = self._reference.logprobs(parts, self._way("trainer.reference"))
        if self._has_anchor:
            with span("trainer.recompute", version=self._version):
                compute = self._way("trainer.recompute")
                found["anchor"] = compute(self._decoder, parts, self._sampling.temperature, None)
        if self._critic:
            found["values"] = self._critic.values(parts)
        return parts, found

    def _way(self, doing: str) -> Recompute:
        """How micro-batches pass through a network without gradients; `doing` is the span of a stage that does."""
        if self._pipeline is not None:
            return partial(self._pipeline.recompute, doing=doing)
        return partial(recompute, share_of=self._parallel.share)

    def _by_token(self, batch: TrainBatch, parts: list[MicroBatch], values: list[Tensor]) -> np.ndarray:
        """float32[T], of all processes."""
        mine_T = torch.from_numpy(by_token(parts, values, len(batch.tokens)))
        return self._parallel.sum_of(mine_T.to(self._device)).cpu().numpy()

    def _train_critic(self, batch: TrainBatch, numbers: TokenNumbers, values_T: np.ndarray) -> CriticReport:
        critic, returns_T = self._critic, numbers.returns_T
        assert critic is not None
        assert returns_T is not None
        learning_rate = schedule.learning_rate(self._critic_settings, self._version)
        return self._in_memory(
            batch,
            self._critic_budget,
            lambda plan: critic.step(plan.of_rank(0), values_T, returns_T, numbers.weights_T, learning_rate),
            self._critic_optimizer,
        )

    def _budgets(self) -> TokenBudget:
        """Found at the first step, when everything else that takes memory is there."""
        if self._budget is None:
            given = self._config.max_tokens_per_micro_batch
            budgets = Budgets(given, FORWARD_RATIO * given, "as the recipe says") if given else self._planned_budgets()
            training, forward = self._smallest_of(budgets.training, self._config.max_tokens_per_forward or budgets.forward)
            self._budget = TokenBudget(training)
            self._forward_budget.current = forward
            if not given:
                self._tell(f"trainer.max_tokens_per_micro_batch = {training} ({budgets.reason})")
        return self._budget

    def _smallest_of(self, *numbers: int) -> list[int]:
        """The least that any rank has of each: all must divide a batch in the same way."""
        if self._parallel.place.world == 1:
            return list(numbers)
        own = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        return [int(-n) for n in self._parallel.max_of(-own).tolist()]

    def _planned_budgets(self) -> Budgets:
        config, weights = self._config, self._weights
        parameters = parameter_bytes(
            self._decoder,
            self._dtype,
            bytes_per_moments=bytes_per_moments(config.optimizer_states),
            offloaded=config.offload_optimizer,
        )
        own = parameters.weights + parameters.masters + parameters.moments
        if weights.are_masters:
            parameters = weights.planned_bytes(self._dtype, moments=self._optimizer.state_bytes)
            own = parameters.masters + parameters.moments  # weights are put together later
        return find_budgets(self._decoder, self._dtype, parameters, own, config.gradient_checkpointing)

    # ── what others get to see ─────────────────────────────────────────────────────────────────────────────────────────

    def weights(self) -> WeightSet:
        held = dict(self.network.named_parameters())
        return WeightSet(self._version, {name: held[name].detach() for name in self._trained})

    def memory(self) -> dict[str, int]:
        """Bytes by kind that this process holds now; `offloaded` are those in host memory for a device. Of weights that ranks
        divide, its part counts, and on rank 0 the copy to sample from; what a pass puts together counts as activations."""
        device = self._device.type
        weights = tensor_bytes(
            (
                *self._weights.parameters.values(),
                *(self.network.parameters() if self._parallel.is_divided and self._parallel.is_main else ()),
                *(self._reference.parameters if self._reference else ()),
                *(self._critic.network.parameters() if self._critic else ()),
            )
        )
        optimizers = [self._optimizer, *([self._critic_optimizer] if self._critic_optimizer else [])]
        states, away = sum(optimizer.state_bytes for optimizer in optimizers), self._config.offload_optimizer
        offloaded = weights.total() - weights[device] + (states if away else 0)
        return {
            "weights": weights[device],
            "gradients": sum(optimizer.gradient_bytes for optimizer in optimizers),
            "optimizer": 0 if away else states,
            "activations_planned": self._largest_micro_batch * self._token_bytes.training,
            **({"offloaded": offloaded} if offloaded else {}),
        }

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
        if self._critic_optimizer is not None:
            state |= {CRITIC + name: tensor for name, tensor in self._critic_optimizer.state().items()}
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
        self._optimizer.load_state(self._weights.own_state(tensors) if isinstance(tensors, SavedTensors) else tensors)
        self._weights.changed()
        self._fill_network(self._weights.owned)
        if self._critic_optimizer is not None:
            critic = {name.removeprefix(CRITIC): tensors[name] for name in tensors if name.startswith(CRITIC)}
            self._critic_optimizer.load_state(critic)
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
