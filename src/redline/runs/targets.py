"""A run's key metrics beside the targets of its recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from redline.config.schema import Config
from redline.telemetry.summary.targets import Evidence, Verdict, judge


def judged(evidence: Evidence, config: Mapping[str, Any]) -> list[Verdict]:
    """Return a verdict on each key metric; an empty list where this version cannot read the config."""
    try:
        known = Config.model_validate(config)
    except ValidationError:
        return []
    return judge(evidence, known)
