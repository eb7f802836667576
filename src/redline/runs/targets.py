"""A run's key metrics beside their targets, for the page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pydantic import ValidationError

from redline.config.schema import Config
from redline.telemetry.summary.targets import Evidence, judge


def judged(evidence: Evidence, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """None where the config is not one that this version reads."""
    try:
        known = Config.model_validate(config)
    except ValidationError:
        return []
    return [asdict(verdict) for verdict in judge(evidence, known)]
