"""A recipe of an engine alone: what `redline serve` and the lab build one from. It has no tasks and no trainer."""

from __future__ import annotations

from redline.config.section import Section
from redline.config.sections.engine import ServedEngineConfig
from redline.config.sections.model import ModelConfig
from redline.config.sections.run import RunConfig


class EngineRecipe(Section):
    """The sections of a recipe that an engine reads."""

    run: RunConfig = RunConfig()
    """Device, threads and seed; nothing else of it has a meaning without training."""
    model: ModelConfig
    """The policy."""
    engine: ServedEngineConfig = ServedEngineConfig()
    """The sampler."""
