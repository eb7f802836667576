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


@dataclass(slots=True, frozen=True)
class Measured:
    """What a plan for this machine needs to know."""

    flops: float
    bandwidth: float
    process_bytes: int
    """Bytes of a process that has imported everything and taken one step of a tiny model."""


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
    key = [facts["cpu"], num_threads, str(dtype), metadata.version("torch")]
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
    """In a process of its own: what a run loads before its model."""
    from redline.config.sections.trainer import TrainerConfig
    from redline.lab.material.networks import make_network
    from redline.lab.material.train_batches import random_batch
    from redline.lab.peers.training_sides import RedlineTraining

    reply = take_stdout()
    network = make_network("builtin:tiny", torch.device("cpu"), torch.bfloat16, seed=0)
    side = RedlineTraining(network.decoder, torch.bfloat16, TrainerConfig())
    lengths = torch.full((2,), 8).numpy()
    vocabulary = network.decoder.spec.vocab_size
    side.step(random_batch(lengths, prompt_tokens=1, group_size=1, vocab_size=vocabulary, key=(0,)))
    reply({"resident_bytes": resident_bytes()})


def plan_folder() -> Path:
    """Where measured machines are kept."""
    return user_cache() / "plan"


if __name__ == "__main__":
    main()
