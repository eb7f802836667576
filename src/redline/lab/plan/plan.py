"""The whole plan of a recipe on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from redline.config import Config, resolve
from redline.lab.bench.table import quantity
from redline.lab.plan.advice import Choice, Cut, choices, choose_parallel, find_cuts, fits, room
from redline.lab.plan.calibration import rates_of
from redline.lab.plan.cpu import this_cpu
from redline.lab.plan.devices import Device, find_device, with_prices
from redline.lab.plan.memory import MemoryEstimate, Phase, estimate_memory
from redline.lab.plan.rates import Rates
from redline.lab.plan.setup import PROCESS_BYTES, PROMPT_TOKENS, Setup, divided, make_setup
from redline.lab.plan.timing import TimeEstimate, estimate_time
from redline.models.sizes.memory import knows_experts
from redline.telemetry import describe_environment
from redline.trainer.parallel.place import Sharding

MILLION = 1_000_000


@dataclass(slots=True, frozen=True)
class Plan:
    setup: Setup
    memory: MemoryEstimate
    time: TimeEstimate
    rates: Rates
    choices: Sequence[Choice]
    cuts: Sequence[Cut]

    @property
    def fits(self) -> bool:
        return fits(self.setup, self.memory)

    @property
    def room(self) -> int:
        """Bytes that the worst phase leaves free; negative: that are missing."""
        return room(self.setup, self.memory)

    @property
    def samples_per_hour(self) -> float:
        """Attempts sampled and trained on."""
        return 3600 * self.setup.work.sequences / self.time.step_s

    @property
    def dollars_per_million(self) -> float:
        """The price of a million attempts."""
        return MILLION / self.samples_per_hour * self.setup.gpus * self.setup.device.price

    @property
    def run_dollars(self) -> float:
        """The price of all steps of the recipe."""
        return self.setup.config.run.steps * self.time.step_s / 3600 * self.setup.gpus * self.setup.device.price

    @property
    def left_out(self) -> tuple[str, ...]:
        """What the recipe asks for and the plan does not have, a sentence each."""
        return tuple(_left_out(self.setup))

    @property
    def verdict(self) -> str:
        device, worst = self.setup.device, self.memory.worst
        if self.fits:
            return (
                f"fits: {worst.name} takes the most, {quantity(worst.total, 'bytes')} of"
                f" {quantity(device.memory_bytes, 'bytes')} on {device.name}"
            )
        term = max(worst.terms, key=lambda name: worst.terms[name])
        missing = f", {quantity(-self.room, 'bytes')} too much" if self.room < 0 else ""
        return (
            f"does not fit: {worst.name} needs {quantity(worst.total, 'bytes')} of {quantity(device.memory_bytes, 'bytes')} on"
            f" {device.name}{missing}; most of it is {term} ({quantity(worst.terms[term], 'bytes')})"
        )

    def as_json(self) -> dict[str, Any]:
        setup, work = self.setup, self.setup.work
        return {
            "model": {"path": setup.model.path, "parameters": setup.model.parameters, "trained": setup.trained},
            "device": {"name": setup.device.name, "memory_bytes": setup.device.memory_bytes, "count": setup.gpus},
            "work": {
                "sequences_per_step": work.sequences,
                "prompt_tokens": work.prompt_tokens,
                "max_new_tokens": work.max_new_tokens,
                "mean_new_tokens": work.mean_new_tokens,
            },
            "fits": self.fits,
            "verdict": self.verdict,
            "left_out": list(self.left_out),
            "room_bytes": self.room,
            "memory": {phase.name: _phase(phase) for phase in self.memory.phases},
            "host": {"terms": dict(self.memory.host), "total_bytes": sum(self.memory.host.values())},
            "choices": [choice.as_json() for choice in self.choices],
            "cuts": [cut.as_json() for cut in self.cuts],
            "time": {
                "step_s": self.time.step_s,
                "phases": [{"name": p.name, "seconds": p.seconds, "bound": p.bound} for p in self.time.phases],
                "bottleneck": {"name": self.time.bottleneck.name, "bound": self.time.bottleneck.bound},
                "efficiency": _efficiencies(self.rates),
            },
            "cost": {
                "samples_per_hour": self.samples_per_hour,
                "price_per_hour": setup.device.price * setup.gpus,
                "dollars_per_million_samples": self.dollars_per_million,
                "dollars_per_run": self.run_dollars,
            },
        }


@dataclass(slots=True, frozen=True)
class Hardware:
    """What a recipe is planned for."""

    device: str | None = None
    """By name; None for what is here."""
    count: int = 1
    """Devices of one machine."""
    prices: Sequence[str] = ()
    """`DEVICE=DOLLARS` of an hour, instead of ours."""
    sharding: Sharding | None = None
    """What trainers on several devices divide; None for what the recipe says, or the least that fits."""
    tensor_parallel_size: int | None = None
    """Devices that divide one engine; None for what samples fastest."""


def make_plan(
    config: Config,
    hardware: Hardware,
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    mean_new_tokens: float | None = None,
    results: Path | None = None,
) -> Plan:
    """Plan a recipe for some hardware. Loads no weights. The efficiencies come from the saved measurements in `results`, by
    default those that come with redline."""
    device, process_bytes = _device(config, hardware.device)
    priced = with_prices(device, hardware.prices)
    setup = make_setup(config, priced, hardware.count, prompt_tokens, mean_new_tokens, process_bytes)
    asked = config.trainer.sharding if hardware.count > 1 and config.trainer.sharding != "none" else None
    rates = rates_of(device, results, setup.config.model.dtype)
    return plan_setup(divided(setup, hardware.sharding or asked, hardware.tensor_parallel_size), rates)


def plan_setup(setup: Setup, rates: Rates) -> Plan:
    setup, parallel = choose_parallel(setup, rates)
    memory = estimate_memory(setup)
    time = estimate_time(setup, memory, rates)
    return Plan(setup, memory, time, rates, [*parallel, *choices(setup, memory)], find_cuts(setup, rates, memory))


def _left_out(setup: Setup) -> Iterator[str]:
    """A plan is of one process on each device, in which trainer and engine work in turn."""
    config, placement = setup.config, setup.config.placement
    if not knows_experts(setup.model.shape):
        yield f"experts of model family {setup.model.shape.family!r}: planned as if a token went through all of them"
    if placement.engines:
        yield f"placement.engines = {placement.engines}: processes and weights of their own; planned on the trainer's devices"
    if placement.sleep:
        yield "placement.sleep: an engine without its cache while a step is trained on; planned with it"
    if config.buffer.max_lag:
        yield f"buffer.max_lag = {config.buffer.max_lag}: rollouts beside the trainer; planned one after the other"
    if config.engine.kind != "native":
        yield f"engine.kind = {config.engine.kind}: planned as our own engine"
    if config.engine.tensor_parallel_size not in (1, setup.tensor_parallel_size):
        size = config.engine.tensor_parallel_size
        planned = f"planned as {setup.tensor_parallel_size}; --tensor-parallel {size} asks for it"
        yield f"engine.tensor_parallel_size = {size}: {planned}"
    if config.trainer.sequence_parallel_size > 1:
        yield f"trainer.sequence_parallel_size = {config.trainer.sequence_parallel_size}: planned with whole sequences"
    if config.needs_critic and setup.gpus > 1:
        yield "rollouts.advantages = gae: a run trains the critic in one process; planned with one on each device"
    if placement.trainers not in (1, setup.gpus):
        yield f"placement.trainers = {placement.trainers}: planned as --gpus {setup.gpus}"
    if config.rollouts.environment.name:
        yield f"rollouts.environment.name = {config.rollouts.environment.name}: its own time, and turns after the first"


def _device(config: Config, gpu: str | None) -> tuple[Device, int]:
    """And the bytes of an idle process on its host."""
    if gpu is None:
        found = describe_environment()["gpus"] if config.run.device != "cpu" else []
        gpu = found[0]["name"] if found else "cpu"
    if gpu != "cpu":
        return find_device(gpu), PROCESS_BYTES
    here = resolve(
        config.model_copy(update={"run": config.run.model_copy(update={"device": "cpu"}), "model": _any_model(config)})
    )
    return this_cpu(getattr(torch, here.config.model.dtype), here.config.run.num_threads or 1)


def _any_model(config: Config) -> Any:
    """The path is looked at where the model is described."""
    return config.model.model_copy(update={"path": "builtin:tiny"})


def _phase(phase: Phase) -> dict[str, Any]:
    return {"terms": dict(phase.terms), "total_bytes": phase.total, "allocated_bytes": phase.allocated}


def _efficiencies(rates: Rates) -> Mapping[str, Any]:
    each = {"generation": rates.generation, "training": rates.training, "optimizer": rates.optimizer}
    return {name: {"products": e.products, "memory": e.memory, "layer_s": e.layer_s, "how": e.how} for name, e in each.items()}
