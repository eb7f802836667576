"""Steps whose loss or gradient is NaN or infinite: found on the device, explained, counted, and their batch kept for replay."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

from redline.errors import RunFolderError, TrainingError
from redline.models.files.modes import give_usual_mode
from redline.types import Flat, TrainBatch, VersionSpan

MOST_NAMED = 8
"""Parameters and tokens that an explanation names; the rest it counts."""


class NonFiniteError(TrainingError):
    """Too many steps in a row gave numbers that must not be trained on."""


# ── what was found ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class GradientNorms:
    """L2 norms before clipping, on the device: reading one waits for everything before it. P parameters."""

    names: tuple[str, ...]
    norms_P: Callable[[], Tensor]
    """The norm of each parameter's gradient, computed on demand."""
    total: Tensor
    """Scalar: of all parameters together."""
    skip: Tensor
    """Scalar: 1.0 where the step was skipped, because `total` or the loss is not finite; else 0.0."""

    def bad_parameters(self) -> list[str]:
        """Those whose gradient holds a NaN or an infinity, or is too large to be squared."""
        return [name for name, norm in zip(self.names, self.norms_P().tolist(), strict=True) if not math.isfinite(norm)]


def gradient_norms(total: Tensor, names: tuple[str, ...], norms_P: Callable[[], Tensor], loss: Tensor | None) -> GradientNorms:
    """From the norm of all gradients, with the way to that of each. Nothing waits for the device."""
    finite = total.isfinite() if loss is None else total.isfinite() & loss.detach().to(total.device).isfinite().all()
    return GradientNorms(names, norms_P, total, 1.0 - finite.float())


@dataclass(slots=True, frozen=True)
class BadToken:
    """A trained token with a number that is not finite."""

    sequence: int
    """Its index in the `TrainBatch`."""
    token: int
    """Its place among the sequence's trained tokens, from 0."""
    quantity: str
    """What is not finite: `logprob`, `advantage`, …"""


def bad_tokens(quantities: Mapping[str, Tensor], sequence_M: Tensor) -> list[BadToken]:
    """The trained tokens of a micro-batch whose float[M] quantities are not finite. Waits for the device."""
    found = []
    sequences = sequence_M.cpu().numpy()
    for quantity, values_M in quantities.items():
        for index in torch.nonzero(~values_M.detach().isfinite()).flatten().tolist():
            sequence = int(sequences[index])
            token = int(np.count_nonzero(sequences[:index] == sequence))
            found.append(BadToken(sequence, token, quantity))
    return found


# ── what to do about it ────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class BadStep:
    """Why a step was skipped."""

    version: int
    """The version of the policy that took the step; the step was skipped, so it stayed."""
    loss: float
    grad_norm: float
    parameters: tuple[str, ...] = ()
    """Whose gradients are not finite."""
    tokens: tuple[BadToken, ...] = ()
    """Where it began, as far as the trainer could tell."""
    update: str = ""
    """Which of its updates, where there are several."""

    @property
    def step(self) -> int:
        """version + 1: the step, counted from 1 as `metrics.jsonl` does."""
        return self.version + 1

    def __str__(self) -> str:
        numbers = f"loss {self.loss:g}, gradient norm {self.grad_norm:g}"
        told = [f"step {self.step}{self.update}: {numbers}; the weights are unchanged"]
        if self.tokens:
            told.append(_listed([f"{t.quantity} of token {t.token} of sequence {t.sequence}" for t in self.tokens]))
        if self.parameters:
            told.append(f"gradient of {_listed(list(self.parameters))}")
        return "; not finite: ".join(told)


class BadSteps:
    """Counts them, and ends the run after too many in a row."""

    def __init__(self, most_in_a_row: int, folder: Path | None) -> None:
        """The last batch goes to `folder`; None keeps none, in a process that writes no files."""
        self._most = most_in_a_row
        self._folder = folder
        self.total = 0
        self.in_a_row = 0

    def good(self) -> None:
        """A step went well."""
        self.in_a_row = 0

    def bad(self, step: BadStep, batch: TrainBatch) -> None:
        """A step was skipped; the last one allowed keeps its batch, and raises."""
        self.total += 1
        self.in_a_row += 1
        if self.in_a_row < self._most:
            return
        kept = ""
        if self._folder is not None:
            save_batch(self._folder / f"step-{step.step:06d}", batch, step)
            kept = f"\nthe batch is in {self._folder / f'step-{step.step:06d}'}"
        raise NonFiniteError(
            f"{self.in_a_row} steps in a row that are not finite, the last: {step}{kept}",
            "lower trainer.learning_rate, or resume from the last checkpoint with model.dtype=float32",
        )


# ── the batch, for replay ──────────────────────────────────────────────────────────────────────────────────────────────


def save_batch(folder: Path, batch: TrainBatch, step: BadStep | None = None) -> None:
    """Arrays to batch.safetensors, all else to batch.json, and why to why.json."""
    folder.mkdir(parents=True, exist_ok=True)
    values = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    arrays = {name: np.ascontiguousarray(value) for name, value in values.items() if isinstance(value, Flat)}
    others = {name: value for name, value in values.items() if name not in arrays}
    others["versions"] = dataclasses.asdict(batch.versions)
    save_file(arrays, folder / "batch.safetensors")
    give_usual_mode(folder / "batch.safetensors")
    (folder / "batch.json").write_text(json.dumps(others, indent=2) + "\n")
    if step is not None:
        # NaN is not JSON: numbers that may be one are written as text.
        why = dataclasses.asdict(step) | {"loss": str(step.loss), "grad_norm": str(step.grad_norm)}
        (folder / "why.json").write_text(json.dumps(why, indent=2) + "\n")


def load_batch(folder: Path) -> TrainBatch:
    """What `save_batch` wrote."""
    try:
        others: dict[str, Any] = json.loads((folder / "batch.json").read_text())
        arrays = load_file(folder / "batch.safetensors")
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{folder}: no batch to replay: {error}", "give a folder that a skipped step has left") from error
    listed = {name: tuple(value) for name, value in others.items() if isinstance(value, list)}  # JSON knows no tuples
    return TrainBatch(**{**others, **listed, **arrays, "versions": VersionSpan(**others["versions"])})


def _listed(names: list[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
