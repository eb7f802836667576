"""Samples of an older policy: the correction follows from the lag that a batch has, not from the one it might have had."""

from __future__ import annotations

from collections.abc import Sequence

from redline.config.schema import TrainerConfig


def correction_for(lags: Sequence[int], config: TrainerConfig) -> TrainerConfig:
    """The settings for a batch whose groups were sampled this many steps ago.

    Without any lag, with a `mismatch` of its own, or without `correct_lag`: the very object that came in, so that lockstep is
    what it always was. Else truncated importance sampling, of tokens, or of whole sequences where the loss has one ratio for
    each: the clip of the loss then bounds how far the step goes, and no longer what was sampled before it.
    """
    if not any(lags) or config.mismatch != "none" or not config.correct_lag:
        return config
    mismatch = "sequence_truncate" if config.loss == "gspo" else "token_truncate"
    return config.model_copy(update={"mismatch": mismatch})
