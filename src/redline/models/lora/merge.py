"""An adapter and the model that it was trained on → one folder that needs neither."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.errors import ModelError
from redline.models.files.modes import give_usual_mode
from redline.models.lora.peft import PROJECTIONS, LowRank, read_adapter

_WEIGHT = re.compile(rf"(?:model\.)?layers\.(\d+)\.(?:self_attn|mlp)\.({'|'.join(PROJECTIONS)})\.weight")


def write_merged(folder: Path, base: Path, adapter: Path) -> None:
    """Write the files of `base` into `folder`, with W + scale · B A (in float32) for every W that the adapter changes."""
    parts = dict(read_adapter(adapter).parts)
    for file in base.iterdir():
        if file.suffix == ".safetensors":
            tensors = {name: _merged(name, weight, parts) for name, weight in load_file(file).items()}
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
            give_usual_mode(folder / file.name)
        elif file.is_file():
            shutil.copyfile(file, folder / file.name)
    if parts:
        layer, projection = next(iter(parts))
        raise ModelError(f"{adapter}: {base} has no {projection} in layer {layer}", "give the adapter's own base model")


def _merged(name: str, weight: Tensor, parts: dict[tuple[int, str], LowRank]) -> Tensor:
    """Return the weight with what the adapter adds to it, which is taken out of `parts`."""
    found = _WEIGHT.fullmatch(name)
    part = parts.pop((int(found[1]), found[2]), None) if found else None
    if part is None:
        return weight
    return torch.addmm(weight.float(), part.b_OR.float(), part.a_RI.float()).to(weight.dtype)
