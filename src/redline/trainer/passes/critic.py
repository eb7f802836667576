"""The critic of PPO: what the return will be, from where each token was chosen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from redline.config.sections.trainer import TrainerConfig
from redline.models.files.hf import AnyDecoder
from redline.models.value_head import ValueNetwork, value_network
from redline.telemetry import span
from redline.trainer.batches.micro_batches import MicroBatch, MicroBatchPlan
from redline.trainer.loss.token_numbers import TokenNumbers
from redline.trainer.optimizer import schedule
from redline.trainer.optimizer.adamw import MasterAdamW
from redline.trainer.passes.forward import chosen_values
from redline.trainer.passes.room import Room
from redline.types import TrainBatch


class Optimizer(Protocol):
    """What the critic needs of one that owns its network's trainable parameters."""

    def accumulate(self) -> None: ...

    def step(self, learning_rate: float) -> float:
        """The gradient norm before clipping; one that is not finite changes nothing."""
        ...


@dataclass(slots=True, frozen=True)
class CriticReport:
    """What one step of the critic did."""

    value_loss: float
    explained_variance: float
    """1 - Var(R - V) / Var(R), of the values that the advantages were made with: 1 is perfect, 0 no better than a constant. NaN
    where all returns are equal."""
    clip_fraction: float
    """Share of the values whose gradient clipping removed; a value inside the window never counts."""
    grad_norm: float
    """Before clipping."""
    num_values: int
    """Trained tokens."""

    @classmethod
    def of_step(cls, updates: Sequence[CriticReport], explained_variance: float) -> CriticReport:
        """Loss and norm as means over the updates of a step, the clip as a mean over the values of them all."""
        num_values = sum(update.num_values for update in updates)
        clipped = sum(update.num_values * update.clip_fraction for update in updates if update.num_values)
        return cls(
            value_loss=sum(update.value_loss for update in updates) / len(updates),
            explained_variance=explained_variance,
            clip_fraction=clipped / num_values if num_values else math.nan,
            grad_norm=sum(update.grad_norm for update in updates) / len(updates),
            num_values=num_values,
        )

    @property
    def metrics(self) -> dict[str, float]:
        """By the names they have among the trainer's."""
        return {
            "value_loss": self.value_loss,
            "explained_variance": self.explained_variance,
            "value_clip_fraction": self.clip_fraction,
            "critic_grad_norm": self.grad_norm,
        }


@dataclass(slots=True, frozen=True)
class ValueLoss:
    loss: Tensor
    """Scalar, to be minimised."""
    clipped_M: Tensor
    """True where clipping removed the value's gradient."""


def value_loss(values_M: Tensor, old_values_M: Tensor, returns_M: Tensor, weights_M: Tensor, clip: float | None) -> ValueLoss:
    """PPO's clipped value loss (Schulman et al. 2017, arXiv:1707.06347, as in its authors' code), all float32[M]:

        L = 1/2 Σ_t w_t max((V_t - R_t)², (clip(V_t, V_t^old - ε, V_t^old + ε) - R_t)²)

    The larger of the two errors: a value that has come closer to its return than ε allows gains nothing by going on, one that
    has strayed is still called back. Without `clip` (ε) it is the squared error alone.
    """
    error_M = (values_M - returns_M).square()
    if clip is None:
        return ValueLoss((weights_M * error_M).sum() / 2, torch.zeros_like(error_M, dtype=torch.bool))
    near_M = values_M.clamp(old_values_M - clip, old_values_M + clip)  # inside the window V itself, to the last bit
    near_error_M = (near_M - returns_M).square()
    loss = (weights_M * torch.maximum(error_M, near_error_M)).sum() / 2
    return ValueLoss(loss, (near_error_M > error_M).detach())


def explained_variance(values_M: np.ndarray, returns_M: np.ndarray) -> float:
    """1 - Var(R - V) / Var(R); NaN where all returns are equal."""
    variance = float(np.var(returns_M, dtype=np.float64)) if len(returns_M) else 0.0
    return 1 - float(np.var(returns_M - values_M, dtype=np.float64)) / variance if variance else math.nan


def critic_settings(config: TrainerConfig) -> TrainerConfig:
    """The trainer's settings with the critic's own rate, warm-up and token budget: what its optimizer, its schedule and its
    micro-batches are made of."""
    own = config.critic
    return config.model_copy(
        update={
            "learning_rate": own.learning_rate,
            "schedule": config.schedule.model_copy(update={"warmup_steps": own.warmup_steps}),
            "max_tokens_per_micro_batch": own.max_tokens_per_micro_batch,
        }
    )


class Critic:
    """A value network and its optimizer."""

    def __init__(self, network: ValueNetwork, optimizer: Optimizer, clip: float | None) -> None:
        self.network = network
        self._optimizer = optimizer
        self._clip = clip

    @torch.no_grad()
    def values(self, micro_batches: Iterable[MicroBatch]) -> list[Tensor]:
        """float32[M] for each micro-batch: the value of the state in which each trained token was chosen."""
        with span("trainer.values"):
            return [chosen_values(self.network, micro_batch) for micro_batch in micro_batches]

    def step(
        self,
        micro_batches: Iterable[MicroBatch],
        old_values_T: np.ndarray,
        returns_T: np.ndarray,
        weights_T: np.ndarray,
        learning_rate: float,
    ) -> CriticReport:
        """One optimizer step towards the returns. The arrays are float32 over the tokens of the `TrainBatch`, and the weights
        make the mean over the whole batch."""
        totals = _Totals()
        for micro_batch in micro_batches:
            numbers = [array[micro_batch.index_M].astype(np.float32) for array in (old_values_T, returns_T, weights_T)]
            with span("trainer.critic"):
                found = self._train_on(micro_batch, *numbers)
            totals.add(found, numbers[0], numbers[1])
        with span("trainer.critic_optimizer"):
            grad_norm = self._optimizer.step(learning_rate)
        return totals.report(grad_norm)

    def _train_on(self, micro_batch: MicroBatch, *numbers: np.ndarray) -> ValueLoss:
        values_M = chosen_values(self.network, micro_batch)
        old_values_M, returns_M, weights_M = (torch.from_numpy(array).to(values_M.device) for array in numbers)
        found = value_loss(values_M, old_values_M, returns_M, weights_M, self._clip)
        found.loss.backward()
        self._optimizer.accumulate()
        return found


class TrainedCritic(Critic):
    """The critic of a policy: beside its network, with an optimizer and a schedule of its own."""

    def __init__(self, policy: AnyDecoder, dtype: torch.dtype, config: TrainerConfig, seed: int) -> None:
        self._settings = settings = critic_settings(config)
        network = value_network(policy, settings.lora, dtype, seed)
        self.optimizer = MasterAdamW(network, dtype, settings)
        super().__init__(network, self.optimizer, settings.critic.clip)

    def train(self, batch: TrainBatch, numbers: TokenNumbers, values_T: np.ndarray, room: Room, version: int) -> CriticReport:
        """One update by a mini-batch. `values_T` are those that the advantages were made with."""
        returns_T = numbers.returns_T
        assert returns_T is not None
        learning_rate = schedule.learning_rate(self._settings, version)

        def step(plan: MicroBatchPlan) -> CriticReport:
            return self.step(plan.of_rank(0), values_T, returns_T, numbers.weights_T, learning_rate)

        return room.run(batch, room.critic, step, version, self.optimizer)


@dataclass(slots=True)
class _Totals:
    """Sums over the micro-batches of a step."""

    loss: float = 0.0
    clipped: int = 0
    values: list[np.ndarray] = field(default_factory=list)
    returns: list[np.ndarray] = field(default_factory=list)

    def add(self, found: ValueLoss, old_values_M: np.ndarray, returns_M: np.ndarray) -> None:
        self.loss += float(found.loss.detach())
        self.clipped += int(found.clipped_M.sum())
        self.values.append(old_values_M)
        self.returns.append(returns_M)

    def report(self, grad_norm: float) -> CriticReport:
        values_M, returns_M = (np.concatenate([np.zeros(0, np.float32), *arrays]) for arrays in (self.values, self.returns))
        return CriticReport(
            value_loss=self.loss,
            explained_variance=explained_variance(values_M, returns_M),
            clip_fraction=self.clipped / len(values_M) if len(values_M) else math.nan,
            grad_norm=grad_norm,
            num_values=len(values_M),
        )
