"""What `redline bench` was asked for, checked before torch is loaded: a class per case, and the one way to make them."""

from redline.lab.bench.settings.make import SETTINGS, as_recipe, make_settings, quick_overrides
from redline.lab.bench.settings.moving import SerializeSettings, TransferSettings, WeightSyncSettings
from redline.lab.bench.settings.sampling import GenerateSettings, NSamplingSettings, RolloutSettings, fit_engine
from redline.lab.bench.settings.shared import BenchSettings, PairedSettings
from redline.lab.bench.settings.training import (
    MICRO_BATCH_TOKENS,
    E2ESettings,
    MemorySettings,
    TelemetrySettings,
    TrainerSettings,
    fit_trainer,
)

__all__ = [
    "MICRO_BATCH_TOKENS",
    "SETTINGS",
    "BenchSettings",
    "E2ESettings",
    "GenerateSettings",
    "MemorySettings",
    "NSamplingSettings",
    "PairedSettings",
    "RolloutSettings",
    "SerializeSettings",
    "TelemetrySettings",
    "TrainerSettings",
    "TransferSettings",
    "WeightSyncSettings",
    "as_recipe",
    "fit_engine",
    "fit_trainer",
    "make_settings",
    "quick_overrides",
]
