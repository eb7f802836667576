"""Seconds of each part of a stage, for the row of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from redline.telemetry.spans import LaneState, Recorder
from redline.telemetry.summary.timeline import ROLLOUTS_LANE, ROLLOUTS_PREFIX, by_phase

ENGINE_PARTS = ("prefill", "decode", "collect")
TRAINER_PARTS = ("pack", "forward", "backward", "optimizer")


class EngineParts:
    """Seconds of the engine's spans, in whichever thread, and what else that thread did if it is the one of the rollouts."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._engine, self._rollouts = self._booked()

    def mark(self) -> dict[str, float]:
        """Since the last mark: `engine/prefill_s`, …, and `timeline_rollouts/generation_s`, …"""
        before, rollouts_before = self._engine, self._rollouts
        self._engine, self._rollouts = self._booked()
        phases = by_phase({name: max(0, ns - rollouts_before[name]) for name, ns in self._rollouts.items()})
        return {
            **part_seconds("engine", ENGINE_PARTS, {name: ns - before[name] for name, ns in self._engine.items()}),
            **{f"{ROLLOUTS_PREFIX}{phase}_s": ns / 1e9 for phase, ns in phases.items()},
        }

    def _booked(self) -> tuple[Counter[str], Counter[str]]:
        """ns per span: of the engine in all lanes, and of the lane of the rollouts."""
        engine, rollouts = Counter[str](), Counter[str]()
        for lane in self._recorder.lane_states():
            engine.update({name: ns for name, ns in lane.booked_ns.items() if name.startswith("engine.")})
            if lane.name == ROLLOUTS_LANE:
                rollouts = _until(self._recorder.now_ns(), lane)
        return engine, rollouts


def _until(now_ns: int, lane: LaneState) -> Counter[str]:
    """What a lane has booked, and what it is at since: a wait may be longer than a step."""
    booked = Counter(lane.booked_ns)
    if lane.is_alive:
        booked[lane.innermost] += max(0, now_ns - lane.booked_until_ns)
    return booked


def part_seconds(section: str, parts: Sequence[str], span_ns: Mapping[str, int]) -> dict[str, float]:
    """`section/part_s` of its spans: 0 for those of `parts` that did not run, and any other that did."""
    found = {name.partition(".")[2]: ns for name, ns in span_ns.items() if name.startswith(f"{section}.") and ns}
    return {f"{section}/{part}_s": ns / 1e9 for part, ns in {**dict.fromkeys(parts, 0), **found}.items()}
