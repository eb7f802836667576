"""What must stay as it was while a run gets faster, and what may change but is said beside the gain."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redline.lab.evidence.experiment import Pair, Sample
from redline.lab.evidence.guards import KL_FLOOR

MEMORY = "peak memory"
FEWER = 0.01
"""Share of the attempts of a step that may be missing."""
LOST = 0.02
"""Share of groups or attempts that may be dropped or fail beyond those before."""
MISMATCH = "mismatch"
RISEN = 0.5
"""Share by which the mismatch of engine and trainer may rise."""
SAME = 0.02
"""Changes smaller than this share are not told."""


@dataclass(slots=True, frozen=True)
class Kept:
    """A figure of both sides."""

    name: str
    before: float
    after: float
    is_broken: bool

    @property
    def is_told(self) -> bool:
        """Whether it changed by so much that a person should know."""
        scale, least = max(abs(self.before), abs(self.after)), KL_FLOOR if self.name == MISMATCH else 0.0
        return self.is_broken or (scale > least and abs(self.after - self.before) > SAME * scale)

    @property
    def words(self) -> str:
        """`lag 0 → 0.94 steps`."""
        unit = UNITS.get(self.name, "")
        before, after = (_bytes(value) if self.name == MEMORY else f"{value:.3g}" for value in (self.before, self.after))
        return f"{self.name} {before} → {after}{f' {unit}' if unit else ''}{', not allowed' if self.is_broken else ''}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def kept(pairs: Sequence[Pair]) -> list[Kept]:
    """Compare what both sides did, other than their speed. A figure that either side lacks is left out."""
    found = {name: _sides(pairs, figure) for name, figure in FIGURES.items()}
    lag = found["lag"]
    made = []
    for name, sides in found.items():
        if sides is not None:
            is_broken = name in BROKEN and BROKEN[name](*sides) and not (name in OF_LAG and lag is not None and lag[1] > lag[0])
            made.append(Kept(name, *sides, is_broken))
    peaks = [pair.peak_bytes for pair in pairs if pair.peak_bytes and all(pair.peak_bytes)]
    if peaks:
        made.append(Kept(MEMORY, statistics.fmean(p[0] for p in peaks), statistics.fmean(p[1] for p in peaks), False))
    return made


def _sides(pairs: Sequence[Pair], figure: Callable[[Sample], float | None]) -> tuple[float, float] | None:
    rounds = [each for pair in pairs for each in pair.rounds]
    sides = []
    for samples in ([each.a for each in rounds], [each.b for each in rounds]):
        values = [value for sample in samples if (value := figure(sample)) is not None and math.isfinite(value)]
        if not values:
            return None
        sides.append(statistics.fmean(values))
    return sides[0], sides[1]


def _samples(row: Sample) -> float | None:
    speed, seconds = row.get("run/samples_per_s"), row.get("run/step_s")
    return None if speed is None or seconds is None else speed * seconds


def _failures(row: Sample) -> float | None:
    attempts = row.get("rollouts/attempts")
    return row.get("rollouts/failures", 0.0) / attempts if attempts else None


FIGURES: Mapping[str, Callable[[Sample], float | None]] = {
    "samples a step": _samples,
    "tokens an attempt": lambda row: row.get("buffer/trained_tokens_mean", row.get("rollouts/completion_tokens_mean")),
    "dropped groups": lambda row: row.get("buffer/dropped_late_fraction"),
    "failed attempts": _failures,
    MISMATCH: lambda row: row.get("trainer/mismatch_kl"),
    "lag": lambda row: row.get("buffer/lag_mean", row.get("buffer/policy_lag_steps")),
    "reward": lambda row: row.get("rollouts/reward_mean"),
}
"""Name → the figure of one round."""
METRICS = frozenset(
    (
        "run/step_s", "run/samples_per_s", "wall_s", "cpu_s", "rollouts/attempts", "rollouts/failures", "rollouts/reward_mean",
        "rollouts/completion_tokens_mean", "trainer/mismatch_kl", "buffer/trained_tokens_mean", "buffer/dropped_late_fraction",
        "buffer/lag_mean", "buffer/policy_lag_steps",
    )
)  # fmt: skip
"""What the log keeps of a round."""
BROKEN: Mapping[str, Callable[[float, float], bool]] = {
    "samples a step": lambda before, after: after < (1 - FEWER) * before,
    "dropped groups": lambda before, after: after > before + LOST,
    "failed attempts": lambda before, after: after > before + LOST,
    MISMATCH: lambda before, after: after > before + max(KL_FLOOR, RISEN * before),
}
"""Figures that end a change however fast it is."""
OF_LAG = (MISMATCH,)
"""Figures that older samples change by themselves: with a larger lag they are told, and end nothing."""
UNITS = {"lag": "steps", MISMATCH: "nats"}


def _bytes(value: float) -> str:
    return f"{value / 1e9:.2f} GB" if value >= 1e9 else f"{value / 1e6:.0f} MB"
