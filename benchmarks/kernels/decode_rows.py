"""Seconds of a decode step by the number of rows: where the time of a batch goes whose completions end one after the other.

    PYTHONPATH=src python benchmarks/kernels/decode_rows.py [--rows 1,16,512] [--model random:qwen2.5-0.5b] [--save FILE]

The engine itself, as `redline bench generate` has it: each number of rows is a run of that many prompts of 640 random tokens
and 256 new tokens with logprobs at temperature 1, so that the mean context is 768. A step is (end - last first token) / 255,
in the shortest of `--runs` runs. Next to it stands the bound (`lab/measure/roofline.py`): weights, keys and values read once
at the bandwidth that is measured first. At the end, what W4's steps add up to at these times and at their bounds: the curve is
interpolated between the measured numbers of rows, its context is not W4's, and W4's prompts are left out.

Leaves out: prompts of different lengths and what one step costs while others' prompts are computed.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.lab.bench.cases.generate import completion_lengths
from redline.lab.bench.settings import make_settings
from redline.lab.material.networks import make_network
from redline.lab.material.prompts import random_prompts
from redline.lab.measure.machine import Machine, measure_machine, synchronize
from redline.lab.measure.roofline import Load, NetworkCost, step_seconds
from redline.lab.peers.generation_sides import Batch
from redline.launch.engines import make_engine
from redline.telemetry import describe_environment

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
PROMPT_TOKENS, NEW_TOKENS = 640, 256


@dataclass(slots=True, frozen=True)
class Point:
    rows: int
    step_s: float
    bound_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS)
    parser.add_argument("--model", default="random:qwen2.5-0.5b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=PROMPT_TOKENS)
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--runs", type=int, default=2, help="for each number of rows, after one that does not count")
    parser.add_argument("--save", type=Path)
    asked = parser.parse_args()
    device, dtype = torch.device(asked.device), getattr(torch, asked.dtype)
    machine = measure_machine(device, dtype)
    decoder = make_network(asked.model, device, dtype, seed=0).decoder
    longest = asked.prompt_tokens + asked.new_tokens
    sizes = EngineConfig(max_num_seqs=max(asked.rows), max_model_len=longest, max_num_batched_tokens=32768)
    engine, cost = make_engine(decoder, sizes), NetworkCost.of(decoder)
    print(machine.how)
    print(f"{'rows':>5} {'step':>9} {'bound':>9} {'of it':>6}")
    points = []
    for rows in asked.rows:
        load = Load(rows, asked.prompt_tokens, 1, asked.new_tokens, rows)
        prompts = random_prompts(rows, asked.prompt_tokens, decoder.spec.vocab_size, (0, rows))
        batch = Batch(prompts, 1, asked.new_tokens, seed=rows)
        step = min([seconds_of_a_step(engine, batch, device) for _ in range(1 + asked.runs)][1:])
        points.append(Point(rows, step, step_seconds(cost, load, machine)))
        print(_line(points[-1]), flush=True)
    if len(points) > 1:
        print(_tail(points))
    if asked.save:
        asked.save.write_text(json.dumps(_document(points, machine, vars(asked)), indent=1, default=str))


def seconds_of_a_step(engine: NativeEngine, batch: Batch, device: torch.device) -> float:
    """From the last first token to the end, by the number of steps in between."""
    engine.reset_prefix_cache()
    synchronize(device)
    started = time.perf_counter()
    groups = engine.generate(batch.requests())
    synchronize(device)
    seconds = time.perf_counter() - started
    return (seconds - max(completion.first_token_s for group in groups for completion in group)) / (batch.new_tokens - 1)


def _line(point: Point) -> str:
    share = point.bound_s / point.step_s
    return f"{point.rows:5} {point.step_s * 1e3:6.3f} ms {point.bound_s * 1e3:6.3f} ms {share:6.0%}"


def _tail(points: list[Point]) -> str:
    """What the steps of W4 add up to, by how many rows they have."""
    lengths = completion_lengths(make_settings("generate", ["workload=W4", "device=cpu"]))
    rows_of_steps = np.array([(lengths > step).sum() for step in range(1, lengths.max())])
    rows = [point.rows for point in points]
    steps, bounds = (
        np.interp(rows_of_steps, rows, [getattr(point, name) for point in points]) for name in ("step_s", "bound_s")
    )
    lines = [f"W4: {len(steps):,} steps, {steps.sum():.2f} s at these times, {bounds.sum():.2f} s at their bounds; of that"]
    for least, most in ((1, 4), (5, 16), (17, 64), (65, 256), (257, 512)):
        among = (rows_of_steps >= least) & (rows_of_steps <= most)
        lines.append(f"  {least:3} to {most:3} rows: {among.sum():5} steps, {steps[among].sum():.2f} s")
    return "\n".join(lines)


def _document(points: list[Point], machine: Machine, asked: dict[str, object]) -> dict[str, object]:
    return {
        "what": __doc__.splitlines()[0],
        "asked": asked,
        "machine": machine.how,
        "points": [asdict(point) for point in points],
        "environment": describe_environment(),
    }


if __name__ == "__main__":
    main()
