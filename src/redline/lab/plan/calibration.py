"""Efficiencies from what was measured: the saved documents of `redline bench` for a device.

A document says what was run and how long it took. `timing.py` says what that work costs at the device's rates. Three numbers
make the one the other, the shares of both rates that are reached and an overhead per layer, so that

    seconds = products / share + memory / share + layers · overhead + link

In training on a GPU the overhead is the host's, which launches ahead of what the device computes: the longer of the two counts.

They are fitted to all documents of a phase at once, by least squares of relative errors, and held near what is assumed where
the documents do not tell them apart. Documents of one device serve for another that has none, which the plan says.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import redline
from redline.config.earlier import as_of_now
from redline.config.load import validate
from redline.config.schema import Config
from redline.lab.measure.roofline import decode_steps
from redline.lab.plan.devices import DEVICES, Device
from redline.lab.plan.rates import Cost, Efficiency, Rates
from redline.lab.plan.setup import Setup, make_setup
from redline.lab.plan.shapes import describe_model
from redline.lab.plan.timing import decode_cost, network_cost, optimizer_cost, prompt_cost, read_context, training_cost

ASSUMED = {
    "generation": Efficiency(0.7, 0.8, 30e-6, "assumed: nothing is saved for this device"),
    "training": Efficiency(0.7, 0.7, 500e-6, "assumed: nothing is saved for this device", host_ahead=True),
    "optimizer": Efficiency(1.0, 0.7, 0.0, "assumed: nothing is saved for this device"),
}
ASSUMED_CPU = {
    "generation": Efficiency(0.5, 0.4, 1e-3, "assumed: nothing is saved for this device"),
    "training": Efficiency(0.5, 0.4, 2e-3, "assumed: nothing is saved for this device"),
    "optimizer": Efficiency(1.0, 0.5, 0.0, "assumed: nothing is saved for this device"),
}
PRIOR = 0.05
"""Weight of what is assumed, beside that of one run: a tenth of a run's error moves it as far as twice itself."""
FEW_ROWS = 16
"""Steps of so few have kernels of their own on a GPU, and say nothing of those with many, which a plan is about."""
SWEEPS = 300
STEADY = 1e-9
"""Seconds: a phase that takes less was not measured."""
_MEASURED_RATES = re.compile(r"measured here: ([\d,.]+) GB/s .*? and ([\d,.]+) TFLOP/s")


@dataclass(slots=True, frozen=True)
class Observation:
    """One thing that was run."""

    phase: str
    cost: Cost
    seconds: float
    source: str


def rates_of(device: Device, folder: Path | None = None, dtype: str = "bfloat16") -> Rates:
    """The device's own rates in a dtype, with the efficiencies that saved results give."""
    found = read_observations(device, folder or results_folder(), dtype)
    other = "" if found or not device.is_gpu else _nearest_with_results(device, folder or results_folder())
    if other:
        found = read_observations(DEVICES[other], folder or results_folder())
    assumed = ASSUMED if device.is_gpu else ASSUMED_CPU
    fitted = {
        phase: fit([o for o in found if o.phase == phase], default, f"; measured on {other}" if other else "")
        for phase, default in assumed.items()
    }
    return Rates(device.flops_in(dtype), device.bandwidth, device.host_bandwidth, **fitted)


def results_folder() -> Path:
    """The saved results of the source tree that this was imported from, else those of the working folder."""
    in_tree = Path(redline.__file__).parents[2] / "benchmarks" / "results"
    return in_tree if in_tree.is_dir() else Path("benchmarks/results")


def _nearest_with_results(device: Device, folder: Path) -> str:
    """The device with saved results whose ratio of products to bandwidth is nearest."""
    have = [name for name in DEVICES if read_observations(DEVICES[name], folder)]
    ratio = device.flops / device.bandwidth
    return min(have, key=lambda name: abs(DEVICES[name].flops / DEVICES[name].bandwidth - ratio), default="")


def fit(observations: Sequence[Observation], default: Efficiency, where: str = "") -> Efficiency:
    """The shares and the overhead that fit best, none of them better than physics allows."""
    measured = [o for o in observations if o.seconds > STEADY]
    if not measured:
        return default
    rows = np.array([[o.cost.products, o.cost.memory, o.cost.layers] for o in measured])
    seconds = np.array([o.seconds for o in measured])
    targets = 1 - np.array([o.cost.link for o in measured]) / seconds
    start = np.array([1 / default.products, 1 / default.memory, max(default.layer_s, STEADY)])
    relative = rows / seconds[:, None]
    find = _least_squares_of_the_longer if default.host_ahead else _bounded_least_squares
    found, errors = find(relative, targets, start)
    sources = ", ".join(dict.fromkeys(o.source for o in measured))
    how = f"fitted to {len(measured)} runs ({sources}{where}), which it meets within {errors.max():.0%}"
    return Efficiency(float(1 / found[0]), float(1 / found[1]), float(found[2]), how, default.host_ahead)


def _bounded_least_squares(rows: np.ndarray, targets: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Minimise |rows · x - targets|² + |PRIOR · (x / start - 1)|² with shares ≤ 1 and no negative overhead, one coordinate
    after the other: there are three, and the function is convex. Also how far off it is for each row."""
    held = np.vstack([rows, np.diag(PRIOR / start)])
    wanted = np.concatenate([targets, np.full(len(start), PRIOR)])
    lowest, x = np.array([1.0, 1.0, 0.0]), start.copy()
    for _ in range(SWEEPS):
        for i in range(len(x)):
            rest = wanted - held @ x + held[:, i] * x[i]
            x[i] = max(lowest[i], float(held[:, i] @ rest / (held[:, i] @ held[:, i])))
    return x, np.abs(rows @ x - targets)


def _least_squares_of_the_longer(rows: np.ndarray, targets: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same where a run takes the longer of what the device and what the host takes. Which it is decides what a run tells
    about, and what is found decides which it is: until that stays the same, or of all that came up the best."""
    device, host = rows * [1, 1, 0], rows * [0, 0, 1]
    x, tried = start, dict[bytes, tuple[np.ndarray, np.ndarray]]()
    while (is_host := host @ x > device @ x).tobytes() not in tried:
        x, _ = _bounded_least_squares(np.where(is_host[:, None], host, device), targets, start)
        tried[is_host.tobytes()] = x, np.abs(np.maximum(device @ x, host @ x) - targets)
    return min(tried.values(), key=lambda each: float(np.square(each[1]).sum()))


# ── documents ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def read_observations(device: Device, folder: Path, dtype: str = "bfloat16") -> list[Observation]:
    """Everything that was saved for a device and that this version can cost. Of a CPU that in the same dtype: some multiply
    bfloat16 many times as fast as others, and how much of its own rate each dtype reaches has nothing to do with the other."""
    found: list[Observation] = []
    for path in sorted(path for place in _folders(device, folder) for path in place.glob("*.json")):
        document = json.loads(path.read_text())
        read = READERS.get(document.get("case", ""))
        if read is None or _samples_in_whole_numbers(document):
            continue
        if device.is_gpu or (document := _in_dtype(document, dtype)):
            found += read(document, device, path.stem)
    return found


def _folders(device: Device, folder: Path) -> list[Path]:
    """Where results of a device are: those of other processors are beside those of `cpu`."""
    return [folder / device.name] if device.is_gpu else [folder / device.name, *folder.glob(f"{device.name}-*")]


def _samples_in_whole_numbers(document: Mapping[str, Any]) -> bool:
    engine = document["identity"].get("config", {}).get("engine") or {}
    return engine.get("quantization", "none") != "none"


def _in_dtype(document: dict[str, Any], dtype: str) -> dict[str, Any]:
    """A document, or the points of one, without what was run in another dtype; empty where nothing is left."""
    if document["case"] == "plan":
        return {**document, "points": [point for point in document["points"] if point["settings"]["dtype"] == dtype]}
    return document if document["identity"]["config"]["dtype"] == dtype else {}


def _read_generate(document: Mapping[str, Any], device: Device, source: str) -> list[Observation]:
    config = document["identity"]["config"]
    if config.get("lengths", "equal") != "equal" or config.get("replay"):
        return []  # most of its steps have fewer rows than the load that is costed here
    if config["prompts"] * config["n"] <= FEW_ROWS:
        return []
    throughput = next(result for result in document["results"] if result["name"] == "throughput")
    rates = _rates_then(device, throughput, config["dtype"])
    prompt = config["prompt_tokens"] or config["engine"]["max_model_len"] - config["new_tokens"]
    load = config["prompts"], config["n"], prompt, config["new_tokens"]
    seconds = config["prompts"] * config["n"] * config["new_tokens"] / throughput["value"]
    return [_generation(config, rates, load, seconds, source)]


def _read_n_sampling(document: Mapping[str, Any], device: Device, source: str) -> list[Observation]:
    config = document["identity"]["config"]
    found = {}
    for result in document["results"]:
        n = int(result["name"].removeprefix("n = ").split(":")[0])
        found[n] = statistics.median(sample["one request"]["seconds"] for sample in result["samples"])
    rates = _nominal(device, dtype=config["dtype"])
    return [
        _generation(config, rates, (config["prompts"], n, config["prompt_tokens"], config["new_tokens"]), seconds, source)
        for n, seconds in found.items()
    ]


def _generation(
    config: Mapping[str, Any], rates: Rates, load: tuple[int, int, int, int], seconds: float, source: str
) -> Observation:
    import torch

    prompts, n, prompt, new = load
    model = describe_model(config["model"])
    cost, shape, engine = network_cost(model, getattr(torch, config["dtype"])), model.shape, config["engine"]
    sequences = prompts * n
    steps, batch = decode_steps(sequences, sequences * new, new, min(sequences, engine["max_num_seqs"]))
    step = decode_cost(cost, shape.num_layers, shape.vocab_size, batch, read_context(prompt, new, n), rates)
    prefill = prompt_cost(cost, shape.num_layers, prompts, prompt, engine["max_num_batched_tokens"], rates)
    return Observation("generation", prefill + step.times(steps), seconds, source)


def _read_trainer(document: Mapping[str, Any], device: Device, source: str) -> list[Observation]:
    config = document["identity"]["config"]
    if config.get("replay"):
        return []  # its sizes are those of a run, which is not here
    step = next(result for result in document["results"] if result["name"] == "step")
    setup = training_setup(config, device)
    parts, rates = step["parts"], _rates_then(device, step, config["dtype"])
    passes = sum(parts.get(name, 0.0) for name in ("data", "forward", "backward", "other"))
    return [
        Observation("training", step_cost(setup, rates), passes, source),
        Observation("optimizer", optimizer_cost(setup, rates), parts["optimizer"], source),
    ]


def training_setup(config: Mapping[str, Any], device: Device) -> Setup:
    """The settings of a trainer bench as a plan takes them."""
    groups = config["sequences"] // config["group_size"]
    prompt = config["prompt_tokens"]
    rollouts = {
        "groups_per_step": groups,
        "group_size": config["group_size"],
        "max_new_tokens": max(1, config["tokens"] - prompt),
    }
    recipe = _recipe(config, rollouts)
    return make_setup(recipe, device, prompt_tokens=prompt)


def _recipe(config: Mapping[str, Any], rollouts: Mapping[str, Any]) -> Config:
    recorded = as_of_now(config)
    return validate(
        {
            "model": {"path": config["model"], "dtype": config["dtype"]},
            "rollouts": {"task": {"kind": "import", "path": "no:tasks"}, "advantages": "batch", **rollouts},
            "trainer": recorded.get("trainer", {}),
            "engine": {"max_num_seqs": max(256, rollouts["group_size"])} | recorded.get("engine", {}),
        },
        "a saved result",
    )


def step_cost(setup: Setup, rates: Rates) -> Cost:
    """Forward and backward passes of a step in the micro-batches that the recipe names."""
    tokens = setup.tokens_per_rank
    most = setup.config.trainer.max_tokens_per_micro_batch or tokens
    return training_cost(setup, tokens, max(1, -(-tokens // most)), rates)


def _read_plan(document: Mapping[str, Any], device: Device, source: str) -> list[Observation]:
    """The points of a validation that were run to calibrate by."""
    rates = _nominal(device, document.get("rates"))
    return [
        observation
        for point in document["points"]
        if point["calibrates"] and point.get("measured")
        for observation in observations_of(point, device, rates, source)
    ]


def observations_of(point: Mapping[str, Any], device: Device, rates: Rates, source: str) -> list[Observation]:
    """What one measured point of a validation says about the rates."""
    settings, measured = point["settings"], point["measured"]
    if point["phase"] == "generation":
        load = settings["prompts"], settings["n"], settings["prompt_tokens"], settings["new_tokens"]
        return [_generation(settings, rates, load, measured["seconds"], source)]
    setup = training_setup(settings, device)
    return [
        Observation("training", step_cost(setup, rates), measured["forward_backward_s"], source),
        Observation("optimizer", optimizer_cost(setup, rates), measured["optimizer_s"], source),
    ]


READERS = {"generate": _read_generate, "n-sampling": _read_n_sampling, "trainer": _read_trainer, "plan": _read_plan}


def _nominal(device: Device, rates: Mapping[str, float] | None = None, dtype: str = "bfloat16") -> Rates:
    given = rates or {"flops": device.flops_in(dtype), "bandwidth": device.bandwidth}
    none = Efficiency(1.0, 1.0, 0.0, "")
    return Rates(given["flops"], given["bandwidth"], device.host_bandwidth, none, none, none)


def _rates_then(device: Device, result: Mapping[str, Any], dtype: str) -> Rates:
    """A GPU's are in the table. A CPU's are those that the document was measured with."""
    said = _MEASURED_RATES.search(result["bound"]["why"])
    if device.is_gpu or said is None:
        return _nominal(device, dtype=dtype)
    bandwidth, flops = (float(text.replace(",", "")) for text in said.groups())
    return _nominal(device, {"bandwidth": bandwidth * 1e9, "flops": flops * 1e12})
