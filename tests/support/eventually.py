"""Waiting for what must happen, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300.0
"""Seconds after which what has not happened never will: no machine that is only busy takes so long."""


def eventually(condition: Callable[[], object], what: str = "it never happened") -> None:
    """Block until a condition holds. Fails with `what` after `PATIENCE_S` seconds."""
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.005)
