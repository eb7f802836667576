"""`redline export RUN`: a checkpoint as a folder that other programs load. Importing this file loads no torch.

run folder, step ──choose──► Export ──export──► a Hugging Face folder, or the adapter as PEFT has it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from redline.config import read_recorded
from redline.config.paths import run_of_checkpoint
from redline.config.trained_step import checkpoints_in, step_of
from redline.errors import ConfigError, RunFolderError
from redline.launch.preflight import check_writable
from redline.telemetry import RunFolder


@dataclass(slots=True, frozen=True)
class Export:
    """What is written, and where."""

    run: RunFolder
    checkpoint: Path
    to: Path
    """Not there, or empty."""
    is_adapter: bool
    """Whether it is the adapter alone."""


def choose(given: Path, to: Path | None, step: int | None, *, merge: bool) -> Export:
    """Find the checkpoint of a run, the newest where no `step` is named, and the folder to make of it. Raises `RedlineError`
    for what is not there, and for a folder that holds something."""
    folder = run_of_checkpoint(given)
    if folder and step not in (None, step_of(given)):
        raise ConfigError(f"--step {step}: {given} is another step", f"leave --step out, or give the run's folder: {folder}")
    run = RunFolder.open(folder or given)
    if any(run.path.glob("*.safetensors")):
        raise ConfigError(f"{given}: a model, not a run", "it needs no export; give the folder of a run")
    checkpoint = _checkpoint(run, step_of(given) if folder else step)
    has_adapter = read_recorded(run.config).trainer.lora.rank > 0
    if merge and not has_adapter:
        raise ConfigError(f"--merge merges an adapter, and {run.shown} trained all weights", "leave it out")
    is_adapter = has_adapter and not merge
    target = to or run.shown / "exports" / f"{checkpoint.name}{'-adapter' if is_adapter else ''}"
    _refuse_taken(target)
    check_writable(target.parent, "--to")
    return Export(run, checkpoint, target, is_adapter)


def export(wanted: Export, tell: Callable[[str], None] = lambda text: None) -> Path:
    """Write the folder, which appears whole or not at all, and return it. Works in host memory. Blocks until the disk has
    it."""
    from redline.launch.checkpointed import load_checkpointed
    from redline.launch.result import write_adapter, write_model

    tell(f"loading {wanted.run.shown / 'checkpoints' / wanted.checkpoint.name}")
    policy = load_checkpointed(wanted.run, wanted.checkpoint, "cpu")
    write = write_adapter if wanted.is_adapter else write_model
    write(wanted.to, policy.config, policy.model, policy.masters, policy.step)
    return wanted.to


def _checkpoint(run: RunFolder, step: int | None) -> Path:
    found = {step_of(path): path for path in checkpoints_in(run.checkpoints)}
    if not found:
        train = f"train it: redline train {run.shown} --resume"
        hint = f"its model is a Hugging Face folder already: {run.shown / 'model'}" if run.model.is_dir() else train
        raise RunFolderError(f"{run.shown}: the run has no checkpoint", hint)
    if step is None:
        return found[max(found)]
    if step not in found:
        steps = ", ".join(map(str, sorted(found)))
        raise ConfigError(
            f"--step {step}: {run.shown} has no checkpoint of that step",
            f"it has those of {steps}; a run keeps its newest (run.keep_checkpoints)",
        )
    return found[step]


def _refuse_taken(to: Path) -> None:
    if to.is_dir() and not any(to.iterdir()):
        return
    if to.is_symlink() or to.exists():
        raise ConfigError(f"{to} is there already, and is not overwritten", "give another folder with --to, or remove it")
