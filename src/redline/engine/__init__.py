"""Stage 5: sampling from the policy."""

from redline.engine.async_engine import AsyncEngine
from redline.engine.native.engine import Event, NativeEngine
from redline.engine.stats import EngineStats

__all__ = ["AsyncEngine", "EngineStats", "Event", "NativeEngine"]
