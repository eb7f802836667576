"""An engine that stands still in the middle of what it does, until a test lets it go on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from redline.engine import NativeEngine
from redline.types import EngineStats

PATIENCE_S = 300.0


def standing(engine: NativeEngine, when: Callable[[EngineStats], bool]) -> threading.Event:
    """Have an engine stand still before every step at which `when` holds, until the event that is returned is set. What a test
    does meanwhile happens in the middle of a request, however slow the machine is."""
    goes_on, step = threading.Event(), engine.step

    def steps() -> Any:
        if when(engine.stats):
            assert goes_on.wait(PATIENCE_S)
        return step()

    engine.step = steps  # type: ignore[method-assign]
    return goes_on
