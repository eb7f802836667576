"""Key `telemetry.alerts`: what a person is told of while a run goes on."""

from __future__ import annotations

from typing import Literal, get_args

from pydantic import Field, PositiveInt

from redline.config.section import Thresholds

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


class AlertsConfig(Thresholds):
    """What a person is told of while the run goes on. Each kind is told once per episode."""

    not_finite: Literal["on"] | None = "on"
    """A loss or gradient was NaN or infinite."""
    stalled_rollouts: float | None = Field(60.0, gt=0)
    """No groups came for longer than steps before explain. Seconds that making or awaiting them may always take."""
    stall: Literal["on"] | None = "on"
    """Nothing moved any more, and `stalls/` says who waits for whom; `telemetry.stall_after_s` is its patience."""
    long_wait: float | None = Field(10.0, gt=0)
    """A lane waited longer than steps before explain. Seconds that it may always wait in a step."""
    throughput_drop: float | None = Field(0.25, gt=0, lt=1)
    """Share by which tokens per second have fallen for good."""
    staleness_rise: float | None = Field(0.5, gt=0)
    """Steps by which the mean lag of a batch has risen."""
    length_bias: float | None = Field(0.02, gt=0, lt=1)
    """Share of the groups of some steps that may be dropped as late."""
    kv_saturation: float | None = Field(0.98, gt=0, le=1)
    """Share of the KV cache in use that counts as full."""
    host_memory_slope: float | None = Field(6.0, gt=0)
    """Hours within which memory would be full."""
    reward_collapse: float | None = Field(0.5, gt=0)
    """Share of the best mean reward that was lost."""
    not_learning: PositiveInt | None = 10
    """Steps in a row in which all attempts of every group may score alike: there is nothing to learn from."""
    abort_storm: float | None = Field(0.2, gt=0, lt=1)
    """Share of attempts that may fail or be cancelled, where fewer did before."""
    dead_worker: Literal["on"] | None = "on"
    """A process of the run has died."""

    @property
    def off(self) -> tuple[AlertKind, ...]:
        """The kinds that are not looked for."""
        kinds: tuple[AlertKind, ...] = get_args(AlertKind)
        return tuple(kind for kind in kinds if getattr(self, kind) is None)
