"""How long the devices of a run stood still."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redline.runs.others import OtherRun
from redline.runs.others.log import is_number
from redline.runs.run import Run, setting
from redline.telemetry.summary.sample_times import seconds_of
from redline.telemetry.summary.timeline import PREFIX, ROLLOUTS_PREFIX

Row = Mapping[str, Any]
_RANK = re.compile(r"rank-(\d+)-")
"""How the lanes of a rank beside rank 0 begin."""
_TRAINER_WORK = ("training", "weight_sync")
_ENGINE_WORK = ("generation", "evaluation", "weight_sync")
"""Phases in which an engine's device works. A model that scores (`rollouts.reward_model`) works too."""


@dataclass(slots=True, frozen=True)
class Idle:
    """Device-seconds in which nothing was computed."""

    low_s: float
    high_s: float
    source: str
    """What that is told from."""


@dataclass(slots=True, frozen=True)
class Devices:
    """Who has how many devices."""

    count: int
    engines: int | None = 0
    """Of these, for engines alone; 0 where engine and trainer share all, None where they share none and nobody knows how many
    each has."""
    why: str = ""
    """Where the number comes from; empty where somebody gave it."""


def devices_of(run: Run, given: int | None) -> Devices:
    """How many devices a run has, by the flag, or else as far as its files say."""
    if isinstance(run, OtherRun):
        return _devices_of_other(run, given)
    config = run.config
    engines = setting(config, "placement", "engines", 0)
    size = setting(config, "engine", "tensor_parallel_size", 1)
    on_gpus = setting(config, "run", "device", "cpu") == "cuda"
    own = engines * size if on_gpus else 0
    trainers, ranks = setting(config, "placement", "trainers", 1), _ranks(run) if on_gpus else 1
    count = given or max(1, max(trainers, ranks) + own)
    why = "read from the ledger" if ranks > trainers else "read from the recipe" if own or trainers > 1 else "assumed"
    return Devices(count, min(own, count - 1), "" if given else why)


def _ranks(run: Run) -> int:
    """Trainer ranks whose spans the ledger holds, as torchrun starts them; 1 where there is none."""
    lanes = run.ledger.lanes if run.ledger else ()
    return 1 + max((int(found[1]) for lane in lanes if (found := _RANK.match(lane))), default=0)


def _devices_of_other(run: OtherRun, given: int | None) -> Devices:
    trainers, engines = run.devices
    found = sum(run.devices) or len(run.environment.get("gpus") or ())
    count = given or found or 1 + run.framework.samples_apart
    known = engines if engines and trainers + engines == count else None
    is_apart = run.framework.samples_apart or bool(engines)
    return Devices(count, known if is_apart else 0, "" if given else "read from the log" if found else "assumed")


def idle_of(run: Run, rows: Sequence[Row], devices: Devices) -> Idle | None:
    """How long the devices stood still during these steps; None where neither samples nor phases tell."""
    total = sum(_step_s(row) * _steps(row) for row in rows)
    return _from_samples(run.rows("samples"), rows, total, devices) or _from_phases(run, rows, total, devices)


def _from_samples(samples: Iterable[Row], rows: Sequence[Row], total: float, devices: Devices) -> Idle | None:
    """By the share of the time in which a kernel ran, where every device was sampled."""
    times = [row["run/time_s"] for row in rows if isinstance(row.get("run/time_s"), int | float)]
    if not times or not total:
        return None
    begun, ended = times[0] - _step_s(rows[0]), times[-1]
    found = [
        (sample["time"], busy)
        for sample in samples
        if begun <= _number(sample.get("time")) <= ended and (busy := _busy(sample))
    ]
    if len(found) < 3 or min(len(busy) for _, busy in found) < devices.count:
        return None
    weights = seconds_of([time for time, _ in found])
    names = {name for _, busy in found for name in busy}
    shares = [np.average([busy.get(name, 0.0) / 100 for _, busy in found], weights=weights) for name in names]
    of_run = sorted(shares)[-devices.count :]
    seconds = max(0.0, 1 - float(np.mean(of_run))) * total * devices.count
    whose = f"the {devices.count} busiest GPUs of {len(names)}" if len(names) > devices.count else "the GPUs"
    return Idle(seconds, seconds, f"samples of {whose}: no kernel ran")


def _busy(sample: Row) -> dict[str, float]:
    """Device → percent of the time in which a kernel ran."""
    return {
        name: min(100.0, max(0.0, _number(value)))
        for name, value in sample.items()
        if name.startswith("gpu/") and name.endswith("/utilization_percent")
    }


def _from_phases(run: Run, rows: Sequence[Row], total: float, devices: Devices) -> Idle | None:
    """By what the loop, and rollouts beside it, were doing."""
    if not total or not any(name.startswith(PREFIX) for row in rows for name in row):
        return None
    has_judge = setting(run.config, "rollouts", "reward_model", {}).get("path")
    work_of_engine = (*_ENGINE_WORK, "reward") if has_judge else _ENGINE_WORK
    training, generation = _seconds(rows, PREFIX, _TRAINER_WORK), _seconds(rows, PREFIX, work_of_engine)
    is_beside = bool(setting(run.config, "buffer", "max_lag", 0))
    if is_beside:
        generation = _seconds(rows, ROLLOUTS_PREFIX, work_of_engine)
    of_trainer, of_engine = max(0.0, total - training), max(0.0, total - generation)
    if devices.engines is None:
        ends = sorted((of_trainer * devices.count, of_engine * devices.count))
        return Idle(
            ends[0], ends[1], "phases of the steps: neither side shares its devices, and how many each has is not known"
        )
    if devices.engines:
        idle = (devices.count - devices.engines) * of_trainer + devices.engines * of_engine
        return Idle(idle, idle, "phases of the steps: neither side shares its devices")
    work = training + generation - _seconds(rows, PREFIX, ("weight_sync",)) * (not is_beside)
    low, high = max(0.0, total - work), max(0.0, total - (max(training, generation) if is_beside else work))
    return Idle(low * devices.count, high * devices.count, "phases of the steps: time in neither sampling nor training")


def _seconds(rows: Sequence[Row], prefix: str, phases: Sequence[str]) -> float:
    return sum(_number(row.get(f"{prefix}{phase}_s")) * _steps(row) for row in rows for phase in phases)


def _step_s(row: Row) -> float:
    return _number(row.get("run/step_s"))


def _steps(row: Row) -> float:
    return _number(row.get("run/steps", 1))


def _number(value: Any) -> float:
    return float(value) if is_number(value) else 0.0
