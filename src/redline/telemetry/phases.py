"""Seconds of each part of a stage, for the row of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from redline.telemetry.spans import Recorder

ENGINE_PARTS = ("prefill", "decode", "collect")
TRAINER_PARTS = ("pack", "forward", "backward", "optimizer")


class EngineParts:
    """Of the engine's spans, whichever thread steps it."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._marked = self._booked()

    def mark(self) -> dict[str, float]:
        """Since the last mark: `engine/prefill_s`, …"""
        now, before = self._booked(), self._marked
        self._marked = now
        return part_seconds("engine", ENGINE_PARTS, {name: ns - before[name] for name, ns in now.items()})

    def _booked(self) -> Counter[str]:
        totals = Counter[str]()
        for lane in self._recorder.lane_states():
            totals.update({name: ns for name, ns in lane.booked_ns.items() if name.startswith("engine.")})
        return totals


def part_seconds(section: str, parts: Sequence[str], span_ns: Mapping[str, int]) -> dict[str, float]:
    """`section/part_s` of its spans: 0 for those of `parts` that did not run, and any other that did."""
    found = {name.partition(".")[2]: ns for name, ns in span_ns.items() if name.startswith(f"{section}.") and ns}
    return {f"{section}/{part}_s": ns / 1e9 for part, ns in {**dict.fromkeys(parts, 0), **found}.items()}
