"""Stage 5: sampling from the policy."""

from redline.engine.engine import NativeEngine

__all__ = ["NativeEngine"]
