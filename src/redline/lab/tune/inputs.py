"""What a recipe reads of this machine's disk: trials of other weights or other tasks are those of another tuning."""

from __future__ import annotations

from pathlib import Path

from redline.config import Config
from redline.config.paths import is_run_folder, model_of_run
from redline.launch.preflight import LoadedTasks
from redline.launch.resume.began_with import PIECES, WEIGHTS, data_fingerprint
from redline.telemetry.files.fingerprint import fingerprint_files


def inputs_of(config: Config, tasks: LoadedTasks) -> dict[str, str]:
    """What is read → a text that is another where its content is; empty where its name in the recipe says which it is."""
    models = (config.model.path, config.rollouts.reward_model.path)
    return {"model": "/".join(_model(path) for path in models if path), "set_of_tasks": data_fingerprint(tasks)}


def _model(path: str) -> str:
    local = Path(path).expanduser()
    folder = model_of_run(local) if is_run_folder(local) else local
    files = [file for pattern in (*WEIGHTS, "*.json") for file in folder.glob(pattern)] if folder.is_dir() else [folder]
    return fingerprint_files(files, folder if folder.is_dir() else folder.parent, pieces=PIECES) if folder.exists() else ""
