"""Section `run`: name, length, device and folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveInt

from redline.config.section import LocalPath, Section


class RunConfig(Section):
    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """Run folders are called `<folder>/<name>-001`, `-002`, …"""
    folder: LocalPath = Path("runs")
    """Where run folders are made."""
    seed: int = Field(0, ge=0, lt=2**31)
    """Decides every random choice of the run: tasks, samples, initial weights of built-in models."""
    steps: PositiveInt = 100
    """Steps to take. A step is one batch and one version of the policy, by one update of AdamW or several."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` takes a CUDA device if there is one."""
    num_threads: PositiveInt | None = None
    """CPU threads for the network, at most as many as the machine has cores; null takes OMP_NUM_THREADS of the environment,
    else every core this process may use."""
    checkpoint_every: int = Field(10, ge=0)
    """Steps between checkpoints; 0 keeps none but the last."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept in the run folder: where there is one, a damaged file costs the run. Each takes 12 bytes per
    trained parameter on the disk, and the next one is written beside them."""
