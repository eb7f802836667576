"""The reports of a step's updates, as one report of the step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from redline.config.sections.trainer import TrainerConfig
from redline.models.layers.routing_notes import NAMES as ROUTING
from redline.trainer.loss.off_policy import correction_for
from redline.trainer.loss.token_numbers import TokenNumbers
from redline.trainer.passes.critic import CriticReport, explained_variance
from redline.types import StepReport, TrainBatch


def step_report(
    batch: TrainBatch,
    config: TrainerConfig,
    numbers: TokenNumbers,
    found: Mapping[str, np.ndarray],
    updates: Sequence[StepReport],
    critic: Sequence[CriticReport],
    retries: int,
) -> StepReport:
    """The report of a step: of its updates, and of what the recipe has beside them. `found` is what was looked at first,
    `retries` how often memory ran out."""
    report = of_step(updates) if config.updates_per_step > 1 else updates[0]
    # A step that computed nothing, since no group had a signal, has no routing to speak of, nor has one without a record.
    extra = {name: value for name, value in report.extra.items() if name not in ROUTING or math.isfinite(value)}
    if numbers.reward_kl is not None:
        extra["kl"] = numbers.reward_kl
    if critic:
        assert numbers.returns_T is not None
        explained = explained_variance(found["values"][batch.loss_mask], numbers.returns_T[batch.loss_mask])
        extra |= CriticReport.of_step(critic, explained).metrics
    if correction_for(batch.lags, config) is not config:
        extra["lag_corrected"] = 1.0
    if retries:
        extra["oom_retries"] = float(retries)
    return replace(report, extra=extra)


def of_step(updates: Sequence[StepReport]) -> StepReport:
    """One report of all updates of a step, where a recipe has several; a step may still have had one.

    The loss and the gradient norm are means over updates, what is a mean over tokens stays one, and what is counted is summed.
    Updates that were skipped enter no mean, unless all were."""
    taken = [update for update in updates if not update.skipped]
    counts = {"updates": len(taken), "grad_norm_max": max(update.grad_norm for update in taken or updates)}
    taken = taken or list(updates)
    if len(updates) == 1:
        return replace(updates[0], extra={**updates[0].extra, **counts})
    tokens = [update.num_trained_tokens for update in taken]

    def over_tokens(value: Callable[[StepReport], float]) -> float:
        return sum(count * value(update) for count, update in zip(tokens, taken, strict=True)) / sum(tokens)

    extra = {name: over_tokens(lambda update, name=name: update.extra[name]) for name in taken[0].extra}  # type: ignore[misc]
    return replace(
        taken[0],
        loss=_mean([update.loss for update in taken]),
        grad_norm=_mean([update.grad_norm for update in taken]),
        entropy=over_tokens(lambda update: update.entropy),
        clip_fraction=over_tokens(lambda update: update.clip_fraction),
        mismatch_kl=over_tokens(lambda update: update.mismatch_kl),
        max_ratio=max(update.max_ratio for update in taken),
        num_tokens=sum(update.num_tokens for update in updates),
        num_trained_tokens=sum(update.num_trained_tokens for update in updates),
        num_micro_batches=sum(update.num_micro_batches for update in updates),
        imbalance=_mean([update.imbalance for update in updates]),
        num_padding_tokens=sum(update.num_padding_tokens for update in updates),
        flops=sum(update.flops for update in updates),
        skipped=any(update.skipped for update in updates),
        extra={**extra, **counts},
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
