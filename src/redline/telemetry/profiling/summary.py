"""What a profile comes to: the largest operators and kernels, by the stage that called them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from redline.telemetry.profiling.timeline import Event, Owners

NUM_OPERATORS = 30
NUM_PER_STAGE = 10
DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")


@dataclass(slots=True)
class _Sum:
    calls: int = 0
    us: float = 0.0

    def add(self, us: float) -> None:
        self.calls += 1
        self.us += us


@dataclass(slots=True)
class Operators:
    """(stage, name) → what it took, of the host or of the device."""

    sums: defaultdict[tuple[str, str], _Sum] = field(default_factory=lambda: defaultdict(_Sum))

    def largest(self, stage: str | None = None, most: int = NUM_OPERATORS) -> list[dict[str, Any]]:
        """By self time; of one stage, or of all together."""
        totals: defaultdict[str, _Sum] = defaultdict(_Sum)
        for (of_stage, name), part in self.sums.items():
            if stage in (None, of_stage):
                totals[name].calls += part.calls
                totals[name].us += part.us
        ordered = sorted(totals.items(), key=lambda item: -item[1].us)[:most]
        return [{"name": name, "calls": total.calls, "self_s": total.us / 1e6} for name, total in ordered]

    def by_stage(self) -> dict[str, dict[str, Any]]:
        stages: defaultdict[str, float] = defaultdict(float)
        for (stage, _), part in self.sums.items():
            stages[stage] += part.us
        ordered = sorted(stages.items(), key=lambda item: -item[1])
        return {stage: {"self_s": us / 1e6, "operators": self.largest(stage, NUM_PER_STAGE)} for stage, us in ordered}


class Stages:
    """The stage that a thread was in at a moment."""

    def __init__(self, owners: Mapping[str, Owners], lanes: Mapping[int, str]) -> None:
        """`lanes`: the kernel's number of a thread → its lane. Other threads, such as autograd's, work for the main lane."""
        self._owners = owners
        self._lanes = lanes

    def at(self, thread: Any, us: float) -> str:
        owners = self._owners.get(self._lanes.get(thread, "main"))
        return owners.at(us).partition(".")[0] if owners else "unknown"


def host_operators(events: Iterable[Event], stages: Stages) -> Operators:
    """Self time of torch's operators: their own less that of the operators they called."""
    threads: defaultdict[Any, list[Event]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op" and event.get("ph") == "X":
            threads[event["tid"]].append(event)
    operators = Operators()
    for thread, calls in threads.items():
        for call, self_us in _self_times(calls):
            operators.sums[stages.at(thread, call["ts"]), call["name"]].add(self_us)
    return operators


def device_operators(events: Iterable[Event], stages: Stages) -> Operators:
    """Time of kernels and copies, in the stage that launched them."""
    events = list(events)
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }
    operators = Operators()
    for event in events:
        if event.get("cat") in DEVICE_CATEGORIES:
            launch = launches.get(event.get("args", {}).get("correlation"))
            stage = stages.at(launch["tid"], launch["ts"]) if launch else "unknown"
            operators.sums[stage, event["name"]].add(event["dur"])
    return operators


def _self_times(calls: list[Event]) -> Iterator[tuple[Event, float]]:
    stack: list[tuple[Event, float]] = []
    """Open calls, and what their callees have taken so far."""
    for call in sorted(calls, key=lambda e: (e["ts"], -e["dur"])):
        while stack and stack[-1][0]["ts"] + stack[-1][0]["dur"] <= call["ts"]:
            done, callees_us = stack.pop()
            yield done, max(0.0, done["dur"] - callees_us)
        if stack:
            stack[-1] = (stack[-1][0], stack[-1][1] + call["dur"])
        stack.append((call, 0.0))
    while stack:
        done, callees_us = stack.pop()
        yield done, max(0.0, done["dur"] - callees_us)
