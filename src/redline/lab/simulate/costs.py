"""What work costs, as functions of its size: fitted to a recorded run, with the range that the recording supports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

FIXED_SHARE = 0.25
"""Share of a training step that its tokens do not make: no more than about this where nothing else says."""


@dataclass(slots=True, frozen=True)
class Range:
    """Sizes that were seen."""

    low: float
    high: float

    def beyond(self, size: float) -> float:
        """How many times outside of the range a size is; 1 inside."""
        if size > self.high > 0:
            return size / self.high
        return self.low / size if 0 < size < self.low else 1.0


@dataclass(slots=True, frozen=True)
class Prompts:
    """What an engine computes of prompts in a step of the run, on average."""

    seconds: float
    tokens: float
    passes: float


@dataclass(slots=True, frozen=True)
class Replies:
    """Replies of batches that began together: the shorter ones tell what a step with many rows took, the longer ones what one
    with few did."""

    seconds: np.ndarray
    """From the first token of each to its last."""
    steps: np.ndarray
    rows: np.ndarray
    """In all of these steps together."""


@dataclass(slots=True, frozen=True)
class EngineCost:
    """Seconds of an engine's step, and of prompts."""

    step_s: float
    """However few rows there are."""
    row_s: float
    """For each row more."""
    pass_s: float
    """Seconds of a pass over prompts, however few tokens they have."""
    prompt_token_s: float
    """For each token of a prompt that is computed."""
    rows: Range
    error: float
    """Share of the recorded time by which the fit is off, per step of the run (root of the mean square)."""
    usual_rows: Range = Range(0.0, 0.0)
    """Rows of a step of the engine: on average in each step of the run, or down to one where replies tell that."""

    @property
    def tells_rows(self) -> bool:
        """Whether steps decoded rows in such different numbers that they say what a row more costs."""
        return self.usual_rows.high >= 2 * self.usual_rows.low

    def faster(self, times: float) -> EngineCost:
        """What it costs where everything is so many times as fast."""
        parts = {name: getattr(self, name) / times for name in ("step_s", "row_s", "pass_s", "prompt_token_s")}
        return replace(self, **parts)

    def decode_s(self, rows: float) -> float:
        """Seconds until each of so many rows has its next token."""
        return self.step_s + self.row_s * rows


@dataclass(slots=True, frozen=True)
class TrainerCost:
    """Seconds of a training step."""

    step_s: float
    token_s: float
    tokens: Range
    mean_tokens: float
    error: float

    def seconds(self, tokens: float) -> float:
        return self.step_s + self.token_s * tokens


def engine_cost(
    seconds: np.ndarray,
    steps: np.ndarray,
    tokens: np.ndarray,
    prompts: Prompts,
    most_rows: float,
    replies: Replies | None = None,
) -> EngineCost:
    """Fit the cost of an engine to what it took in each step of a run: seconds of decoding, its own steps, tokens sampled, and
    what prompts took; `most_rows` were decoded at once. `replies` tell what a row more costs where there are any. A pass over
    prompts costs what a step costs however few rows it has, and a part per token. No part is negative."""
    sizes = np.stack([steps, tokens], axis=1)
    parts, error = _fitted(sizes, seconds)
    if replies is not None:
        parts, _ = _fitted(np.stack([replies.steps, replies.rows], axis=1), replies.seconds)
        parts = np.asarray(parts) * (seconds.sum() / max(1e-30, float((sizes @ np.asarray(parts)).sum())))
        error = _error(sizes, parts, seconds)
    elif prompts.seconds > 0 and tokens.any():
        # Where all steps of a run decode about as many rows, they do not tell the two parts apart: then a pass over prompts
        # costs about what a step with as many rows as it has tokens would. The weaker the steps say otherwise, the more that
        # counts.
        weight = max(error, 1e-6) * float(seconds.mean()) / prompts.seconds
        known = weight * np.array([[prompts.passes, prompts.tokens]])
        parts, _ = _fitted(np.concatenate([sizes, known]), np.append(seconds, weight * prompts.seconds))
        error = _error(sizes, parts, seconds)
    rows = tokens[steps > 0] / steps[steps > 0]
    usual = Range(float(rows.min()), float(rows.max())) if len(rows) else Range(0.0, 0.0)
    if replies is not None:
        usual = Range(1.0, most_rows)
    step_s, row_s = map(float, parts)
    pass_s = min(step_s, prompts.seconds / prompts.passes) if prompts.passes else 0.0
    token_s = (prompts.seconds - pass_s * prompts.passes) / prompts.tokens if prompts.tokens else 0.0
    return EngineCost(step_s, row_s, pass_s, token_s, Range(1.0, most_rows), error, usual)


def trainer_cost(seconds: np.ndarray, tokens: np.ndarray) -> TrainerCost:
    """Fit the cost of a training step to what it took in each step of a run: a line through the mean, none negative."""
    sizes = np.stack([np.ones_like(tokens), tokens], axis=1)
    mean_s, mean_tokens = float(seconds.mean()), float(tokens.mean())
    off_s, off_tokens = seconds - mean_s, tokens - mean_tokens
    spread, told = float(off_tokens @ off_tokens), float(off_tokens @ off_s)
    error = float(np.std(off_s - off_tokens * (told / max(spread, 1e-30)))) / max(mean_s, 1e-12)
    # Where all steps of a run train on about as many tokens, noise would decide whether a larger batch costs anything: then a
    # step costs in proportion to its tokens. The weaker the steps say otherwise, the more that counts.
    weight = (max(error, 1e-6) / FIXED_SHARE) ** 2
    slope = (told + weight * mean_tokens * mean_s) / max(1e-30, spread + weight * mean_tokens**2)
    token_s = float(np.clip(slope, 0.0, mean_s / max(mean_tokens, 1e-30))) if mean_tokens else 0.0
    parts = (mean_s - token_s * mean_tokens, token_s)
    seen = Range(float(tokens.min()), float(tokens.max()))
    return TrainerCost(*parts, seen, mean_tokens, _error(sizes, parts, seconds))


def _fitted(sizes: np.ndarray, seconds: np.ndarray) -> tuple[Sequence[float], float]:
    """Least squares without negative parts: a part that would be negative is left out, and the others are fitted again."""
    used = [column for column in range(sizes.shape[1]) if sizes[:, column].any()]
    scale = np.abs(sizes).max(axis=0, initial=1e-30)
    parts = np.zeros(sizes.shape[1])
    while used:
        found = np.linalg.lstsq(sizes[:, used] / scale[used], seconds, rcond=None)[0] / scale[used]
        if (found >= 0).all():
            parts[used] = found
            break
        used.pop(int(np.argmin(found)))
    return parts.tolist(), _error(sizes, parts, seconds)


def _error(sizes: np.ndarray, parts: Sequence[float] | np.ndarray, seconds: np.ndarray) -> float:
    """Root of the mean square of what a fit is off by, as a share of the mean."""
    off = sizes @ np.asarray(parts) - seconds
    return float(np.sqrt(np.mean(off**2)) / max(1e-12, float(np.mean(seconds))))
