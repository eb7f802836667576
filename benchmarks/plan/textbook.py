"""The budget that guides begin with: everything a model needs on one device, all at once.

    weights 2 · P,  gradients 2 · P,  optimizer states 4 · P  (two means in the compute dtype),  cache, activations, gaps

Our trainer needs more of some terms (float32 masters, sums and means: 18 bytes for each parameter instead of 8) and less of
others; `redline/lab/plan/memory.py` has those. This is the arithmetic of the example that is handed on from guide to guide, so
that a plan can be held beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redline.lab.plan.memory import Phase

BYTES = {"weights": 2, "gradients": 2, "optimizer states": 4}
"""Bytes for each parameter."""


@dataclass(slots=True, frozen=True)
class Change:
    """A way to make it smaller, by the rule of thumb that goes with it."""

    name: str
    keeps: Mapping[str, float]
    """Term → the share that is left."""
    costs: str


CHANGES = (
    Change("gradient checkpointing", {"activations": 0.6}, "10-20% slower"),
    Change("half the KV cache", {"KV cache": 0.5}, "fewer sequences at once"),
    Change("optimizer states in host memory", {"optimizer states": 0.0}, "30-50% slower"),
    Change("LoRA", {"gradients": 0.1, "optimizer states": 0.1}, "similar quality, not the same"),
)


def all_at_once(parameters: float, kv_cache: float, activations: float, gaps: float) -> Phase:
    """Bytes by term."""
    terms = {name: round(size * parameters) for name, size in BYTES.items()}
    return Phase("all at once", terms | {"KV cache": round(kv_cache), "activations": round(activations), "gaps": round(gaps)})


def after(phase: Phase, *changes: Change) -> Phase:
    terms = dict(phase.terms)
    for change in changes:
        terms |= {name: round(terms[name] * share) for name, share in change.keeps.items()}
    return Phase(phase.name, terms)


def enough(phase: Phase, memory_bytes: int) -> list[str]:
    """The changes that make it fit, each alone."""
    return [change.name for change in CHANGES if after(phase, change).total <= memory_bytes]
