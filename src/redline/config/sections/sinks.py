"""Sections `telemetry.wandb`, `.trackio`, …: where else the rows of a run folder go."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from redline.config.section import Section

Sink = Literal["tensorboard", "wandb", "trackio", "mlflow", "prometheus", "opentelemetry"]


class WandbConfig(Section):
    project: str = Field("redline", min_length=1)
    """The project the run appears in."""
    entity: str | None = None
    """User or team; null takes the one that is logged in."""
    mode: Literal["online", "offline"] = "online"
    """`offline` writes to the run folder, for `wandb sync` later."""
    trajectories_every: int = Field(10, ge=0)
    """Steps between tables of what was sampled; 0 sends none."""


class TrackioConfig(Section):
    project: str = Field("redline", min_length=1)
    """The project the run appears in."""
    space_id: str | None = Field(None, pattern=r"^([^/\s]+/)?[^/\s]+$")
    """A Hugging Face Space to show it in, as `owner/name`; null keeps it on this machine."""


class MlflowConfig(Section):
    tracking_uri: str | None = None
    """A server (http://…) or a database (sqlite:///…); null takes the environment's MLFLOW_TRACKING_URI, else `mlflow.db`
    beside the run folders."""
    experiment: str = Field("redline", min_length=1)
    """The experiment the run appears in."""


class PrometheusConfig(Section):
    host: str = Field("127.0.0.1", min_length=1)
    """Address to listen on. The endpoint has no passwords: one that others can reach must be guarded by the network."""
    port: int = Field(9464, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""


class OpenTelemetryConfig(Section):
    endpoint: str = Field("http://127.0.0.1:4318", pattern=r"^https?://")
    """A collector that takes OTLP over HTTP."""
    min_span_ms: float = Field(1.0, ge=0)
    """Spans shorter than this are not sent: a step may hold thousands. `trace.json` has them."""
