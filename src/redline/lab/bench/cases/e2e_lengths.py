"""For e2e: whether what was trained on is what was sampled. A speed that drops long answers is no speed at the same work."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redline.lab.evidence.document import Bound, Result


@dataclass(slots=True, frozen=True)
class Lengths:
    """Lengths in the timed steps of one run."""

    dropped: float
    """Late groups over those and the trained ones."""
    trained_tokens: float
    """Mean of the attempts that were trained on."""
    sampled_tokens: float
    """Mean of those and the dropped ones; what was given up under way counts with the tokens it had until then."""

    @staticmethod
    def of(rows: Sequence[Mapping[str, float]], group_size: int) -> Lengths:
        """From the buffer's metrics after each step."""
        groups = sum(row["buffer/trained_groups"] for row in rows)
        tokens = sum(row["buffer/trained_groups"] * row["buffer/trained_tokens_mean"] for row in rows) * group_size
        late = sum(row["buffer/dropped_late"] for row in rows)
        late_attempts = sum(row.get("buffer/dropped_attempts", 0) for row in rows)
        late_tokens = sum(row.get("buffer/dropped_attempts", 0) * row.get("buffer/dropped_tokens_mean", 0.0) for row in rows)
        attempts = groups * group_size
        return Lengths(late / max(1, late + groups), tokens / attempts, (tokens + late_tokens) / (attempts + late_attempts))

    def __str__(self) -> str:
        return f"{self.dropped:.1%} of the groups dropped, {self.trained_tokens:.1f} tokens an attempt trained on"

    def as_json(self) -> dict[str, float]:
        return {
            "dropped_fraction": self.dropped,
            "trained_tokens_mean": self.trained_tokens,
            "sampled_tokens_mean": self.sampled_tokens,
        }


def beside(runs: Sequence[Lengths]) -> dict[str, Any]:
    """What stands beside each speed of a document, and under it in the table."""
    middle = Lengths(
        statistics.fmean(run.dropped for run in runs),
        statistics.fmean(run.trained_tokens for run in runs),
        statistics.fmean(run.sampled_tokens for run in runs),
    )
    return {**middle.as_json(), "beside": str(middle)}


def length_results(prefix: str, runs: Sequence[Lengths]) -> list[Result]:
    kept = [100 * (1 - run.dropped) for run in runs]
    sampled = statistics.fmean(run.sampled_tokens for run in runs)
    trained = [run.trained_tokens for run in runs]
    return [
        Result(f"{prefix}groups trained on", statistics.fmean(kept), "%", kept, Bound(100.0, "no group is dropped as late")),
        Result(
            f"{prefix}tokens of an attempt trained on",
            statistics.fmean(trained),
            "tok",
            [run.as_json() for run in runs],
            Bound(sampled, "all attempts, those that were dropped under way with the tokens they had until then"),
        ),
    ]
