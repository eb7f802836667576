"""redline: reinforcement-learning post-training for language models, as fast as the hardware allows.

    with redline.span("my part"):
        ...

times a block of your own code in the ledger and the trace of the run it belongs to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redline.telemetry.spans import user_span as span

__version__ = "0.1.0"
__all__ = ["__version__", "span"]


def __getattr__(name: str) -> Any:
    """Loaded when it is first asked for: importing this package imports nothing else."""
    if name == "span":
        from redline.telemetry.spans import user_span

        globals()["span"] = user_span
        return user_span
    raise AttributeError(f"module 'redline' has no attribute {name!r}")
