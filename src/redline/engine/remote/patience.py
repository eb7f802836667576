"""How long an engine in another process is waited for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Patience:
    """When an engine that does not answer is taken for lost."""

    connect_s: float = 30.0
    """Seconds to open the connection and hear from the engine."""
    silence_s: float = 15.0
    """Seconds without a pulse: the process is stopped, or its machine cannot be reached."""
    step_s: float = 900.0
    """Seconds that one step may last; the first of a large model compiles kernels."""
