"""What the micro-batches of a step add up to, summed where they are computed and read once.

On a GPU the copy begins before the weights are updated, since nothing in it depends on that: a step is over for the host while
the device still writes the weights, and whatever the host does next is done meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from redline.trainer.batches.micro_batches import MicroBatch, MicroBatchPlan
from redline.trainer.loss.mismatch import mismatch_kl
from redline.trainer.loss.policy import PolicyLoss
from redline.trainer.optimizer.finite import BadToken, GradientNorms, bad_tokens
from redline.trainer.parallel.processes import Parallel
from redline.types import StepReport

SUMS = ("loss", "entropy", "clipped", "mismatch", "kl", "masked", "update_kl")
COUNTS = ("trained", "tokens")
QUANTITIES = ("logprob", "old logprob", "advantage", "anchor logprob")
"""What of a trained token decides whether a step is good."""
MOST_TOLD = 64
"""Bad tokens that each of several processes tells the others of."""


@dataclass(slots=True, frozen=True)
class PlannedStep:
    """What of a step's report is known before the device has come to its end."""

    learning_rate: float
    num_micro_batches: int
    imbalance: float
    num_padding_tokens: int
    flops: int

    @classmethod
    def of(cls, plan: MicroBatchPlan, learning_rate: float, flops: int) -> PlannedStep:
        return cls(learning_rate, plan.num_micro_batches, plan.imbalance, plan.num_padding_tokens, flops)


@dataclass(slots=True, frozen=True)
class SeenStep:
    """What the device has to say of a step."""

    sums: dict[str, float]
    """`SUMS` and `COUNTS` by name."""
    max_ratio: float
    grad_norm: float
    """Before clipping."""
    skipped: bool
    """Something is not finite, and the weights are as they were."""
    beside: list[float] = field(default_factory=list)
    """What was sent beside the totals."""


@dataclass(slots=True, frozen=True)
class SentStep:
    """On its way from the device."""

    values: Tensor
    """float64 on the host: `SUMS`, the largest ratio, the norm, whether to skip, and what was sent beside."""
    counts: list[float]
    arrived: torch.cuda.Event | None

    def read(self) -> SeenStep:
        """Waits for it."""
        if self.arrived is not None:
            self.arrived.synchronize()
        values = self.values.tolist()
        sums, (max_ratio, grad_norm, skipped, *beside) = values[: len(SUMS)], values[len(SUMS) :]
        named = dict(zip(SUMS + COUNTS, [*sums, *self.counts], strict=True))
        return SeenStep(named, max_ratio, grad_norm, bool(skipped), beside)


@dataclass(slots=True)
class StepTotals:
    """Sums over the micro-batches of this process."""

    sums: Tensor
    """float64, in the order of `SUMS`, where they are computed."""
    largest: Tensor
    """float64[1]: the largest log ratio between trainer and engine."""
    counts: tuple[int, int] = (0, 0)
    """In the order of `COUNTS`. A number sent to the device would wait until it has done all it was given."""
    has_kl: bool = False
    has_mask: bool = False
    has_anchor: bool = False
    seen: list[tuple[Tensor, Mapping[str, Tensor]]] = field(default_factory=list)
    """Sequence of each trained token, and the numbers that decide whether a step is good."""

    @classmethod
    def on(cls, device: torch.device) -> StepTotals:
        kind: dict[str, Any] = {"dtype": torch.float64, "device": device}
        return cls(torch.zeros(len(SUMS), **kind), torch.full((1,), -math.inf, **kind))

    @torch.no_grad()
    def add(self, micro_batch: MicroBatch, policy: PolicyLoss, numbers: Mapping[str, Tensor], entropy_M: Tensor) -> None:
        """`numbers` are `QUANTITIES`, the last where a pass has made them: the logprobs at the beginning of the step, which are
        then what the engine's are compared with. Nothing here waits for the device."""
        anchor_M = numbers.get("anchor logprob")
        log_ratio_M = ((numbers["logprob"] if anchor_M is None else anchor_M) - numbers["old logprob"]).double()
        self.has_anchor = anchor_M is not None
        self.has_kl, self.has_mask = policy.kl_M is not None, policy.correction_M is not None
        none = torch.zeros((), dtype=torch.float64, device=self.sums.device)
        parts = [
            policy.loss,
            entropy_M.sum(),
            policy.clipped_M.sum(),
            mismatch_kl(log_ratio_M).sum(),
            none if policy.kl_M is None else policy.kl_M.sum(),
            none if policy.correction_M is None else (policy.correction_M == 0).sum(),
            none if anchor_M is None else mismatch_kl(numbers["logprob"] - anchor_M).sum(),
        ]
        self.sums += torch.stack([part.to(torch.float64) for part in parts])
        self.counts = self.counts[0] + len(log_ratio_M), self.counts[1] + len(micro_batch.tokens)
        if len(log_ratio_M):
            self.largest = torch.maximum(self.largest, log_ratio_M.max())
        self.seen.append((torch.from_numpy(micro_batch.sequence_M), numbers))

    def agree(self, parallel: Parallel) -> None:
        """Take over which means there are from the processes that compute the loss, where others do not."""
        known = torch.tensor([self.has_kl, self.has_mask, self.has_anchor]).to(self.sums)
        self.has_kl, self.has_mask, self.has_anchor = (bool(each) for each in parallel.max_of(known).tolist())

    @property
    def loss(self) -> Tensor:
        return self.sums[0]

    def send(self, parallel: Parallel, norms: GradientNorms, beside: Tensor) -> SentStep:
        """Send the sums of all processes to the host, and numbers `beside` them, float64: the one copy from the device in a
        step. Later work does not delay it."""
        counts = self._counts(parallel)
        of_gradient = torch.stack([norms.total, norms.skip]).to(self.sums)
        found = torch.cat([parallel.sum_of(self.sums), parallel.max_of(self.largest).exp(), of_gradient, beside])
        if not found.is_cuda:
            return SentStep(found, counts, None)
        on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        on_host.copy_(found, non_blocking=True)
        return SentStep(on_host, counts, torch.cuda.current_stream(found.device).record_event())

    def _counts(self, parallel: Parallel) -> list[float]:
        """The counts of all processes. A single process knows them without asking its device."""
        if parallel.place.world == 1:
            return [float(count) for count in self.counts]
        return parallel.sum_of(torch.tensor(self.counts).to(self.sums)).tolist()

    def report(self, known: PlannedStep, seen: SeenStep, extra: Mapping[str, float]) -> StepReport:
        sums = seen.sums
        trained = sums["trained"] or math.nan  # without a trained token there is no mean
        optional = {"kl": self.has_kl, "masked": self.has_mask, "update_kl": self.has_anchor}
        return StepReport(
            loss=sums["loss"],
            grad_norm=seen.grad_norm,
            learning_rate=known.learning_rate,
            entropy=sums["entropy"] / trained,
            clip_fraction=sums["clipped"] / trained,
            mismatch_kl=sums["mismatch"] / trained,
            max_ratio=seen.max_ratio if sums["trained"] else math.nan,
            num_tokens=int(sums["tokens"]),
            num_trained_tokens=int(sums["trained"]),
            num_micro_batches=known.num_micro_batches,
            imbalance=known.imbalance,
            num_padding_tokens=known.num_padding_tokens,
            flops=known.flops,
            skipped=seen.skipped,
            extra={name: sums[name] / trained for name, there in optional.items() if there} | dict(extra),
        )

    def bad_tokens(self, parallel: Parallel) -> list[BadToken]:
        """Trained tokens with a number that is not finite; of several processes, which must ask at once, the first of each."""
        own = [token for sequence_M, numbers in self.seen for token in bad_tokens(numbers, sequence_M)]
        place = parallel.place
        if place.world == 1:
            return own
        table = torch.full((place.world, MOST_TOLD, 3), -1)
        for row, token in zip(table[place.rank], own, strict=False):
            row[:] = torch.tensor([token.sequence, token.token, QUANTITIES.index(token.quantity)])
        found = parallel.max_of(table.to(self.sums.device)).flatten(0, 1).tolist()
        # Processes that share a micro-batch tell of the same tokens.
        return [BadToken(s, t, QUANTITIES[q]) for s, t, q in dict.fromkeys(map(tuple, found)) if s >= 0]
