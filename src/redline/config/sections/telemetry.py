"""Section `telemetry`: what a run records about itself."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from redline.config.section import Entries, Section
from redline.config.sections.alerts import AlertsConfig
from redline.config.sections.sinks import MlflowConfig, OpenTelemetryConfig, PrometheusConfig, Sink, TrackioConfig, WandbConfig
from redline.config.sections.targets import TargetsConfig

ProfileKind = Literal["rollout", "trainer", "e2e"]
MIN_TRACE_BYTES = 1 << 20
"""A smaller trace would hold its beginning alone."""


class ProfileConfig(Entries):
    """Steps that are profiled."""

    short: ClassVar[str] = "what"

    what: ProfileKind | None = None
    """`rollout`: while groups are made. `trainer`: the trainer's step. `e2e`: all of it. null profiles none."""
    steps: tuple[PositiveInt, ...] = (3,)
    """The steps, counted from 1."""


class TelemetryConfig(Section):
    trace_max_bytes: int | None = Field(256 << 20, ge=0)
    """Size of `trace.json`, which ui.perfetto.dev opens; 0 writes none. It keeps its beginning and its newest stretch; what was
    between is left out, and the file says so. null keeps every span: some hundred bytes each, 230 to 580 kB for a step of long
    answers."""
    sample_every_s: float = Field(1.0, ge=0)
    """Seconds between two samples of host and devices in `samples.jsonl`; 0 takes none."""
    peak_tflops: Literal["auto", "measure"] | PositiveFloat = "auto"
    """What MFU is a share of, in 10¹² operations per second of one device: a number, `measure` (a few products when the run
    begins), or `auto` (the data sheet of a GPU that is known; else there is no MFU)."""
    targets: TargetsConfig = TargetsConfig()
    """What the end of a run is judged by: a number, or `off`, for each metric; `off` alone judges by none."""
    alerts: AlertsConfig = AlertsConfig()
    """What a person is told of while the run goes on: a threshold, or `off`, for each kind; `off` alone tells of none."""
    alert_webhook: str | None = Field(None, pattern=r"^(https?://|env:\w)")
    """Where each alert is posted as JSON: a URL, or `env:NAME` for an environment variable that holds it, which keeps it out of
    the run folder; null posts none. A post that fails is told once and stops nothing."""
    stall_after_s: float | None = Field(None, ge=0)
    """Nothing may move, and no call of `score` or `train` may last, for this long before a file in `stalls/` says who waits for
    whom. null takes three times the longest so far: of pauses, at least 25 s (a minute while a run evaluates or saves, ten
    before its third step); of calls, at least 20 s from the first on. 0 never writes one."""
    profile: ProfileConfig = ProfileConfig()
    """Profile some steps: `trainer`, or `{what: trainer, steps: [3, 4]}`. A run can also be asked while it goes on, with
    `redline profile`."""
    nvtx: Literal["auto", "on", "off"] = "auto"
    """Give spans to NVIDIA's tools as NVTX ranges; `auto` does where Nsight Systems has started the run, and while a step is
    profiled."""
    sinks: list[Sink] = Field(default_factory=list)
    """Where else the rows of the run folder go: tensorboard, wandb, trackio, mlflow, prometheus, opentelemetry."""
    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    trackio: TrackioConfig = TrackioConfig()
    """trackio."""
    mlflow: MlflowConfig = MlflowConfig()
    """MLflow."""
    prometheus: PrometheusConfig = PrometheusConfig()
    """An endpoint for Prometheus to scrape."""
    opentelemetry: OpenTelemetryConfig = OpenTelemetryConfig()
    """Spans and metrics over OTLP."""

    @field_validator("trace_max_bytes")
    @classmethod
    def _room_for_a_beginning(cls, size: int | None) -> int | None:
        if size and size < MIN_TRACE_BYTES:
            raise ValueError(f"must be at least {MIN_TRACE_BYTES}, or 0 for no trace")
        return size

    @property
    def trace(self) -> bool:
        """trace_max_bytes is not 0."""
        return self.trace_max_bytes != 0
