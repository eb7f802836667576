"""How many tokens go through the network at once, on every rank alike, and what happens where memory runs out.

    one process, ranks with all weights, stages      the step begins again with smaller micro-batches, on all ranks
    ranks that divide weights or tokens              all end, with the rank, its tokens and the key to change

Ranks that divide weights or tokens wait for each other inside every layer, and nothing but the end of a process frees them from
it: neither gloo nor NCCL gives up what one side does not send. A stage that runs out still sends what the others wait for
(`parallel/pipeline.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from redline.config.sections.trainer import TrainerConfig
from redline.models.sizes.memory import message_bytes, parameter_bytes, token_bytes
from redline.telemetry import span
from redline.trainer.batches.budget import FORWARD_RATIO, Budgets, TokenBudget, find_budgets, with_oom_retry
from redline.trainer.batches.cost import CostModel
from redline.trainer.batches.micro_batches import MicroBatchPlan, plan_micro_batches
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.optimizer.quantized_states import bytes_per_moments
from redline.trainer.passes.policy import TrainedPolicy
from redline.types import TrainBatch

Result = TypeVar("Result")


class Room:
    """The token budgets of a trainer's passes."""

    def __init__(
        self, policy: TrainedPolicy, optimizer: MasterAdamW, config: TrainerConfig, tell: Callable[[str], None]
    ) -> None:
        """`tell` is called with budgets that were found here, and with what became of them."""
        self._policy, self._optimizer, self._config, self._tell = policy, optimizer, config, tell
        decoder, place = policy.decoder, policy.parallel.place
        self._cost = CostModel.of(decoder.spec, policy.num_parameters)
        code = decoder.training_code(policy.dtype)
        self._messages = message_bytes(decoder.spec, policy.dtype, place.stages, place.stage)
        self._per_token = self._messages.beside(
            token_bytes(decoder.spec, policy.num_parameters, policy.dtype, config.gradient_checkpointing, code)
        )
        self._largest = 0
        self.training = TokenBudget(0)
        self.forward = TokenBudget(0, "trainer.max_tokens_per_forward")
        self.critic = TokenBudget(config.critic.max_tokens_per_micro_batch, "trainer.critic.max_tokens_per_micro_batch")

    @property
    def activation_bytes(self) -> int:
        """What the largest micro-batch that was trained on takes, as it is planned."""
        return self._largest * self._per_token.training

    def take_retries(self) -> int:
        """Return how often memory ran out, and a pass began again, since the last call."""
        return sum(budget.take_retries() for budget in (self.training, self.forward, self.critic))

    def find(self) -> None:
        """Find the budgets, the first time: at the first step everything else that takes memory is there. All ranks must call
        it at once."""
        if self.training.current:
            return
        given = self._config.max_tokens_per_micro_batch
        budgets = Budgets(given, FORWARD_RATIO * given, "as the recipe says") if given else self._planned()
        forward = self._config.max_tokens_per_forward or budgets.forward
        self.training.current, self.forward.current = self._smallest_of(budgets.training, forward)
        if not given:
            self._tell(f"trainer.max_tokens_per_micro_batch = {self.training.current} ({budgets.reason})")

    def train(
        self, batch: TrainBatch, run: Callable[[MicroBatchPlan], Result], optimizer: MasterAdamW, version: int
    ) -> tuple[MicroBatchPlan, Result]:
        """`run` under the budget of passes with gradients, and also return the plan that was right."""
        plan, result = self.run(batch, self.training, lambda plan: (plan, run(plan)), version, optimizer)
        self._largest = max(self._largest, plan.largest_micro_batch)
        return plan, result

    def run(
        self,
        batch: TrainBatch,
        budget: TokenBudget,
        run: Callable[[MicroBatchPlan], Result],
        version: int,
        optimizer: MasterAdamW | None = None,
    ) -> Result:
        """`run` a plan of the batch under a budget, again under a smaller one where memory runs out: what `optimizer` has got
        by then is discarded. Raises `NoRoomError` where that is of no use, or no way."""

        def plan(max_tokens: int) -> MicroBatchPlan:
            with span("trainer.pack", version=version):
                return self._plan(batch, max_tokens)

        if self._policy.parallel.meets_in_layers:
            return self._run_once(budget, plan(budget.current), run)
        undo = optimizer.discard if optimizer else lambda: None
        return with_oom_retry(budget, plan, run, undo, self._tell, self._on_any_rank)

    def _run_once(self, budget: TokenBudget, planned: MicroBatchPlan, run: Callable[[MicroBatchPlan], Result]) -> Result:
        place = self._policy.parallel.place
        try:
            return run(planned)
        except torch.OutOfMemoryError as error:
            each = -(-planned.largest_micro_batch // place.sequence_ranks)
            raise budget.no_room(each, -(-planned.longest_sequence // place.sequence_ranks)) from error

    def _plan(self, batch: TrainBatch, max_tokens: int) -> MicroBatchPlan:
        place = self._policy.parallel.place
        ranks, limit = place.data_ranks * place.stages, self._policy.decoder.spec.max_positions
        plan = plan_micro_batches(batch, max_tokens * place.sequence_ranks, ranks, self._cost, limit)
        return plan if place.stages == 1 else plan.in_turn(place.data_ranks)

    def _on_any_rank(self, here: bool) -> bool:
        """Whether memory ran out on some rank. All must ask at once."""
        parallel = self._policy.parallel
        if parallel.place.world == 1:
            return here  # asking the device would wait for all it was given to do
        return bool(parallel.max_of(torch.tensor([float(here)], device=self._policy.device)))

    def _smallest_of(self, *numbers: int) -> list[int]:
        """The least that any rank has of each: all must divide a batch in the same way."""
        parallel = self._policy.parallel
        if parallel.place.world == 1:
            return list(numbers)
        own = torch.tensor(numbers, dtype=torch.float64, device=self._policy.device)
        return [int(-n) for n in parallel.max_of(-own).tolist()]

    def _planned(self) -> Budgets:
        policy, config = self._policy, self._config
        parameters = parameter_bytes(
            policy.decoder,
            policy.dtype,
            bytes_per_moments=bytes_per_moments(config.optimizer_states),
            offloaded=config.offload_optimizer,
        )
        own = parameters.weights + parameters.masters + parameters.moments
        if policy.weights.are_masters:
            parameters = policy.weights.planned_bytes(policy.dtype, moments=self._optimizer.state_bytes)
            own = parameters.masters + parameters.moments  # weights are put together later
        return find_budgets(policy.decoder, policy.dtype, parameters, own, config.gradient_checkpointing, self._messages)
