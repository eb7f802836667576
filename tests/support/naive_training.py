"""Policy-gradient training as anyone would write it: transformers, padded rows, torch's AdamW, and a formula.

It shares nothing with the trainer but the batch. S sequences, L positions that predict a token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.policy_training import OPTIMIZER, TEMPERATURE, trained_rows
from torch import Tensor, nn
from transformers import PreTrainedModel

from redline.types import TrainBatch


@dataclass
class Rows:
    """A batch as right-padded rows, [S, L] each unless it says otherwise; nothing counts where `chosen` is False."""

    logprobs: Tensor
    """With gradient, and 0 where nothing counts."""
    entropies: Tensor
    """With gradient."""
    old: Tensor
    reference: Tensor
    """Logprobs of the model that training began with."""
    values: Tensor
    """The critic's, with gradient."""
    chosen: Tensor
    outcomes: Tensor
    """[S, 1]: advantages of the groups, or rewards."""
    num_sequences: int
    """Sampled, those left out included."""
    num_tokens: int

    @property
    def lengths(self) -> Tensor:
        """[S]."""
        return self.chosen.sum(dim=1)

    def by_sequence(self, per_token: Tensor) -> Tensor:
        """The mean over the tokens of each sequence, then over sequences."""
        return ((per_token * self.chosen).sum(dim=1) / self.lengths).sum() / self.num_sequences

    def by_token(self, per_token: Tensor) -> Tensor:
        """The mean over all tokens."""
        return (per_token * self.chosen).sum() / self.num_tokens


Formula = Callable[[Rows], Tensor]
"""The loss of a batch."""


class NaiveTrainer:
    """Steps of torch's AdamW on a copy of a model; with `value_formula`, of a critic too."""

    def __init__(self, model: PreTrainedModel, formula: Formula, value_formula: Formula | None = None) -> None:
        self.model, self._reference = copy.deepcopy(model), copy.deepcopy(model)
        self.critic = NaiveCritic(copy.deepcopy(model))
        self._formula, self._value_formula = formula, value_formula
        self._optimizers = [_adamw(self.model), _adamw(self.critic)]
        self.rows: Rows
        """Of the last step."""

    def step(self, batch: TrainBatch) -> float:
        """The loss. Afterwards the gradients are where torch has them."""
        policy, critic = self._optimizers
        policy.zero_grad()
        critic.zero_grad()
        self.rows = self._rows(batch)
        loss = self._formula(self.rows)
        loss.backward()
        policy.step()
        if self._value_formula:
            self._value_formula(self.rows).backward()
            critic.step()
        return float(loss.detach())

    @property
    def gradient(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}

    def _rows(self, batch: TrainBatch) -> Rows:
        bounds = list(trained_rows(batch))
        width = max(end - start for start, end in bounds)
        ids, there = torch.zeros(len(bounds), width, dtype=torch.long), torch.zeros(len(bounds), width, dtype=torch.long)
        chosen, old = torch.zeros(ids.shape, dtype=torch.bool), torch.zeros(ids.shape)
        for row, (start, end) in enumerate(bounds):
            ids[row, : end - start] = torch.from_numpy(batch.tokens[start:end].astype(np.int64))
            chosen[row, : end - start] = torch.from_numpy(batch.loss_mask[start:end])
            old[row, : end - start] = torch.from_numpy(batch.old_logprobs[start:end])
            there[row, : end - start] = 1
        chosen, old = chosen[:, 1:], old[:, 1:]
        logprobs, entropies = _logprobs(self.model, ids, there)
        with torch.no_grad():
            reference, _ = _logprobs(self._reference, ids, there)
        return Rows(
            logprobs=torch.where(chosen, logprobs, 0.0),
            entropies=entropies,
            old=old,
            reference=torch.where(chosen, reference, 0.0),
            values=self.critic(ids, there)[:, :-1],
            chosen=chosen,
            outcomes=torch.from_numpy(batch.advantages)[:, None],
            num_sequences=batch.num_sequences_sampled,
            num_tokens=batch.num_tokens_sampled,
        )


class NaiveCritic(nn.Module):
    """The hidden states of a language model, and a linear head that begins at zero."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = model
        self.head = nn.Linear(model.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor, there: Tensor) -> Tensor:
        return self.head(self.trunk.model(ids, attention_mask=there).last_hidden_state).squeeze(-1)


def _logprobs(model: PreTrainedModel, ids: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """Of every token after the first, and the entropies of what they were drawn from."""
    everything = torch.log_softmax(model(ids, attention_mask=there).logits[:, :-1] / TEMPERATURE, dim=-1)
    return everything.gather(2, ids[:, 1:, None]).squeeze(2), -(everything.exp() * everything).sum(dim=-1)


def _adamw(network: nn.Module) -> torch.optim.Optimizer:
    """As `OPTIMIZER` says; biases and norms are not decayed."""
    matrices = [p for p in network.parameters() if p.dim() == 2]
    vectors = [p for p in network.parameters() if p.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=OPTIMIZER["learning_rate"], betas=OPTIMIZER["betas"], eps=OPTIMIZER["eps"], foreach=False, fused=False
    )
