"""Samples of an older policy: the correction follows from the lag that a batch has, not from the one it might have had."""

from __future__ import annotations

from collections.abc import Sequence

from redline.config.sections.trainer import TrainerConfig


def correction_for(lags: Sequence[int], config: TrainerConfig) -> TrainerConfig:
    """The settings for a batch whose groups were sampled this many steps ago.

    Returns the very object that came in for a batch without any lag, with a `mismatch` of the recipe's own, without
    `correct_lag`, and for CISPO, which weighs every token by the ratio to the policy that sampled it, within its own bound.
    Else importance sampling that is truncated: of tokens, or of the geometric mean over a sequence where that is the loss's own
    ratio. The loss is then the decoupled objective (Hilton et al. 2022, arXiv:2110.00641): the correction reaches from the
    policy that sampled to the one the step began with, and the clip bounds how far the updates go from there. REINFORCE has no
    ratio, so that from its second update on a step is a batch of an older policy too.
    """
    is_older = any(lags) or (config.loss == "reinforce" and config.updates_per_step > 1)
    mismatch = config.mismatch
    if not is_older or mismatch.kind != "none" or not mismatch.correct_lag or config.loss == "cispo":
        return config
    kind = "geometric_truncate" if config.loss == "gspo" else "token_truncate"
    return config.model_copy(update={"mismatch": mismatch.model_copy(update={"kind": kind})})
