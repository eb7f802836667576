"""This machine as a device: its rates and an idle process are measured once, and kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from redline.child import ChildError, only_answer, take_stdout
from redline.config.user_cache import user_cache
from redline.errors import RedlineError
from redline.lab.measure.machine import measure_machine, resident_bytes
from redline.lab.plan.devices import CPU_PRICE, Device
from redline.telemetry import describe_environment, write_json
from redline.telemetry.files.durable import read_json

MEASURED_AS = 2
"""Counts how it is measured: what an earlier version kept is not read."""
STEPS = 2


@dataclass(slots=True, frozen=True)
class Measured:
    """What a plan for this machine needs to know."""

    flops: float
    bandwidth: float
    process_bytes: int
    """Bytes of a process that has imported everything and taken steps of a run with a tiny model."""


def this_cpu(dtype: torch.dtype, num_threads: int) -> tuple[Device, int]:
    """The machine as a device, and the bytes of an idle process."""
    facts = describe_environment()
    measured = _cached(dtype, num_threads, facts)
    copy = measured.bandwidth / 2  # what others call a copy moves every byte twice
    device = Device(
        "cpu", facts["memory_bytes"], measured.flops, measured.bandwidth, copy, copy, watts=0, price=CPU_PRICE, kind="cpu"
    )
    return device, measured.process_bytes


def _cached(dtype: torch.dtype, num_threads: int, facts: dict[str, Any]) -> Measured:
    key = [facts["cpu"], num_threads, str(dtype), metadata.version("torch"), MEASURED_AS]
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:12]
    path = plan_folder() / f"cpu-{digest}.json"
    found = read_json(path)
    if found.keys() == {field.name for field in fields(Measured)}:
        return Measured(**found)
    measured = measure_cpu(dtype, num_threads)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(measured))
    return measured


def measure_cpu(dtype: torch.dtype, num_threads: int) -> Measured:
    """Some seconds: a product, a copy, and a process of its own."""
    threads_before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        machine = measure_machine(torch.device("cpu"), dtype)
    finally:
        torch.set_num_threads(threads_before)
    return Measured(machine.flops, machine.bandwidth, _idle_bytes())


def _idle_bytes() -> int:
    try:
        return int(only_answer([sys.executable, "-m", "redline.lab.plan.cpu"])["resident_bytes"])
    except ChildError as failed:
        raise RedlineError(f"a process that does nothing {failed}") from None


def main() -> None:
    """In a process of its own: what a run takes beside its model."""
    from redline.config import resolve, validate
    from redline.lab.measure.scratch_run import StepWatch, scratch_stages
    from redline.launch.process import prepare_process

    reply = take_stdout()
    recipe = {
        "run": {"device": "cpu", "num_threads": 1, "steps": STEPS, "checkpoint_every": 0},
        "model": {"path": "builtin:tiny"},
        "rollouts": {
            "task": {"kind": "import", "path": "redline.lab.material.tasks:Letters"},
            "groups_per_step": 2,
            "group_size": 2,
            "max_new_tokens": 4,
            "evaluation": {"num_tasks": 0},
        },
    }
    config = resolve(validate(recipe, "redline plan")).config
    prepare_process(config)
    with scratch_stages(config) as stages:
        stages.run(StepWatch(), STEPS)
        reply({"resident_bytes": resident_bytes()})


def plan_folder() -> Path:
    """Where measured machines are kept."""
    return user_cache() / "plan"


if __name__ == "__main__":
    main()
