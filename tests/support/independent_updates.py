"""PPO and DAPO with mini-batches and epochs, from the papers and docs/algorithms.md, in plain torch and transformers.

Nothing here is redline's. An attempt is whole, alone and unpadded in every pass, each loss is the formula of its paper summed
in a Python loop, gradients are autograd's, and updates are those of torch.optim.AdamW. A batch is a list of groups of attempts.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


@dataclass
class Try:
    """One attempt. The answer is what is trained on."""

    prompt: list[int]
    answer: list[int]
    outcome: float
    """The advantage (DAPO), or the reward (PPO)."""


Batch = list[list[Try]]


@dataclass
class Settings:
    learning_rate: float
    critic_learning_rate: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_grad_norm: float
    temperature: float
    mini_batches: int
    epochs: int
    seed: int
    clip_low: float
    clip_high: float
    value_clip: float = 0.2
    lambda_: float = 0.95


@dataclass
class Told:
    """What a step did: means over its updates, or over the tokens of all its updates."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    clipped: list[bool] = field(default_factory=list)
    value_losses: list[float] = field(default_factory=list)
    values_clipped: list[bool] = field(default_factory=list)


class IndependentTrainer:
    """`with_critic` makes it PPO; else it is DAPO, whose groups bring their advantages."""

    def __init__(self, model: PreTrainedModel, settings: Settings, *, with_critic: bool) -> None:
        self.settings = settings
        self.policy = copy.deepcopy(model)
        self.critic = ValueModel(copy.deepcopy(model)) if with_critic else None
        self._policy_adamw = _adamw(self.policy, settings, settings.learning_rate)
        self._critic_adamw = _adamw(self.critic, settings, settings.critic_learning_rate) if self.critic else None
        self._steps = 0

    def step(self, batch: Batch) -> Told:
        tries = [attempt for group in batch for attempt in group]
        with torch.no_grad():
            before = {id(attempt): self._logprobs(attempt) for attempt in tries}
            values = {id(attempt): self.critic.values(attempt) for attempt in tries} if self.critic else {}
        advantages, returns = self._advantages(tries, values)
        told = Told()
        for epoch in range(self.settings.epochs):
            order = np.random.default_rng((self.settings.seed, self._steps, epoch)).permutation(len(batch))
            for chosen in np.array_split(order, self.settings.mini_batches):
                part = [attempt for group in chosen for attempt in batch[group]]
                if self.critic is None and all(attempt.outcome == 0 for attempt in part):
                    continue  # nothing to learn from
                self._update_policy(part, before, advantages, told)
                if self.critic is not None:
                    self._update_critic(part, values, returns, told)
        self._steps += 1
        return told

    def _logprobs(self, attempt: Try) -> Tensor:
        """Of the answer's tokens."""
        ids = torch.tensor([attempt.prompt + attempt.answer])
        logits = self.policy(ids).logits[0, len(attempt.prompt) - 1 : -1] / self.settings.temperature
        return torch.log_softmax(logits, dim=-1)[range(len(attempt.answer)), attempt.answer]

    def _advantages(self, tries: list[Try], values: dict[int, Tensor]) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Advantages and returns of every token."""
        if not values:
            return {id(attempt): torch.full((len(attempt.answer),), attempt.outcome) for attempt in tries}, {}
        raw, returns = {}, {}
        for attempt in tries:
            value, found, after = values[id(attempt)], torch.zeros(len(attempt.answer)), 0.0
            for t in reversed(range(len(attempt.answer))):
                is_last = t == len(attempt.answer) - 1
                delta = (attempt.outcome if is_last else float(value[t + 1])) - float(value[t])
                found[t] = after = delta + self.settings.lambda_ * after
            raw[id(attempt)], returns[id(attempt)] = found, found + value
        everything = torch.cat(list(raw.values())).double()
        mean, std = everything.mean(), everything.std(correction=0)
        return {key: ((found.double() - mean) / std).float() for key, found in raw.items()}, returns

    def _update_policy(self, part: list[Try], before: dict[int, Tensor], advantages: dict[int, Tensor], told: Told) -> None:
        """-1/N Σ min(r A, clip(r) A), N the tokens of the mini-batch."""
        settings, total = self.settings, torch.zeros(())
        num_tokens = sum(len(attempt.answer) for attempt in part)
        for attempt in part:
            ratio = torch.exp(self._logprobs(attempt) - before[id(attempt)])
            advantage = advantages[id(attempt)]
            free, bounded = ratio * advantage, ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high) * advantage
            total = total - torch.minimum(free, bounded).sum() / num_tokens
            if self.critic is not None or attempt.outcome != 0:
                told.clipped += (bounded < free).tolist()
        told.norms.append(_descend(self.policy, self._policy_adamw, total, settings.max_grad_norm))
        told.losses.append(float(total.detach()))

    def _update_critic(self, part: list[Try], values: dict[int, Tensor], returns: dict[int, Tensor], told: Told) -> None:
        """1/2N Σ max((V - R)², (clip(V, V_old ± ε) - R)²)."""
        assert self.critic is not None
        assert self._critic_adamw is not None
        total, clip = torch.zeros(()), self.settings.value_clip
        num_tokens = sum(len(attempt.answer) for attempt in part)
        for attempt in part:
            value, old, target = self.critic.values(attempt), values[id(attempt)], returns[id(attempt)]
            free = (value - target).square()
            bounded = (torch.clamp(value, old - clip, old + clip) - target).square()
            total = total + torch.maximum(free, bounded).sum() / (2 * num_tokens)
            told.values_clipped += (bounded > free).tolist()
        _descend(self.critic, self._critic_adamw, total, self.settings.max_grad_norm)
        told.value_losses.append(float(total.detach()))


class ValueModel(nn.Module):
    """The hidden states of a language model, and a linear head that begins at zero."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.trunk = model.model
        self.head = nn.Linear(model.config.hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def values(self, attempt: Try) -> Tensor:
        """Of the states in which the answer's tokens were chosen."""
        ids = torch.tensor([attempt.prompt + attempt.answer])
        hidden = self.trunk(ids).last_hidden_state[0, len(attempt.prompt) - 1 : -1]
        return self.head(hidden).squeeze(-1)


def _descend(network: nn.Module, adamw: torch.optim.Optimizer, loss: Tensor, max_grad_norm: float) -> float:
    adamw.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(network.parameters(), max_grad_norm)
    adamw.step()
    return float(norm)


def _adamw(network: nn.Module, settings: Settings, learning_rate: float) -> torch.optim.Optimizer:
    """Norms and biases are not decayed."""
    kinds: list[dict[str, Any]] = [
        {"params": [p for p in network.parameters() if p.dim() == 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in network.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(kinds, lr=learning_rate, betas=settings.betas, eps=settings.eps, foreach=False, fused=False)
