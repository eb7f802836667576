"""`redline bench memory`: the largest micro-batch that can be trained on, and what fills the memory then.

The size is found by doubling and bisection. Every try is a process of its own that takes two optimizer steps on one
micro-batch. On CUDA a try fails when memory runs out, on the CPU when its resident memory grew beyond `limit_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console

from redline.errors import TrainingError
from redline.lab.bench.memory_probe import Found, probe
from redline.lab.bench.settings import MemorySettings
from redline.lab.bench.table import quantity
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.measure import roofline
from redline.lab.peers.contest import OURS


@dataclass(slots=True, frozen=True)
class Try:
    tokens: int
    fits: bool
    found: Found

    def as_json(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "fits": self.fits, "memory": self.found.memory}


class Search:
    """For the largest micro-batch of one side."""

    def __init__(self, settings: MemorySettings, side: str, limit_bytes: int, console: Console) -> None:
        self._settings = settings
        self._side = side
        self._limit_bytes = limit_bytes
        self._console = console
        self.tries: list[Try] = []

    def run(self) -> Try:
        """The largest try that fits."""
        tokens = self._settings.tokens
        first, most = (max(1, n // tokens) for n in (self._settings.first_tokens, self._settings.most_tokens))
        if not largest(self._fits, first, most, self._settings.tolerance):
            raise TrainingError(
                f"{self._side}: not even one sequence of {tokens:,} tokens fits in {self._limit_bytes:,} bytes",
                "raise limit_bytes, or lower tokens",
            )
        return max((t for t in self.tries if t.fits), key=lambda t: t.tokens)

    def _fits(self, sequences: int) -> bool:
        found = probe(self._settings, self._side, sequences)
        fits = found.peak_bytes is not None and found.peak_bytes <= self._limit_bytes
        self.tries.append(Try(sequences * self._settings.tokens, fits, found))
        took = "memory ran out" if found.peak_bytes is None else quantity(found.peak_bytes, "bytes")
        verdict = "fits" if fits else "does not fit"
        self._console.print(f"{self._side}: {self.tries[-1].tokens:,} tokens: {took}, {verdict}", style="dim")
        return fits


def largest(fits: Callable[[int], bool], first: int, most: int, tolerance: float = 0.0) -> int:
    """The largest number from 1 to `most` that fits, or one so near to it that the next failure is at most a share
    `tolerance` larger; 0 if none does. Whatever is less than a number that fits must fit as well."""
    low, high = 0, most + 1
    while high - low > max(1, tolerance * low):
        middle = min(2 * low or first, most) if high > most else (low + high) // 2
        if fits(middle):
            low = middle
        else:
            high = middle
    return low


def measure(settings: MemorySettings, console: Console) -> Measured:
    limit = settings.limit_bytes or torch.cuda.get_device_properties(settings.device).total_memory
    searches = {name: Search(settings, name, limit, console) for name in (OURS, *(settings.peers or ()))}
    best = {name: search.run() for name, search in searches.items()}
    versions = {}
    if "transformers" in best:
        from transformers import __version__

        versions["transformers"] = __version__
    samples = [{"side": name, **t.as_json()} for name, search in searches.items() for t in search.tries]
    results = [_tokens(best, limit, samples), _memory(best, limit), *_plan(best[OURS])]
    return Measured(settings, results, versions)


def _tokens(best: dict[str, Try], limit: int, samples: Sequence[Any]) -> Result:
    ours, theirs = best[OURS], best.get("transformers")
    assert ours.found.memory is not None
    weights, trained = ours.found.memory["weights"], ours.found.trained_bytes
    bound = roofline.micro_batch_bound(limit, weights, weights if trained is None else trained, ours.found.bytes_per_token)
    figure = PeerFigure("transformers", theirs.tokens, ours.tokens / theirs.tokens) if theirs else None
    return Result("largest micro-batch", ours.tokens, "tokens", samples, bound, figure)


def _plan(ours: Try) -> list[Result]:
    """What the trainer expected at that size, held against what was measured; nothing where it plans nothing."""
    if ours.found.planned is None:
        return []
    planned, measured = dict(ours.found.planned), ours.found.peak_bytes or 0
    bound = Bound(measured, "what was measured: the plan sizes micro-batches by itself if it is right")
    return [Result("memory plan", sum(planned.values()), "bytes", [planned], bound, details={"parts": planned})]


def _memory(best: dict[str, Try], limit: int) -> Result:
    """Memory of each side at its own largest micro-batch, so that there is no ratio."""
    parts = {name: dict(t.found.memory or {}) for name, t in best.items()}
    details = {"parts": parts[OURS]} | ({"peer_parts": parts["transformers"]} if "transformers" in parts else {})
    value = sum(parts[OURS].values())
    return Result("memory at that size", value, "bytes", [parts], Bound(limit, "what training may take"), details=details)
