"""Key `telemetry.targets`: what the end of a run is judged by."""

from __future__ import annotations

from pydantic import Field

from redline.config.section import Thresholds


class TargetsConfig(Thresholds):
    """What the end of a run is judged by; `off` where there is no target."""

    gpu_utilization_percent: float | None = Field(80.0, ge=0, le=100)
    """At least: mean of all samples."""
    memory_percent: float | None = Field(90.0, ge=0, le=100)
    """Below: peak use of the device's memory, on the CPU of the machine's."""
    weight_sync_s: float | None = Field(2.0, gt=0)
    """Below: median step."""
    first_token_s: float | None = Field(0.1, gt=0)
    """Below: median step's median request."""
    generation_tokens_per_s: float | None = Field(None, gt=0)
    """At least. It depends on the model, so it is off by default."""
    training_tokens_per_s: float | None = Field(None, gt=0)
    """At least. It depends on the model, so it is off by default."""
    samples_per_hour: float | None = Field(None, gt=0)
    """At least. It depends on model and task, so it is off by default."""
    steps_per_hour: float | None = Field(60.0, gt=0)
    """At least."""
    mfu_percent: float | None = Field(None, gt=0, le=100)
    """At least: median step. It depends on model and batch, so it is off by default."""
    batch_size: float | None = Field(None, gt=0)
    """At least: sequences decoded at once, median step. It depends on the recipe, so it is off by default."""
    preemptions: int | None = Field(0, ge=0)
    """At most, in the whole run."""
    padding_tokens: int | None = Field(0, ge=0)
    """At most, in the whole run."""
    imbalance: float | None = Field(1.25, ge=1)
    """At most: the dearest micro-batch over the mean, median step."""
    policy_lag_steps: int | None = Field(2, ge=0)
    """At most, in any step."""
    weight_sync_percent: float | None = Field(15.0, ge=0, le=100)
    """At most: share of the steps' time."""
    data_percent: float | None = Field(5.0, ge=0, le=100)
    """At most: share of the steps' time."""
    other_percent: float | None = Field(10.0, ge=0, le=100)
    """At most: share of the steps' time that is neither work nor waiting."""
    unaccounted_percent: float | None = Field(2.0, ge=0, le=100)
    """At most: share of the steps' time that no span explains."""
