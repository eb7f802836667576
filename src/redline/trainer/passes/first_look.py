"""What a step needs to know of its tokens before it is taken: logprobs of a reference and of the policy as it is now, values of
a critic. Passes without gradients, over micro-batches of their own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from redline.telemetry import span
from redline.trainer.batches.micro_batches import MicroBatch, MicroBatchPlan
from redline.trainer.passes.critic import Critic
from redline.trainer.passes.forward import Recompute, by_token, recompute
from redline.trainer.passes.policy import TrainedPolicy
from redline.trainer.passes.reference import Reference
from redline.types import TrainBatch

Looked = tuple[list[MicroBatch], dict[str, list[Tensor]]]
"""The micro-batches of this process, and by name float32[M] of each."""


class FirstLook:
    """The passes that a recipe asks for."""

    def __init__(self, policy: TrainedPolicy, reference: Reference | None, critic: Critic | None, *, recomputes: bool) -> None:
        """`recomputes`: the policy's own logprobs are wanted, as an anchor for the updates of the step."""
        self._policy, self._reference, self._critic, self._recomputes = policy, reference, critic, recomputes

    @property
    def is_needed(self) -> bool:
        return bool(self._reference or self._critic or self._recomputes)

    def look(self, plan: MicroBatchPlan, version: int) -> Looked:
        """Pass this process's micro-batches through each network: `reference`, `anchor`, `values`. A stage that runs out of
        memory in one pass goes through the others before it raises: the other stages wait for its messages there."""
        parts = list(plan.of_rank(self._policy.parallel.place.data_rank))
        found: dict[str, list[Tensor]] = {}
        ran_out: torch.OutOfMemoryError | None = None
        for name, values in self._passes(parts, version).items():
            try:
                found[name] = values()
            except torch.OutOfMemoryError as error:
                if self._policy.pipeline is None:
                    raise
                ran_out = error.with_traceback(None)  # its frames would hold on to what took the memory
        if ran_out is not None:
            raise ran_out
        return parts, found

    def _passes(self, parts: list[MicroBatch], version: int) -> dict[str, Callable[[], list[Tensor]]]:
        policy, passes = self._policy, {}
        if reference := self._reference:
            passes["reference"] = lambda: reference.logprobs(parts, self._way("trainer.reference"))
        if self._recomputes:

            def anchor() -> list[Tensor]:
                with span("trainer.recompute", version=version):
                    return self._way("trainer.recompute")(policy.decoder, parts, policy.temperature, None)

            passes["anchor"] = anchor
        if critic := self._critic:
            passes["values"] = lambda: critic.values(parts)
        return passes

    def of_all(self, batch: TrainBatch, looked: Looked) -> dict[str, np.ndarray]:
        """By name float32[T] over the tokens of the batch, of what all processes have found. All must call it at once."""
        parts, found = looked
        return {name: self._by_token(batch, parts, values) for name, values in found.items()}

    def _way(self, doing: str) -> Recompute:
        """How micro-batches pass through a network without gradients; `doing` is the span of a stage that does."""
        if self._policy.pipeline is not None:
            return partial(self._policy.pipeline.recompute, doing=doing)
        return partial(recompute, share_of=self._policy.parallel.share)

    def _by_token(self, batch: TrainBatch, parts: list[MicroBatch], values: list[Tensor]) -> np.ndarray:
        mine_T = torch.from_numpy(by_token(parts, values, len(batch.tokens)))
        return self._policy.parallel.sum_of(mine_T.to(self._policy.device)).cpu().numpy()
