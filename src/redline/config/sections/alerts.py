"""Section `telemetry.alerts`: what a person is told of while a run goes on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from redline.config.section import Section

AlertKind = Literal[
    "not_finite",
    "stalled_rollouts",
    "stall",
    "long_wait",
    "throughput_drop",
    "staleness_rise",
    "length_bias",
    "kv_saturation",
    "host_memory_slope",
    "reward_collapse",
    "not_learning",
    "abort_storm",
    "dead_worker",
]


class AlertsConfig(Section):
    """What a person is told of while the run goes on. Each kind is told once per episode."""

    off: tuple[AlertKind, ...] = ()
    """Kinds that are not looked for."""
    webhook: str | None = Field(None, pattern=r"^(https?://|env:\w)")
    """Where each alert is posted as JSON: a URL, or `env:NAME` for an environment variable that holds it, which keeps it out of
    the run folder; null posts none."""
    webhook_timeout_s: float = Field(5.0, gt=0)
    """For one post. One that fails is told once and stops nothing."""
    rollouts_floor_s: float = Field(60.0, gt=0)
    """`stalled_rollouts`: making or awaiting the groups of a step may always take this long, whatever steps before took."""
    wait_floor_s: float = Field(10.0, gt=0)
    """`long_wait`: a lane may always wait this long in a step."""
    wait_deviations: float = Field(8.0, gt=0)
    """`stalled_rollouts` and `long_wait`: how far beyond its median a wait may go, in robust standard deviations; twice the
    longest so far is never too long."""
    throughput_drop: float = Field(0.25, gt=0, lt=1)
    """`throughput_drop`: share by which tokens per second must have fallen for good."""
    staleness_steps: float = Field(0.5, gt=0)
    """`staleness_rise`: steps by which the mean lag of a batch must have risen."""
    dropped_fraction: float = Field(0.02, gt=0, lt=1)
    """`length_bias`: share of the groups of some steps that may be dropped as late."""
    kv_use: float = Field(0.98, gt=0, le=1)
    """`kv_saturation`: share of the KV cache in use that counts as full."""
    memory_hours: float = Field(6.0, gt=0)
    """`host_memory_slope`: tell when memory would be full within this time."""
    reward_drop: float = Field(0.5, gt=0)
    """`reward_collapse`: share of the best mean reward that must be lost."""
    no_signal_steps: PositiveInt = 10
    """`not_learning`: steps in a row in which all attempts of every group may score alike: there is nothing to learn from."""
    abort_fraction: float = Field(0.2, gt=0, lt=1)
    """`abort_storm`: share of attempts that may fail or be given up, where fewer did before."""
