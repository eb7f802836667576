"""The sides that train: our trainer, and transformers as it is used by hand. Each takes the same steps on the same batches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from redline.config.sections.trainer import TrainerConfig
from redline.lab.measure.machine import synchronize
from redline.lab.measure.phases import phase_seconds
from redline.models.files.hf import AnyDecoder
from redline.telemetry import span
from redline.trainer import PolicyTrainer, Sampling
from redline.types import TrainBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NO_TARGET = -100
"""What transformers writes where a token has no loss."""


@dataclass(slots=True, frozen=True)
class Step:
    """One optimizer step. With the same weights, loss and norm are nearly the same on every side."""

    loss: float
    grad_norm: float
    """Global L2 norm before clipping."""
    micro_batches: int


@dataclass(slots=True, frozen=True)
class TrainRun:
    """What one side did with the batches of a round."""

    seconds: float
    num_tokens: int
    """As sampled: the same on every side, whatever it pads or shares."""
    steps: Sequence[Step]
    phase_s: Mapping[str, float]

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def step_s(self) -> float:
        return self.seconds / len(self.steps)

    @property
    def step_phase_s(self) -> dict[str, float]:
        """Seconds of each phase, per step."""
        return {phase: seconds / len(self.steps) for phase, seconds in self.phase_s.items()}

    def as_json(self) -> dict[str, object]:
        return {
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "phase_s": dict(self.phase_s),
            "loss": [step.loss for step in self.steps],
            "grad_norm": [step.grad_norm for step in self.steps],
            "micro_batches": [step.micro_batches for step in self.steps],
        }


class TrainingSide(Protocol):
    """Keeps its network and its optimizer, and steps when told to."""

    @property
    def weight_bytes(self) -> int: ...

    @property
    def gradient_bytes(self) -> int:
        """Kept between steps."""
        ...

    def step(self, batch: TrainBatch) -> Step: ...


def run_steps(side: TrainingSide, batches: Sequence[TrainBatch], device: torch.device) -> TrainRun:
    synchronize(device)
    started = time.perf_counter()
    steps, phase_s = phase_seconds(lambda: [side.step(batch) for batch in batches], device)
    synchronize(device)
    seconds = time.perf_counter() - started
    return TrainRun(seconds, sum(len(batch.tokens) for batch in batches), steps, phase_s)


class RedlineTraining:
    """Our trainer, with the weights in the compute dtype and the masters in float32."""

    def __init__(self, decoder: AnyDecoder, dtype: torch.dtype, config: TrainerConfig) -> None:
        self._trainer = PolicyTrainer(decoder, dtype, config, Sampling())
        self.weight_bytes = size_of(decoder)

    @property
    def gradient_bytes(self) -> int:
        return self._trainer.memory()["gradients"]

    def step(self, batch: TrainBatch) -> Step:
        report = self._trainer.step(batch)
        return Step(report.loss, report.grad_norm, report.num_micro_batches)


class TransformersTraining:
    """GRPO as one writes it by hand: sequences padded to the longest of their micro-batch, all logits, torch's AdamW.

    Weights, gradients and moments are in the compute dtype. With float32 masters it would learn better, and be slower and
    larger."""

    def __init__(self, model: PreTrainedModel, config: TrainerConfig, rows: int) -> None:
        """`rows` sequences go through the network at once."""
        self._model = model.train()
        self._config = config
        self._rows = rows
        self._adamw = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        self.weight_bytes = size_of(model)
        self.gradient_bytes = 0

    def step(self, batch: TrainBatch) -> Step:
        losses = []
        for first in range(0, batch.num_sequences, self._rows):
            with span("trainer.pack"):
                padded = _Padded.of(batch, first, min(first + self._rows, batch.num_sequences), self._model.device)
            with span("trainer.forward"):
                loss = self._loss(padded)
            with span("trainer.backward"):
                loss.backward()
            losses.append(loss.detach())
        with span("trainer.optimizer"):
            norm = nn.utils.clip_grad_norm_(self._model.parameters(), self._config.max_grad_norm)
            self._adamw.step()
            self._adamw.zero_grad()
        return Step(float(torch.stack(losses).sum()), float(norm), len(losses))

    def _loss(self, padded: _Padded) -> Tensor:
        """- Σ weight · min(ratio · advantage, clipped ratio · advantage)."""
        logits_BNV = self._model(padded.tokens_BN, attention_mask=padded.mask_BN, use_cache=False).logits
        logprobs_BN = -F.cross_entropy(
            logits_BNV.flatten(0, 1).float(), padded.targets_BN.flatten(), reduction="none", ignore_index=NO_TARGET
        ).view_as(padded.targets_BN)
        ratio_BN = torch.exp(logprobs_BN - padded.old_logprobs_BN)
        clipped_BN = ratio_BN.clamp(1 - self._config.clip_low, 1 + self._config.clip_high)
        objective_BN = torch.minimum(ratio_BN * padded.advantages_B1, clipped_BN * padded.advantages_B1)
        return -(padded.weights_BN * objective_BN).sum()


@dataclass(slots=True, frozen=True)
class _Padded:
    """B sequences on the device, padded on the right to N tokens."""

    tokens_BN: Tensor
    mask_BN: Tensor
    targets_BN: Tensor
    """The token that follows each one; `NO_TARGET` where it is not trained on. The logits stay where they are."""
    old_logprobs_BN: Tensor
    """Logprobs of the targets, 0 where there is none."""
    weights_BN: Tensor
    """1 / (sequences of the batch · targets of this one), 0 where there is none."""
    advantages_B1: Tensor

    @classmethod
    def of(cls, batch: TrainBatch, first: int, end: int, device: torch.device) -> _Padded:
        starts, ends = batch.cu_seqlens[first:end], batch.cu_seqlens[first + 1 : end + 1]
        column_N = np.arange((ends - starts).max())
        mask_BN = column_N < (ends - starts)[:, None]
        index_BN = np.where(mask_BN, starts[:, None] + column_N, 0)
        trained_BN = _next(batch.loss_mask[index_BN] & mask_BN, False)
        weights_BN = trained_BN / (batch.num_sequences_sampled * trained_BN.sum(axis=1, keepdims=True))
        targets_BN = np.where(trained_BN, _next(batch.tokens[index_BN], 0), NO_TARGET)
        old_logprobs_BN = np.where(trained_BN, _next(batch.old_logprobs[index_BN], 0), 0)

        def on_device(array: np.ndarray, dtype: torch.dtype) -> Tensor:
            return torch.from_numpy(array).to(device, dtype)

        return cls(
            on_device(np.where(mask_BN, batch.tokens[index_BN], 0), torch.int64),
            on_device(mask_BN, torch.int64),
            on_device(targets_BN, torch.int64),
            on_device(old_logprobs_BN, torch.float32),
            on_device(weights_BN, torch.float32),
            on_device(batch.advantages[first:end, None], torch.float32),
        )


def _next(values_BN: np.ndarray, last: float) -> np.ndarray:
    """Each column's right neighbour, `last` after the last."""
    return np.pad(values_BN[:, 1:], ((0, 0), (0, 1)), constant_values=last)


def size_of(network: nn.Module) -> int:
    """Bytes of its parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())


def trained_size_of(network: nn.Module) -> int:
    """Bytes of those parameters that have a gradient."""
    return sum(parameter.numel() * parameter.element_size() for parameter in network.parameters() if parameter.requires_grad)
