"""`redline perf`: counts and ratios of a few small workloads, held against the baseline of this class of device.

0    nothing is worse
1    something is
2    there is no baseline to hold it against, or none that can be
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from redline.errors import CompareError
from redline.kernels.cpu.products import products
from redline.lab.evidence.statistics import of_log_ratios
from redline.lab.gate.baseline import RATIO, Baseline, Check, Figure, device_class
from redline.lab.gate.counts import count
from redline.lab.gate.reference import VERSION, Reference
from redline.lab.gate.workloads import SAMPLED, WORKLOADS, Work
from redline.lab.measure.machine import device_name, synchronize
from redline.lab.measure.pairs import interleave
from redline.telemetry import describe_environment
from redline.telemetry.console.tables import Fitted

COUNTED, TIMED = "builtin:tiny", "builtin:small"
"""Counts need no time to be true; ratios need a network that takes longer than the Python around it."""
ROUNDS = 12
FOLDER = Path("benchmarks/baselines")
STYLES = {"worse": "bold red", "better": "green", "same": "dim", "not comparable": "yellow"}


@dataclass(slots=True, frozen=True)
class Outcome:
    identity: Mapping[str, Any]
    figures: Sequence[Figure]
    checks: Sequence[Check]
    baseline: Baseline | None

    @property
    def exit_code(self) -> int:
        comparable = [check for check in self.checks if check.state != "not comparable"]
        if self.baseline is None or (self.checks and not comparable):
            return 2
        return 1 if any(check.state == "worse" for check in self.checks) else 0

    def as_json(self) -> dict[str, Any]:
        states = {check.figure.name: {"state": check.state, "change": check.change} for check in self.checks}
        results = [figure.as_json() | states.get(figure.name, {}) for figure in self.figures]
        return {"case": "perf", "identity": dict(self.identity), "results": results, "exit_code": self.exit_code}


def perf(device: str, folder: Path, reason: str | None, console: Console) -> Outcome:
    """Measure and check against the baseline; progress goes to `console`. With a reason, what is found becomes the baseline."""
    has_cuda = torch.cuda.is_available()
    if device == "cuda" and not has_cuda:
        raise CompareError("--device cuda: there is no NVIDIA device here", "leave it out, or --device cpu")
    if folder.exists() and not folder.is_dir():
        raise CompareError(f"--baselines {folder}: no folder", "give the folder that holds cpu.json and the like")
    where = torch.device(device if device != "auto" else "cuda" if has_cuda else "cpu")
    path = folder / f"{device_class(device_name(where))}.json"
    baseline = Baseline.read(path)
    torch.set_num_threads(1)
    identity = _identity(where)
    figures = measure(where, console)
    if reason is not None:
        baseline = (baseline or Baseline({}, [], [])).updated(identity, figures, reason)
        baseline.write(path)
        console.print(f"{path}: {reason}", soft_wrap=True)
    checks = baseline.check(identity, figures) if baseline else []
    if baseline is None:
        console.print(f"no baseline for {identity['device']}: set one with redline perf --update --reason TEXT", soft_wrap=True)
    return Outcome(identity, figures, checks, baseline)


def measure(device: torch.device, console: Console) -> list[Figure]:
    figures = []
    for name, workload in WORKLOADS.items():
        with workload(COUNTED, device) as work:
            counts = count(work).as_json()
        sampled = name in SAMPLED
        figures += [Figure(f"{name}: {kind}", kind, value, [value], is_sampled=sampled) for kind, value in counts.items()]
        console.print(f"{name}: counted", style="dim")
    reference = Reference(device)
    for name, workload in WORKLOADS.items():
        with workload(TIMED, device) as work:
            figures.append(_ratio(name, work, reference, device))
        console.print(f"{name}: timed", style="dim")
    return figures


def _ratio(name: str, work: Work, reference: Reference, device: torch.device) -> Figure:
    """Seconds of the work over seconds of the reference, in turn; who is first is drawn by lot."""
    for each in (work, reference.run, work, reference.run):
        each()
    sides: dict[str, Callable[[int], float]] = {
        "ours": lambda number: _seconds(work, device),
        "reference": lambda number: _seconds(reference.run, device),
    }
    rounds = interleave(sides, ROUNDS, seed=0, seen=lambda number, row: None)
    ratios = [row["ours"] / row["reference"] for row in rounds]
    found = of_log_ratios([math.log(ratio) for ratio in ratios])
    return Figure(f"{name}: time", RATIO, found.ratio, ratios, found.interval)


def _seconds(work: Work, device: torch.device) -> float:
    """On a CPU those that this process had it for: what others take from us is not ours to answer for."""
    synchronize(device)
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    started = clock()
    work()
    synchronize(device)
    return clock() - started


def _identity(device: torch.device) -> dict[str, Any]:
    environment = describe_environment()
    cpu = environment["cpu"]
    machine = {"cpu": cpu["model"], "flags": cpu["flags"]} if device.type == "cpu" else {"gpu": device_name(device)}
    python = ".".join(platform.python_version_tuple()[:2])
    torch_version = torch.__version__.split("+")[0]
    return environment | {
        "device": device_name(device),
        "machine": machine,
        "reference": VERSION,
        "libraries": {"python": python, "torch": torch_version},
        "in_c": device.type == "cpu" and products() is not None,
    }


def render(outcome: Outcome) -> Fitted:
    """Return each figure beside its baseline as a table."""
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("", "now", "baseline", "change", ""):
        table.add_column(title, justify="left" if not title else "right", no_wrap=True)
    for check in outcome.checks or [Check(figure, None, "not comparable", 0.0) for figure in outcome.figures]:
        change = "" if check.change is None else f"{check.change:+.1%}"
        before = "" if check.before is None else _show(check.before)
        table.add_row(check.figure.name, _show(check.figure), before, change, check.state, style=STYLES[check.state])
    return Fitted(table)


def _show(figure: Figure) -> str:
    if figure.interval is None:
        return f"{figure.value:,.0f}"
    return f"{figure.value:.2f} ({figure.interval[0]:.2f}–{figure.interval[1]:.2f})"


def require_reason(update: bool, reason: str | None) -> str | None:
    if update and not (reason and reason.strip()):
        raise CompareError("--update changes what every later change is held against", "say why: --reason 'a faster optimizer'")
    if reason and not update:
        raise CompareError("--reason is for --update", "give both, or neither")
    return reason.strip() if update and reason else None
