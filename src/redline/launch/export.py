"""`redline export RUN`: a checkpoint as a folder that other programs load. Importing this file loads no torch.

run folder, step ──choose──► Export ──export──► a Hugging Face folder, or the adapter as PEFT has it
"""

from __future__ import annotations

import errno
import os.path
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from redline.config import read_recorded
from redline.config.paths import run_of_checkpoint
from redline.config.trained_step import checkpoints_in, step_of
from redline.errors import ConfigError, DamagedCheckpointError, RunFolderError
from redline.launch.preflight import check_writable
from redline.telemetry import RunFolder
from redline.telemetry.files.durable import making_folder

if TYPE_CHECKING:
    from redline.launch.checkpointed import CheckpointedPolicy

DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)
"""Errors of a disk for which another serves."""


@dataclass(slots=True, frozen=True)
class Export:
    """What is written, and where."""

    run: RunFolder
    checkpoint: Path
    to: Path
    """From the root. Not there, or empty, when it was chosen."""
    is_adapter: bool
    """Whether it is the adapter alone."""
    given: Path | None = None
    """`to` as somebody called it."""

    @property
    def shown(self) -> Path:
        """What messages call the folder to make."""
        return self.given or self.to


def choose(given: Path, to: Path | None, step: int | None, *, merge: bool) -> Export:
    """Find the checkpoint of a run, the newest where no `step` is named, and the folder to make of it. Raises `RedlineError`
    for what is not there, and for a folder that holds something."""
    folder = run_of_checkpoint(given)
    named = Path(os.path.abspath(given))
    own_step = step_of(named) if folder else None
    if folder and step not in (None, own_step):
        raise ConfigError(
            f"--step {step}: {named.name} is another step", f"leave --step out, or give the run's folder: {folder}"
        )
    run = RunFolder.open(folder or given)
    if any(run.path.glob("*.safetensors")):
        raise ConfigError(f"{given}: a model, not a run", "it needs no export; give the folder of a run")
    checkpoint = _checkpoint(run, own_step if folder else step)
    has_adapter = read_recorded(run.config).trainer.lora.rank > 0
    if merge and not has_adapter:
        raise ConfigError(f"--merge merges an adapter, and {run.shown} trained all weights", "leave it out")
    is_adapter = has_adapter and not merge
    shown = to or run.shown / "exports" / f"{checkpoint.name}{'-adapter' if is_adapter else ''}"
    target = _free(shown, checkpoint.name)
    check_writable(target.parent, "--to")
    return Export(run, checkpoint, target, is_adapter, shown)


def export(wanted: Export, tell: Callable[[str], None] = lambda text: None) -> Path:
    """Write the folder, which appears whole or not at all, and return it as it was called. Works in host memory. Blocks until
    the disk has it. Raises `RedlineError` where something came to lie there meanwhile, or the checkpoint was removed."""
    from redline.launch.result import write_adapter, write_model

    tell(f"loading {_shown(wanted)}")
    policy = _load(wanted)
    write = write_adapter if wanted.is_adapter else write_model
    with _explained(wanted), making_folder(wanted.to) as folder:
        write(folder, policy.config, policy.model, policy.masters, policy.step)
    return wanted.shown


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


def _free(to: Path, name: str) -> Path:
    """The folder to make, from the root. Raises `ConfigError` where it holds something, or cannot be replaced as a whole."""
    whole = Path(os.path.realpath(to))  # an empty folder may be called by a link
    is_folder = to.is_dir()
    if (to.is_symlink() or to.exists()) and not (is_folder and not any(to.iterdir())):
        raise ConfigError(f"{to} is there already, and is not overwritten", "give another folder with --to, or remove it")
    if is_folder and (whole == Path.cwd() or whole.is_mount()):
        what = "the folder that redline is called in" if whole == Path.cwd() else "a folder where a disk is mounted"
        raise ConfigError(f"--to = {str(to)!r}: {what} cannot be replaced", f"give a folder in it: --to {to / name}")
    return whole


def _load(wanted: Export) -> CheckpointedPolicy:
    """The policy of the checkpoint. Raises `RunFolderError` where the run has removed it since it was chosen."""
    from redline.launch.checkpointed import load_checkpointed

    try:
        return load_checkpointed(wanted.run, wanted.checkpoint, "cpu")
    except DamagedCheckpointError as error:
        kept = read_recorded(wanted.run.config).run.keep_checkpoints
        is_missing = isinstance(error.__cause__, FileNotFoundError)
        if not is_missing or wanted.checkpoint in checkpoints_in(wanted.run.checkpoints)[:kept]:
            raise
        raise RunFolderError(
            f"{_shown(wanted)}: the checkpoint is gone: the run goes on, and keeps its newest {kept}",
            "export again, or raise run.keep_checkpoints",
        ) from error


def _shown(wanted: Export) -> Path:
    return wanted.run.shown / "checkpoints" / wanted.checkpoint.name


@contextmanager
def _explained(wanted: Export) -> Iterator[None]:
    """What the disk says to the folder, in our words."""
    try:
        yield
    except FileExistsError as error:
        why = f"{wanted.shown}: something came to lie there meanwhile, and is not overwritten"
        raise ConfigError(why, "give another folder with --to, or remove it") from error
    except OSError as error:
        if error.errno not in DISK:
            raise
        raise RunFolderError(
            f"{wanted.shown}: the export could not be written: {error.strerror}",
            "free some space, or give a folder on another disk with --to",
        ) from error
