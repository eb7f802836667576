"""What each trained token of a batch brings into the loss, beside its logprob under the policy that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from redline.config.sections.rollouts import AdvantageEstimator
from redline.config.sections.trainer import TrainerConfig
from redline.trainer.batches.micro_batches import MicroBatch
from redline.trainer.batches.staging import Taken, Values
from redline.trainer.loss.advantages import token_advantages
from redline.trainer.loss.kl import kl_estimates
from redline.trainer.loss.policy import aggregation_weights
from redline.trainer.sampling import Sampling
from redline.types import TrainBatch


@dataclass(slots=True, frozen=True)
class TokenNumbers:
    """float32[T] over the tokens of the `TrainBatch`; what is not trained on has no meaning."""

    weights_T: np.ndarray
    advantages_T: np.ndarray
    anchor_T: np.ndarray | None = None
    """Logprobs of the policy at the start of the step, where they were recomputed."""
    reference_T: np.ndarray | None = None
    """Logprobs of the reference, where the loss has a KL term."""
    returns_T: np.ndarray | None = None
    """What the critic should have said, where there is one."""
    reward_kl: float | None = None
    """Mean KL of a trained token, where it is taken off the reward."""

    def of(self, micro_batch: MicroBatch) -> dict[str, Values]:
        """What the loss needs of its trained tokens, by the name of its input: float32[M], and the sequences as int64."""
        arrays = {
            "weights_M": self.weights_T,
            "advantages_M": self.advantages_T,
            "anchor_logprobs_M": self.anchor_T,
            "reference_logprobs_M": self.reference_T,
        }
        taken = {name: Taken(array, micro_batch.index_M) for name, array in arrays.items() if array is not None}
        return {**taken, "old_logprobs_M": micro_batch.old_logprobs, "sequence_M": micro_batch.local_sequence_M}


def token_numbers(
    batch: TrainBatch, config: TrainerConfig, sampling: Sampling, found: Mapping[str, np.ndarray]
) -> TokenNumbers:
    """What each token of a batch brings into the loss. `found` has, by name, what other passes say of each token."""
    reference_T = found.get("reference")
    kl_M = reward_kl(batch, config, reference_T)
    advantages_T, returns_T = batch_advantages(batch, sampling.advantages, config, kl_M, found.get("values"))
    weights_T = batch_weights(batch, config, sampling.max_new_tokens)
    in_loss = reference_T if config.kl_in == "loss" else None
    mean_kl = None if kl_M is None else float(kl_M.mean())
    return TokenNumbers(weights_T, advantages_T, found.get("anchor"), in_loss, returns_T, mean_kl)


def weighed(numbers: TokenNumbers, part: TrainBatch, config: TrainerConfig, sampling: Sampling) -> TokenNumbers:
    """The numbers of a batch, with the weights of the mean over a part of it."""
    return replace(numbers, weights_T=batch_weights(part, config, sampling.max_new_tokens))


def batch_weights(batch: TrainBatch, config: TrainerConfig, max_new_tokens: int) -> np.ndarray:
    """float32[T]: each token's weight in the mean over the whole batch, so that any split of it adds up."""
    lengths = np.diff(batch.cu_seqlens)
    trained_S = np.add.reduceat(batch.loss_mask.astype(np.int64), batch.cu_seqlens[:-1]) if len(lengths) else lengths
    weights_S = aggregation_weights(
        torch.from_numpy(trained_S), config.aggregation, batch.num_sequences_sampled, batch.num_tokens_sampled, max_new_tokens
    )
    return np.repeat(weights_S.numpy(), lengths)


def reward_kl(batch: TrainBatch, config: TrainerConfig, reference_T: np.ndarray | None) -> Tensor | None:
    """float32[M]: the KL of every trained token, of the policy that sampled it, where the reward has a KL term."""
    if reference_T is None or config.kl_in != "reward":
        return None
    old_M, reference_M = (torch.from_numpy(array[batch.loss_mask]) for array in (batch.old_logprobs, reference_T))
    return kl_estimates(old_M, reference_M, config.kl_estimator)


def batch_advantages(
    batch: TrainBatch,
    estimator: AdvantageEstimator,
    config: TrainerConfig,
    kl_M: Tensor | None,
    values_T: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray | None]:
    """Advantages and, with a critic, returns: float32[T] each."""
    mask = batch.loss_mask
    sequence_M = torch.from_numpy(np.repeat(np.arange(batch.num_sequences), np.diff(batch.cu_seqlens))[mask])
    found = token_advantages(
        torch.from_numpy(batch.advantages),
        sequence_M,
        estimator,
        penalties_M=None if kl_M is None else config.kl_coef * kl_M,
        values_M=None if values_T is None else torch.from_numpy(values_T[mask]),
        gamma=config.gae_gamma,
        lambda_=config.gae_lambda,
    )
    returns_T = None if found.returns_M is None else _spread(found.returns_M.numpy(), mask)
    return _spread(found.advantages_M.numpy(), mask), returns_T


def _spread(values_M: np.ndarray, mask_T: np.ndarray) -> np.ndarray:
    values_T = np.zeros(len(mask_T), dtype=np.float32)
    values_T[mask_T] = values_M
    return values_T
