"""Which files of a folder are logs, which framework wrote them, and whether they are of one run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from redline.errors import RunFolderError
from redline.runs.others.framework import Framework
from redline.runs.others.log import Kind, Log
from redline.runs.others.prime_rl import PRIME_RL
from redline.runs.others.tensorboard import read_events
from redline.runs.others.text_files import read_console, read_rows, read_state
from redline.runs.others.trl import TRL
from redline.runs.others.verl import VERL
from redline.runs.others.wandb_files import read_wandb
from redline.telemetry.files.durable import read_json

FRAMEWORKS = (TRL, VERL, PRIME_RL)
KNOWN = ", ".join(framework.name for framework in FRAMEWORKS[:-1]) + f" or {FRAMEWORKS[-1].name}"
_KINDS: tuple[Kind, ...] = ("W&B", "TensorBoard", "JSON", "console")
"""Where a run was logged in several ways, the first is read: it holds most."""
_DEPTH = 5
"""Folders below the one given in which a log may lie."""
_MOST_FILES = 64
_MOST_FOLDERS = 2000
_SHOWN = 4
"""Names in a message."""
_TEXTS = (".log", ".out", ".txt")
"""Endings of files that may hold what verl printed."""
_NAMES = ("trainer_state.json", "metrics.jsonl")
_CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(slots=True, frozen=True)
class Source:
    """The logs of one run."""

    framework: Framework
    logs: tuple[Log, ...]


def is_own(folder: Path) -> bool:
    """Whether a folder is a run of ours: it has a config.json that is not a model's with a trainer's log beside it."""
    config = folder / "config.json"
    return config.is_file() and not (folder / "trainer_state.json").is_file() and "model_type" not in read_json(config)


def is_log(path: Path) -> bool:
    """Whether a path is for the readers here: a file with a name that logs have, or a folder with such files that is no run of
    ours."""
    if path.is_file():
        return _may_be_log(path.name, is_top=True) or path.suffix in _TEXTS
    return path.is_dir() and not is_own(path) and any(_files_in(path))


def find_source(path: Path) -> Source | None:
    """Find the logs of one run in a file or a folder; None where there is none. Raises `RunFolderError` for logs of a framework
    that we do not know, of several frameworks, or of several runs. Blocks for as long as the logs take to read."""
    if path.is_file():
        return _of_one_framework(path, [_reader_of(path)(path)])
    files = list(_files_in(path)) if path.is_dir() else []
    if not files:
        return None
    if len(files) > _MOST_FILES:
        raise RunFolderError(f"{path}: it holds {len(files)} logs", f"give one of them, such as {files[0]}")
    return _of_one_framework(path, [_reader_of(file)(file) for file in _without_earlier_states(files)])


def _of_one_framework(path: Path, logs: Sequence[Log]) -> Source:
    by_framework = {framework: [log for log in logs if framework.wrote(log)] for framework in FRAMEWORKS}
    found = [framework for framework, own in by_framework.items() if own]
    if not found:
        names = sorted({name for log in logs for name in log.names})
        if "run/step_s" in names:
            raise RunFolderError(f"{path}: a log of a run of ours, not its folder", f"give the folder: {path.parent}")
        has = f"it has {', '.join(names[:_SHOWN])}" if names else "no figure could be read from it"
        raise RunFolderError(f"{path}: not a log of {KNOWN}: {has}", "give the log of a reinforcement-learning run of theirs")
    if len(found) > 1:
        each = "; ".join(f"{framework.name}: {by_framework[framework][0].path}" for framework in found)
        raise RunFolderError(f"{path}: it holds logs of several frameworks", f"give one of them ({each})")
    return Source(found[0], _of_one_run(path, found[0], by_framework[found[0]]))


def _of_one_run(path: Path, framework: Framework, logs: Sequence[Log]) -> tuple[Log, ...]:
    """Return the logs of the kind that holds most, if they are of one run."""
    kind = next(kind for kind in _KINDS if any(log.kind == kind for log in logs))
    own = sorted((log for log in logs if log.kind == kind), key=lambda log: log.path)
    runs = {log.path.parent if kind == "TensorBoard" else log.path for log in own}
    if len(runs) > 1 and not (framework is PRIME_RL and _complete_each_other(own)):
        shown = ", ".join(str(run) for run in sorted(runs)[:_SHOWN])
        raise RunFolderError(f"{path}: it holds {len(runs)} runs of {framework.name}", f"give one of them: {shown}")
    return tuple(own)


def _complete_each_other(logs: Sequence[Log]) -> bool:
    """Whether two logs are those of prime-rl's trainer and of its orchestrator."""
    writers = [("time/forward_backward" in log.names, "time/wait_for_policy" in log.names) for log in logs]
    return sorted(writers) == [(False, True), (True, False)]


def _reader_of(path: Path) -> Callable[[Path], Log]:
    """Return what reads a file of this name."""
    name = path.name
    if name == "trainer_state.json":
        return read_state
    if "tfevents" in name:
        return read_events
    if name.endswith(".wandb"):
        return read_wandb
    return read_rows if name.endswith(".jsonl") else read_console


def _files_in(top: Path) -> Iterator[Path]:
    """Give the files that may be logs. Below the folder given, rows of JSON are logs only under the name that prime-rl gives
    them: there may be any number of others."""
    for visited, (folder, inside, names) in enumerate(os.walk(top)):
        if visited > _MOST_FOLDERS:
            raise RunFolderError(
                f"{top}: it holds more than {_MOST_FOLDERS:,} folders", "give the log, or the folder of its run"
            )
        here = Path(folder)
        depth = len(here.relative_to(top).parts)
        inside[:] = sorted(name for name in inside if depth < _DEPTH and name[0] != "." and not is_own(here / name))
        yield from (here / name for name in sorted(names) if _may_be_log(name, is_top=not depth))


def _may_be_log(name: str, is_top: bool) -> bool:
    return name in _NAMES or "tfevents" in name or name.endswith(".wandb") or (is_top and name.endswith(".jsonl"))


def _without_earlier_states(files: Sequence[Path]) -> list[Path]:
    """Leave out the states of all checkpoints but the newest: each holds the whole history until then."""
    newest: Mapping[Path, Path] = {
        path.parent.parent: path
        for path in sorted(files, key=_checkpoint)
        if path.name == "trainer_state.json" and _checkpoint(path)
    }
    whole = {path.parent for path in files if path.name == "trainer_state.json" and not _checkpoint(path)}
    kept = {path for folder, path in newest.items() if folder not in whole}
    return [path for path in files if not (path.name == "trainer_state.json" and _checkpoint(path)) or path in kept]


def _checkpoint(path: Path) -> int:
    found = _CHECKPOINT.fullmatch(path.parent.name)
    return int(found[1]) if found else 0
