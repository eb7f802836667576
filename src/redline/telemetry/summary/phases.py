"""Seconds of each part of a stage, for the row of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from redline.telemetry.spans import LaneState, Recorder
from redline.telemetry.summary.timeline import LANES, by_phase

ENGINE_PARTS = ("prefill", "decode", "collect")
TRAINER_PARTS = ("pack", "forward", "backward", "optimizer")


class EngineParts:
    """Seconds of the engine's spans, in whichever thread, and of everything in the lanes of rollouts and environments."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._engine, self._lanes = self._booked()

    def mark(self) -> dict[str, float]:
        """Since the last mark: `engine/prefill_s`, …, `timeline_rollouts/generation_s`, …"""
        engine_before, lanes_before = self._engine, self._lanes
        self._engine, self._lanes = self._booked()
        found = part_seconds("engine", ENGINE_PARTS, {name: ns - engine_before[name] for name, ns in self._engine.items()})
        for lane, booked in self._lanes.items():
            before = lanes_before.get(lane, Counter())
            phases = by_phase({name: max(0, ns - before[name]) for name, ns in booked.items()})
            found |= {f"{LANES[lane]}{phase}_s": ns / 1e9 for phase, ns in phases.items()}
        return found

    def _booked(self) -> tuple[Counter[str], dict[str, Counter[str]]]:
        """ns per span: of the engine in all lanes, and of each of `LANES` that there is."""
        engine, lanes = Counter[str](), dict[str, Counter[str]]()
        for lane in self._recorder.lane_states():
            engine.update({name: ns for name, ns in lane.booked_ns.items() if name.startswith("engine.")})
            if lane.name in LANES:
                lanes[lane.name] = _until(self._recorder.now_ns(), lane)
        return engine, lanes


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
