"""An adapter and the model that it was trained on → one folder that needs neither."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.errors import ModelError
from redline.models.files.modes import give_usual_mode
from redline.models.files.stored import weight_files
from redline.models.lora.peft import PROJECTIONS, LowRank, read_adapter

_WEIGHT = re.compile(rf"(?:model\.)?layers\.(\d+)\.(?:self_attn|mlp)\.({'|'.join(PROJECTIONS)})\.weight")
OWN_BASE = "give the adapter's own base model"


def write_merged(folder: Path, base: Path, adapter: Path) -> None:
    """Write the files of `base` into `folder`, with W + scale · B A (in float32) for every W that the adapter changes. Raises
    ModelError where the two do not belong together."""
    parts, weights = dict(read_adapter(adapter).parts), weight_files(base)
    for file in weights:
        tensors = {name: _merged(name, weight, parts, adapter) for name, weight in _read(file).items()}
        save_file(tensors, folder / file.name, metadata={"format": "pt"})
        give_usual_mode(folder / file.name)
    for file in base.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copyfile(file, folder / file.name)
    if parts:
        layer, projection = next(iter(parts))
        raise ModelError(f"{adapter}: {base} has no {projection} in layer {layer}", OWN_BASE)


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: damaged: {error}", "download or convert the model again") from error


def _merged(name: str, weight: Tensor, parts: dict[tuple[int, str], LowRank], adapter: Path) -> Tensor:
    """Return the weight with what the adapter adds to it, which is taken out of `parts`."""
    found = _WEIGHT.fullmatch(name)
    part = parts.pop((int(found[1]), found[2]), None) if found else None
    if part is None:
        return weight
    if weight.shape != (len(part.b_OR), part.a_RI.shape[1]):
        sizes = [len(part.b_OR), part.a_RI.shape[1]]
        raise ModelError(f"{adapter}: made for {name} of {sizes}, and its base has {list(weight.shape)}", OWN_BASE)
    return torch.addmm(weight.float(), part.b_OR.float(), part.a_RI.float()).to(weight.dtype)
