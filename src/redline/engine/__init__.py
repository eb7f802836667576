"""Stage 5: sampling from the policy."""

from redline.engine.native.engine import Event, NativeEngine
from redline.engine.session import EngineSession

__all__ = ["EngineSession", "Event", "NativeEngine"]
