"""The trainer: one `TrainBatch` in, one optimizer step out.

batch → micro-batches → forward → logprobs of the chosen tokens → loss → backward → accumulate → AdamW → weights in place
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from redline.config.schema import TrainerConfig
from redline.errors import TrainingError
from redline.models.hf import AnyDecoder
from redline.models.packed_attention import PackedAttention
from redline.telemetry import span
from redline.trainer.checkpoint import read_checkpoint, write_checkpoint
from redline.trainer.logprobs import selected_logprobs
from redline.trainer.losses import grpo_loss, sequence_mean_weights
from redline.trainer.micro_batches import MicroBatch, micro_batches
from redline.trainer.optimizer import MasterAdamW
from redline.types import StepReport, TrainBatch, WeightSet


class PolicyTrainer:
    """GRPO on packed micro-batches. Implements `ports.Trainer`."""

    def __init__(self, decoder: AnyDecoder, dtype: torch.dtype, temperature: float, config: TrainerConfig) -> None:
        self._decoder = decoder
        self._temperature = temperature
        self._config = config
        self._optimizer = MasterAdamW(decoder, dtype, config)
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def masters(self) -> dict[str, Tensor]:
        """The float32 weights, by our parameter names."""
        return self._optimizer.masters

    def step(self, batch: TrainBatch) -> StepReport:
        totals = _Totals()
        lengths_S = (
            np.add.reduceat(batch.loss_mask.astype(np.int64), batch.cu_seqlens[:-1]) if batch.num_sequences else np.zeros(0)
        )
        weights_S = sequence_mean_weights(torch.from_numpy(lengths_S), batch.num_sequences_sampled).numpy()
        for micro_batch in micro_batches(batch, self._config.max_tokens_per_micro_batch):
            self._train_on(micro_batch, batch.advantages, weights_S, totals)
        learning_rate = self._optimizer.learning_rate(self._version)
        with span("trainer.optimizer", version=self._version):
            grad_norm = self._optimizer.step(learning_rate)
        if not math.isfinite(grad_norm):
            raise TrainingError(
                f"step {self._version}: the gradient norm is {grad_norm}; the weights are unchanged",
                "lower trainer.learning_rate, or resume from the last checkpoint with model.dtype=float32",
            )
        self._version += 1
        return totals.report(grad_norm, learning_rate)

    def _train_on(self, micro_batch: MicroBatch, advantages_S: np.ndarray, weights_S: np.ndarray, totals: _Totals) -> None:
        device = self._decoder.output_weight.device
        with span("trainer.pack", version=self._version):
            attend = PackedAttention(micro_batch.segments, device)
            tokens_T, from_M, targets_M = (
                torch.from_numpy(array).to(device)
                for array in (micro_batch.tokens_T, micro_batch.predicted_from_M, micro_batch.targets_M)
            )
            old_M, advantages_M, weights_M = (
                torch.from_numpy(array.astype(np.float32)).to(device)
                for array in (
                    micro_batch.old_logprobs_M,
                    advantages_S[micro_batch.sequence_M],
                    weights_S[micro_batch.sequence_M],
                )
            )
        with span("trainer.forward", version=self._version):
            hidden_TE = self._decoder(tokens_T, attend.positions_T, attend)
            hidden_ME = hidden_TE.index_select(0, from_M)
            logprobs_M, entropy_M = selected_logprobs(hidden_ME, self._decoder.output_weight, targets_M, self._temperature)
            policy = grpo_loss(logprobs_M, old_M, advantages_M, weights_M, self._config.clip_low, self._config.clip_high)
        with span("trainer.backward", version=self._version):
            policy.loss.backward()
            self._optimizer.accumulate()
        totals.add(
            len(tokens_T), policy.loss.detach(), policy.ratio_M, policy.clipped_M, logprobs_M.detach() - old_M, entropy_M
        )

    def weights(self) -> WeightSet:
        return WeightSet(self._version, {name: parameter.detach() for name, parameter in self._decoder.named_parameters()})

    def save(self, folder: Path) -> None:
        write_checkpoint(folder, self._version, self._optimizer.state())

    def load(self, folder: Path) -> None:
        self._version, state = read_checkpoint(folder)
        self._optimizer.load_state(state)


@dataclass(slots=True)
class _Totals:
    """Sums over the micro-batches of a step."""

    loss: float = 0.0
    entropy: float = 0.0
    clipped: float = 0.0
    mismatch: float = 0.0
    max_ratio: float = 0.0
    tokens: int = 0
    trained: int = 0
    micro_batches: int = 0

    def add(
        self, tokens: int, loss: Tensor, ratio_M: Tensor, clipped_M: Tensor, log_ratio_M: Tensor, entropy_M: Tensor
    ) -> None:
        self.loss += float(loss)
        self.entropy += float(entropy_M.sum())
        self.clipped += float(clipped_M.sum())
        self.mismatch += float((torch.expm1(log_ratio_M.double()) - log_ratio_M).sum())
        self.max_ratio = max(self.max_ratio, float(ratio_M.max()))
        self.tokens += tokens
        self.trained += len(ratio_M)
        self.micro_batches += 1

    def report(self, grad_norm: float, learning_rate: float) -> StepReport:
        trained = self.trained or math.nan  # without a trained token there is no mean
        return StepReport(
            loss=self.loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            entropy=self.entropy / trained,
            clip_fraction=self.clipped / trained,
            mismatch_kl=self.mismatch / trained,
            max_ratio=self.max_ratio if self.trained else math.nan,
            num_tokens=self.tokens,
            num_trained_tokens=self.trained,
            num_micro_batches=self.micro_batches,
        )
