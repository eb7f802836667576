"""Section `placement`: which process runs where."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from redline.config.section import Section

Cluster = Literal["ray"]


class PlacementConfig(Section):
    cluster: Cluster | None = None
    """What starts the processes of a run: `ray`, or null for this one alone."""
    address: str = "auto"
    """The Ray cluster: `local` starts one on this machine that ends with the run, `auto` finds the one that this machine is
    part of, anything else is the address of its head (`10.0.0.1:6379`)."""
    trainers: PositiveInt = 1
    """Trainer ranks that a cluster starts, each a process with a CPU, or with a GPU where `run.device` is cuda."""
    max_restarts: int = Field(3, ge=0)
    """Times that a run goes on from its newest checkpoint after a process or a node was lost; then it ends with the reason."""
