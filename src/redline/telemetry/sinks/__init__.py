"""Adapters that send a run's rows elsewhere. The run folder stays the source of truth: a sink is a copy, and may have gaps.

Each is a `StepListener` in a file of its own, the only one that imports its library, behind an extra of the same name.
"""

from __future__ import annotations

import importlib

from redline.config.sections.telemetry import TelemetryConfig
from redline.telemetry.listeners import StepListener

_CLASSES = {
    "tensorboard": "TensorBoardSink",
    "wandb": "WandbSink",
    "trackio": "TrackioSink",
    "mlflow": "MlflowSink",
    "prometheus": "PrometheusSink",
    "opentelemetry": "OpenTelemetrySink",
}
"""Name in a recipe, and of the module here → class."""


def make_sinks(config: TelemetryConfig) -> list[StepListener]:
    """Those the recipe names, whose libraries `resolve` has found."""
    return [
        getattr(importlib.import_module(f"redline.telemetry.sinks.{name}"), _CLASSES[name])()
        for name in dict.fromkeys(config.sinks)
    ]
