"""Section `weight_sync`: how the engine gets the trainer's weights."""

from __future__ import annotations

from typing import Literal

from redline.config.section import Section


class WeightSyncConfig(Section):
    method: Literal["shared"] = "shared"
    """`shared`: engine and trainer read the same storage; nothing is copied."""
