"""Where the seconds of a batch go whose completions end one after the other: before the first token, and by the rows left.

    PYTHONPATH=src python benchmarks/rollouts/where.py [workload=W4] [engine.speculation=auto ...]

The settings are those of `redline bench generate`. The engine's own steps are timed from the end of one to the end of the next,
so that the lines add up to the whole; a launch counts for the rows of the one before it, whose results the host waited for.
Beside each stands the least that its steps can take (`lab/measure/roofline.py`): their weights, and the keys and values of
their rows, read once. The last of `--runs` is shown, in which nothing is compiled any more.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, field

import torch

from redline.engine import NativeEngine
from redline.lab.bench.cases.generate import Workload
from redline.lab.bench.settings import GenerateSettings, fit_engine, make_settings
from redline.lab.material.networks import make_network
from redline.lab.measure.machine import measure_machine, synchronize
from redline.lab.measure.roofline import Load, NetworkCost, step_seconds
from redline.launch.engines import make_engine

BINS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


@dataclass(slots=True)
class Bin:
    """Steps of the engine with up to so many rows."""

    launches: int = 0
    steps: int = 0
    rows: int = 0
    """Of all steps."""
    context: float = 0.0
    """Tokens that all of these rows saw."""
    seconds: float = 0.0


@dataclass(slots=True)
class Where:
    prompts_s: float = 0.0
    """Until the last prompt was computed."""
    bins: dict[int, Bin] = field(default_factory=lambda: {most: Bin() for most in BINS})
    other_s: float = 0.0
    """In launches of nothing."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*", default=["workload=W4"])
    parser.add_argument("--runs", type=int, default=2)
    asked = parser.parse_args()
    settings = make_settings("generate", asked.settings)
    assert isinstance(settings, GenerateSettings)
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    machine = measure_machine(device, dtype)
    network = make_network(settings.model, device, dtype, settings.seed)
    workload = Workload(settings, network)
    engine = make_engine(network.decoder, fit_engine(settings.engine, settings.prompts * settings.n, workload.longest))
    for number in range(asked.runs):
        began = time.perf_counter()
        where = run(engine, workload, number, device)
        seconds = time.perf_counter() - began
    cost = NetworkCost.of(network.decoder)
    print(machine.how)
    print(f"prompts       {where.prompts_s:25.3f} s")
    for most, one in where.bins.items():
        if one.steps:
            rows, context = one.rows / one.steps, one.context / max(1, one.rows)
            least_s = one.steps * step_seconds(cost, Load(round(rows), context - 1, 1, 2, round(rows)), machine)
            each = f"{one.steps:6} steps of {rows:6.1f} rows, {1e3 * one.seconds / one.steps:6.3f} ms each"
            print(
                f"up to {most:4} rows {one.seconds:6.3f} s (bound {least_s:6.3f})  {each}, {one.launches} launches", flush=True
            )
    print(f"nothing launched {where.other_s:22.3f} s")
    print(f"all           {seconds:25.3f} s, {int(workload.lengths_P.sum() * settings.n / seconds):,} tokens/s")


def run(engine: NativeEngine, workload: Workload, number: int, device: torch.device) -> Where:
    engine.reset_prefix_cache()
    where, missing = Where(), 0
    prompt_tokens = sum(workload.prompt_lengths) / len(workload.prompt_lengths)
    synchronize(device)
    for request in workload.batch(number).requests():
        missing += request.sampling.n
        engine.submit(request)
    last, before, rows_before = time.perf_counter(), engine.stats, 0
    first = before.decode_steps
    while missing:
        missing -= sum(getattr(piece, "completion", None) is not None for _, piece in engine.step())
        now, stats = time.perf_counter(), engine.stats
        steps = stats.decode_steps - before.decode_steps
        if stats.prompt_tokens > before.prompt_tokens or stats.waiting:
            where.prompts_s += now - last
        elif not (steps or rows_before):
            where.other_s += now - last
        else:
            one = where.bins[next(most for most in BINS if most >= max(1, rows_before or stats.batch_size))]
            one.launches += 1
            one.steps += steps
            one.rows += stats.decoded_rows - before.decoded_rows
            one.context += (stats.decoded_rows - before.decoded_rows) * (prompt_tokens + stats.decode_steps - first)
            one.seconds += now - last
        last, before, rows_before = now, stats, stats.batch_size if steps else 0
    synchronize(device)
    where.other_s += time.perf_counter() - last
    return where


if __name__ == "__main__":
    main()
