"""The weights that a run began with. A run that trains an adapter, or keeps near a reference, needs them again to go on."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from redline.config import Config
from redline.errors import ModelError
from redline.telemetry import RunFolder, write_json

WEIGHTS = ("*.safetensors", "*.bin")
PIECES, PIECE_BYTES = 64, 4096
"""What of each file is looked at, spread evenly: training changes all of it, and to read gigabytes takes too long."""


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
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(path for pattern in WEIGHTS for path in model.glob(pattern)):
        size = path.stat().st_size
        digest.update(f"{path.name}/{size}/".encode())
        with path.open("rb") as file:
            for place in range(0, size, max(PIECE_BYTES, size // PIECES)):
                file.seek(place)
                digest.update(file.read(PIECE_BYTES))
    return digest.hexdigest()
