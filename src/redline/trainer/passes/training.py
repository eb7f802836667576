"""Forward and backward passes of an update: the gradient of its micro-batches, and what they add up to.

    micro-batch ──► forward ──► logprobs of the chosen tokens ──► loss ──► backward

What the network needs of a micro-batch is sent to the device first; what the loss needs can wait until the network is at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

from redline.config.sections.trainer import TrainerConfig
from redline.models.stage import Stage
from redline.telemetry import span
from redline.trainer.batches.micro_batches import MicroBatch, MicroBatchPlan
from redline.trainer.batches.staging import Staging, Values
from redline.trainer.loss.algorithm import LossInputs, policy_loss
from redline.trainer.loss.off_policy import correction_for
from redline.trainer.loss.policy import PolicyLoss
from redline.trainer.loss.token_numbers import TokenNumbers
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.parallel.passing import Found, Items, Passing
from redline.trainer.passes.forward import chosen_logprobs, network_inputs
from redline.trainer.passes.policy import TrainedPolicy
from redline.trainer.passes.totals import StepTotals

Numbers = Callable[[], TokenNumbers]
"""Makes what each token brings into the loss when it is first asked."""


@dataclass(slots=True, frozen=True)
class _Update:
    """One update, under way."""

    plan: MicroBatchPlan
    numbers: Numbers
    config: TrainerConfig
    """With the correction for the lag of its batch."""
    totals: StepTotals
    version: int


class TrainingPass:
    """Computes the gradients of one update after the other."""

    def __init__(self, policy: TrainedPolicy, optimizer: MasterAdamW, config: TrainerConfig, *, has_anchor: bool) -> None:
        """`has_anchor`: logprobs at the start of the step are recomputed, and totals look at them."""
        self._policy, self._optimizer, self._config = policy, optimizer, config
        self._has_anchor = has_anchor
        self._staging = Staging(policy.device)

    def run(self, plan: MicroBatchPlan, numbers: Numbers, version: int) -> StepTotals:
        """Forward and backward of every micro-batch: the gradients of this process are with the optimizer. Of stages the last
        alone has totals, until all `StepTotals.agree`."""
        totals, config = StepTotals.on(self._policy.device), correction_for(plan.batch.lags, self._config)
        update = _Update(plan, numbers, config, totals, version)
        items = self._staging.sent(self._inputs(update))
        if self._policy.pipeline is not None:
            self._run_stage(update, items)
            return totals
        for number, (micro_batch, inputs) in enumerate(items):
            with self._policy.weights.micro_batch(last=number == plan.num_micro_batches - 1):
                self._train_on(micro_batch, inputs, update)
            self._optimizer.accumulate()
        return totals

    def _inputs(self, update: _Update) -> Iterator[tuple[MicroBatch, dict[str, Values]]]:
        """Each micro-batch of this process with what the network needs of it."""
        parallel = self._policy.parallel
        parts = update.plan.of_rank(parallel.place.data_rank)
        while True:
            with span("trainer.pack", version=update.version):
                if (micro_batch := next(parts, None)) is None:
                    return
                inputs = network_inputs(micro_batch, parallel.share(micro_batch))
            yield micro_batch, inputs

    def _train_on(self, micro_batch: MicroBatch, inputs: dict[str, Tensor], update: _Update) -> None:
        policy = self._policy
        share = policy.parallel.share(micro_batch)
        with span("trainer.forward", device=True, version=update.version):
            found = chosen_logprobs(policy.decoder, micro_batch, share, inputs, policy.temperature)
            loss, seen = self._loss(micro_batch, found, update)
        with span("trainer.backward", device=True, version=update.version):
            loss.loss.backward()
        update.totals.add(micro_batch, loss, seen, found[1].detach())

    def _loss(self, micro_batch: MicroBatch, found: Found, update: _Update) -> tuple[PolicyLoss, dict[str, Tensor]]:
        """The loss of a micro-batch from the logprobs and entropies of its trained tokens, and what of them totals look at."""
        logprobs_M, entropy_M = found
        with span("trainer.pack", version=update.version):
            given = self._staging.send(update.numbers().of(micro_batch))
        bonus_M = entropy_M if update.config.entropy_coef else None
        seen = {
            "logprob": logprobs_M.detach(),
            "old logprob": given["old_logprobs_M"],
            "advantage": given["advantages_M"],
            **({"anchor logprob": given["anchor_logprobs_M"]} if self._has_anchor else {}),
        }
        return policy_loss(LossInputs(logprobs_M, **given, entropy_M=bonus_M), update.config), seen

    def _run_stage(self, update: _Update, items: Items) -> None:
        """This stage's part of `run`. The last stage alone computes the loss."""
        policy = self._policy

        def finish(micro_batch: MicroBatch, found: Found) -> Tensor:
            loss, seen = self._loss(micro_batch, found, update)
            update.totals.add(micro_batch, loss, seen, found[1].detach())
            return loss.loss

        assert policy.pipeline is not None
        assert isinstance(policy.decoder, Stage)
        count = update.plan.num_micro_batches
        policy.pipeline.train(Passing(policy.decoder, items, count, policy.temperature, finish, version=update.version))
        self._optimizer.accumulate()
