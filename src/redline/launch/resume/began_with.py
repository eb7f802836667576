"""The weights and the data that a run began with. A run that trains an adapter, or keeps near a reference, needs those weights
again to go on; every run needs its data, or questions that were held out would be trained on."""

from __future__ import annotations

import json
from pathlib import Path

from redline.config import Config
from redline.errors import ModelError, TaskError, boundary
from redline.launch.preflight import LoadedTasks
from redline.telemetry import RunFolder, write_json
from redline.telemetry.files.fingerprint import fingerprint_files

WEIGHTS = ("*.safetensors", "*.bin")
PIECES = 64
"""Pieces of each file of weights that are looked at: training changes all of it."""


def remember_base(folder: RunFolder, model: Path) -> None:
    """Write down which weights a new run begins with."""
    write_json(folder.base_model, {"folder": str(model), "fingerprint": fingerprint(model)})


def refuse_another_base(config: Config, folder: RunFolder, model: Path) -> None:
    """Raise ModelError where a run that goes on would do so from other weights than it began with. A run whose checkpoint holds
    all weights, or that was recorded before they were written down, goes on."""
    needs_base = config.trainer.lora.rank > 0 or config.trainer.kl_coef > 0
    if not needs_base or not folder.base_model.is_file():
        return
    if json.loads(folder.base_model.read_text())["fingerprint"] != fingerprint(model):
        raise ModelError(
            f"model.path = {config.model.path}: the weights in {model} are not those that {folder.path.name} began with",
            "bring back the weights that it began with, or start a new run from these",
        )


def fingerprint(model: Path) -> str:
    """Differs between two folders whose weights differ."""
    return fingerprint_files((path for pattern in WEIGHTS for path in model.glob(pattern)), model, pieces=PIECES)


# ── data ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def remember_data(folder: RunFolder, tasks: LoadedTasks) -> None:
    """Write down which data a new run begins with, where its task source or environment can tell."""
    if found := data_fingerprint(tasks):
        write_json(folder.task_data, {"fingerprint": found})


def refuse_other_data(folder: RunFolder, tasks: LoadedTasks) -> None:
    """Raise TaskError where a run that goes on would do so with other data than it began with. A run that was recorded before
    data was written down goes on."""
    if not folder.task_data.is_file():
        return
    if json.loads(folder.task_data.read_text())["fingerprint"] != data_fingerprint(tasks):
        path = getattr(tasks.source, "path", None)
        raise TaskError(
            f"{path or 'the data of the tasks'}: not the data that {folder.path.name} began with",
            "bring back the files that it began with, since others move held-out questions into training; or start a new run",
        )


def data_fingerprint(tasks: LoadedTasks) -> str:
    """What the task source and the environment say of their data by a method `fingerprint`; empty where neither has one."""
    return "/".join(filter(None, (_told_by(one) for one in (tasks.source, tasks.environment))))


def _told_by(source: object) -> str:
    tell = getattr(source, "fingerprint", None)
    if not callable(tell):
        return ""
    found: object = None
    with boundary() as caught:
        found = tell()
    if isinstance(found, str):
        return found
    why = f"raised {type(caught.error).__name__}: {caught.error}" if caught.error else f"gave a {type(found).__name__}"
    raise TaskError(f"{type(source).__name__}.fingerprint() {why}", "return a text that changes when the data does")
