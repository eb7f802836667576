"""Ctrl-C and other signals that end a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from redline.telemetry import RunFolder
from redline.watch.checkpoints import checkpoints


@contextmanager
def saying_how_to_continue(folder: RunFolder) -> Iterator[None]:
    """Print it when a second Ctrl-C, or one during the set-up, ends the run at once. A run that comes to a stop by itself says
    it in its summary."""
    try:
        yield
    except KeyboardInterrupt:
        if folder.config.exists():
            newest = next(iter(checkpoints(folder)), None)
            where = f"after {newest.name}" if newest else "at its first step"
            Console(stderr=True, highlight=False).print(
                f"stopped at once; continue {where} with: redline train {folder.shown} --resume", soft_wrap=True
            )
        raise
