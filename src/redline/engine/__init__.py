"""Stage 5: sampling from the policy. What samples is loaded when it is first asked for: guesses need no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redline.engine.native.engine import Event, NativeEngine
    from redline.engine.session import EngineSession

__all__ = ["EngineSession", "Event", "NativeEngine"]

_HOME = {
    "EngineSession": "redline.engine.session",
    "Event": "redline.engine.native.engine",
    "NativeEngine": "redline.engine.native.engine",
}
"""Public name → the module that has it."""


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'redline.engine' has no attribute {name!r}")
    globals()[name] = found = getattr(importlib.import_module(_HOME[name]), name)
    return found
