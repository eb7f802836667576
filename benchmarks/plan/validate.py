"""Hold plans against measurements, point by point: memory of every phase and the time of a step. Every point runs in a process
of its own; a table on stderr, one JSON document saved.

python benchmarks/plan/validate.py --device cuda --save benchmarks/results/h200     under five minutes on an H200
python benchmarks/plan/validate.py --device cpu --save benchmarks/results/cpu       one thread, processor seconds
python benchmarks/plan/validate.py --again benchmarks/results/h200/plan.json        the same measurements, planned anew
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from points import CPU_POINTS, CUDA_POINTS, Point
from probe import CPU_THREADS, probe
from rich import box
from rich.console import Console
from rich.table import Table

from redline.config.load import validate as validate_recipe
from redline.lab.bench.table import quantity
from redline.lab.plan.calibration import ASSUMED, ASSUMED_CPU, fit, observations_of, training_setup
from redline.lab.plan.cpu import measure_cpu
from redline.lab.plan.devices import CPU_PRICE, Device, find_device
from redline.lab.plan.memory import estimate_memory
from redline.lab.plan.rates import Rates
from redline.lab.plan.setup import Setup, make_setup
from redline.lab.plan.timing import estimate_time
from redline.telemetry import describe_environment, write_json
from redline.telemetry.console.tables import Fitted

TOLERANCES = {"cuda": (0.08, 0.25), "cpu": (0.15, 0.35)}
"""Relative errors of memory and of time that a plan may have."""


@dataclass(slots=True, frozen=True)
class Row:
    """One quantity of one point."""

    point: str
    phase: str
    kind: str
    """memory or time."""
    planned: float
    measured: float
    tolerance: float

    @property
    def error(self) -> float:
        """planned / measured - 1."""
        return self.planned / self.measured - 1

    @property
    def within(self) -> bool:
        return abs(self.error) <= self.tolerance

    def as_json(self) -> dict[str, Any]:
        return {
            "point": self.point,
            "phase": self.phase,
            "kind": self.kind,
            "planned": self.planned,
            "measured": self.measured,
            "error": self.error,
            "tolerance": self.tolerance,
            "within": self.within,
        }


def validate(
    device_kind: str, console: Console, points: Sequence[Point] | None = None, folder: Path | None = None
) -> dict[str, Any]:
    """Measure every point in a process of its own, then plan each. One JSON document, which `folder` gets point by point."""
    points = points or (CUDA_POINTS if device_kind == "cuda" else CPU_POINTS)
    facts = describe_environment()
    device, process_bytes, rates = _this_device(device_kind, facts)
    found: dict[str, Any] = {}
    measured: list[tuple[Point, dict[str, Any]]] = []
    for number, point in enumerate(points, 1):
        measured.append((point, probe(point, device_kind)))
        console.print(
            f"{number}/{len(points)} {point.name}: {measured[-1][1].get('error', 'measured')}", style="dim", soft_wrap=True
        )
        found = document(device, process_bytes, rates, measured, facts)
        if folder is not None:
            save(found, folder)
    device, process_bytes, later = _this_device(device_kind, facts)
    best = {name: max(rate, later[name]) for name, rate in rates.items()}  # neighbours may have been busy at either time
    return document(device, process_bytes, best, measured, facts)


def document(
    device: Device,
    process_bytes: int,
    rates: Mapping[str, float],
    measured: Sequence[tuple[Point, Mapping[str, Any]]],
    facts: Mapping[str, Any],
) -> dict[str, Any]:
    """The points with what was measured, the rates they give, and the rows that hold plans against them."""
    stored = [
        point.as_json() | ({"error": found["error"]} if "error" in found else {"measured": dict(found)})
        for point, found in measured
    ]
    fitted = calibrated(device, rates, stored)
    rows = [row for point in stored if "measured" in point for row in rows_of(point, device, process_bytes, fitted)]
    return {
        "case": "plan",
        "identity": {**facts, "device": device.name},
        "rates": dict(rates),
        "process_bytes": process_bytes,
        "efficiency": {
            "generation": fitted.generation.how,
            "training": fitted.training.how,
            "optimizer": fitted.optimizer.how,
        },
        "points": stored,
        "rows": [row.as_json() for row in rows],
    }


def again(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved document with its plans made anew: the same measurements, this version's formulas and calibration points."""
    kind = "cpu" if saved["identity"]["device"] == "cpu" else "cuda"
    calibrates = {point.name: point.calibrates for point in (CPU_POINTS if kind == "cpu" else CUDA_POINTS)}
    device = _device_of(kind, saved["identity"]["device"], saved["rates"], saved["identity"]["memory_bytes"])
    points = [
        (
            Point(p["name"], p["phase"], p["settings"], calibrates.get(p["name"], p["calibrates"])),
            p.get("measured") or {"error": p["error"]},
        )
        for p in saved["points"]
    ]
    return document(device, saved["process_bytes"], saved["rates"], points, saved["identity"])


def calibrated(device: Device, rates: Mapping[str, float], points: Sequence[Mapping[str, Any]]) -> Rates:
    """Efficiencies from the points that calibrate, and on a GPU from what else is saved for it."""
    assumed = ASSUMED if device.is_gpu else ASSUMED_CPU
    nominal = Rates(rates["flops"], rates["bandwidth"], device.host_bandwidth, **assumed)
    found = [
        observation
        for point in points
        if point["calibrates"] and "measured" in point
        for observation in observations_of(point, device, nominal, "calibration points")
    ]
    phases = {phase: fit([o for o in found if o.phase == phase], default) for phase, default in assumed.items()}
    return Rates(nominal.flops, nominal.bandwidth, nominal.host_bandwidth, **phases)


def rows_of(point: Mapping[str, Any], device: Device, process_bytes: int, rates: Rates) -> Iterator[Row]:
    """Memory of each phase that was watched, and its time. On the CPU the heap keeps what was freed, so only the highest phase
    means anything."""
    name, measured = point["name"], point["measured"]
    memory_tolerance, time_tolerance = TOLERANCES[device.kind]
    setup = point_setup(point, device, process_bytes)
    estimate = estimate_memory(setup)
    peaks = dict(measured["peaks"])
    if device.kind == "cpu":
        highest = max(peaks, key=lambda phase: estimate.phase(phase).total)
        peaks = {highest: max(peaks.values())}
    for phase, peak in peaks.items():
        planned = planned_bytes(setup, phase, estimate.phase(phase).terms)
        yield Row(name, phase, "memory", planned, peak, memory_tolerance)
    if point["calibrates"]:
        return
    times = estimate_time(setup, estimate, rates)
    seconds = {
        "generation": measured.get("seconds"),
        "forward/backward": measured.get("forward_backward_s"),
        "optimizer step": measured.get("optimizer_s"),
    }
    if point["phase"] == "training":
        whole = seconds["forward/backward"] + seconds["optimizer step"]
        planned_s = times.seconds_of("forward/backward") + times.seconds_of("optimizer step")
        yield Row(name, "step", "time", planned_s, whole, time_tolerance)
    else:
        yield Row(name, "generation", "time", times.seconds_of("generation"), seconds["generation"], time_tolerance)


def point_setup(point: Mapping[str, Any], device: Device, process_bytes: int) -> Setup:
    settings = point["settings"]
    if point["phase"] == "training":
        return replace(training_setup(settings, device), process_bytes=process_bytes)
    recipe = {
        "model": {"path": settings["model"], "dtype": settings["dtype"]},
        "rollouts": {
            "task": {"kind": "import", "path": "no:tasks"},
            "advantages": "batch",
            "groups_per_step": settings["prompts"],
            "group_size": settings["n"],
            "max_new_tokens": settings["new_tokens"],
        },
        "engine": settings["engine"],
    }
    setup = make_setup(validate_recipe(recipe, "a point"), device, prompt_tokens=settings["prompt_tokens"])
    return replace(setup, process_bytes=process_bytes)


def planned_bytes(setup: Setup, phase: str, terms: Mapping[str, int]) -> int:
    """What of a plan is there when the phase runs alone: a trainer without an engine, an engine without a trainer. On CUDA it
    is held against what torch allocated, on the CPU against resident memory."""
    absent = {"KV cache"} if phase != "generation" else {"masters", "moments", "gradients"}
    if setup.device.is_gpu:
        absent |= {"CUDA context", "gaps"}
    return sum(size for name, size in terms.items() if name not in absent)


def _this_device(kind: str, facts: Mapping[str, Any]) -> tuple[Device, int, dict[str, float]]:
    if kind == "cuda":
        device = find_device(facts["gpus"][0]["name"])
        return device, 0, {"flops": device.flops, "bandwidth": device.bandwidth}
    cpu = measure_cpu(torch.bfloat16, CPU_THREADS)
    rates = {"flops": cpu.flops, "bandwidth": cpu.bandwidth}
    return _device_of(kind, "cpu", rates, facts["memory_bytes"]), cpu.process_bytes, rates


def _device_of(kind: str, name: str, rates: Mapping[str, float], memory_bytes: int) -> Device:
    if kind == "cuda":
        return find_device(name)
    bandwidth = rates["bandwidth"]
    return Device("cpu", memory_bytes, rates["flops"], bandwidth, bandwidth / 2, bandwidth / 2, 0, CPU_PRICE, "cpu")


# ── for people ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def render(saved: Mapping[str, Any]) -> Fitted:
    table = Table(box=box.SIMPLE_HEAD, title=f"plan on {saved['identity']['device']}", title_justify="left")
    for title in ("point", "phase"):
        table.add_column(title, no_wrap=True)
    for title in ("planned", "measured", "error", "within"):
        table.add_column(title, justify="right", no_wrap=title != "within")
    for row in saved["rows"]:
        unit = "bytes" if row["kind"] == "memory" else "s"
        table.add_row(
            row["point"],
            row["phase"],
            quantity(row["planned"], unit),
            quantity(row["measured"], unit),
            f"{row['error']:+.1%}",
            f"{row['tolerance']:.0%}" if row["within"] else "MISS",
            style="" if row["within"] else "red",
        )
    for point in saved["points"]:
        if "error" in point:
            table.add_row(point["name"], point["phase"], "", "", "", point["error"], style="red")
    return Fitted(table)


def save(saved: Mapping[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "plan.json"
    write_json(path, dict(saved))
    return path


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write DIR/plan.json")
    parser.add_argument("--again", type=Path, metavar="FILE", help="plan the points of a saved document anew, measure nothing")
    asked = parser.parse_args()
    console = Console(stderr=True, highlight=False, width=140)
    folder = asked.save or (asked.again.parent if asked.again else None)
    found = again(load(asked.again)) if asked.again else validate(asked.device, console, folder=folder)
    console.print(render(found))
    for phase, how in found["efficiency"].items():
        console.print(f"{phase}: {how}", style="dim", soft_wrap=True)
    if folder:
        print(save(found, folder))


if __name__ == "__main__":
    main()
