"""One point of a validation, in a process of its own. Whatever it leaves behind ends with it:

python benchmarks/plan/probe.py '{"phase": "training", "settings": {...}, "device": "cpu"}'
→  {"forward_backward_s": ..., "optimizer_s": ..., "peaks": {"forward/backward": ..., "optimizer step": ...}}
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from points import Point

from redline.child import ChildError, only_answer, take_stdout
from redline.config.sections.engine import EngineConfig
from redline.config.sections.trainer import TrainerConfig
from redline.lab.bench.settings import BenchSettings, as_recipe
from redline.lab.material.networks import make_network
from redline.lab.material.prompts import random_prompts
from redline.lab.material.train_batches import random_batch
from redline.lab.measure.machine import synchronize, take_peak
from redline.lab.measure.phases import PHASES, phase_differences, phase_peaks, phase_seconds
from redline.lab.peers.generation_sides import Batch, EngineSide
from redline.lab.peers.training_sides import RedlineTraining
from redline.launch.engines import make_engine
from redline.launch.process import prepare_process

TIMED = 3
"""Runs whose median counts, after one that warms up and one whose memory is watched."""
CPU_THREADS = 1
"""So that the seconds of the processor can be counted, which busy neighbours change far less than those of the clock."""


def probe(point: Point, device: str) -> dict[str, Any]:
    """What was measured, or `{"error": …}`: a point that runs out of memory or of time does not end the others."""
    task = {"phase": point.phase, "settings": dict(point.settings), "device": device}
    command = [sys.executable, __file__, json.dumps(task)]
    try:
        return only_answer(command, point.limit_s)
    except ChildError as failed:
        said = {"stderr": "\n".join(failed.lines)} if failed.lines else {}
        crashed = failed.code is not None and failed.lines
        return {"error": failed.lines[-1] if crashed else str(failed).splitlines()[0], **said}


# ── in the process ─────────────────────────────────────────────────────────────────────────────────────────────────────


def main() -> None:
    reply, task = take_stdout(), json.loads(sys.argv[1])
    settings, device = task["settings"], task["device"]
    threads = CPU_THREADS if device == "cpu" else None
    prepare_process(
        as_recipe(BenchSettings(model=settings["model"], device=device, dtype=settings["dtype"], num_threads=threads))
    )
    measure = {"training": measure_training, "generation": measure_generation}[task["phase"]]
    reply(measure(settings, torch.device(device)))


def measure_training(settings: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    dtype = getattr(torch, settings["dtype"])
    network = make_network(settings["model"], device, dtype, seed=0)
    side = RedlineTraining(network.decoder, dtype, TrainerConfig.model_validate(settings["trainer"]))
    lengths = np.full(settings["sequences"], settings["tokens"], dtype=np.int64)
    batch = random_batch(
        lengths,
        prompt_tokens=settings["prompt_tokens"],
        group_size=settings["group_size"],
        vocab_size=network.decoder.spec.vocab_size,
        key=(0,),
    )
    side.step(batch)
    take_peak(device)
    peaks = phase_peaks(lambda: side.step(batch), device)
    runs = [_phase_seconds(lambda: side.step(batch), device) for _ in range(TIMED)]
    optimizer = PHASES["trainer.optimizer"]
    passes = [sum(seconds for name, seconds in run.items() if name != optimizer) for run in runs]
    return {
        "forward_backward_s": statistics.median(passes),
        "optimizer_s": statistics.median(run[optimizer] for run in runs),
        "peaks": {
            "forward/backward": max(peak for name, peak in peaks.items() if name != optimizer),
            "optimizer step": peaks[optimizer],
        },
        "samples": runs,
    }


def measure_generation(settings: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    dtype = getattr(torch, settings["dtype"])
    network = make_network(settings["model"], device, dtype, seed=0)
    engine = make_engine(network.decoder, EngineConfig.model_validate(settings["engine"]))
    side, vocabulary = EngineSide(engine), network.decoder.spec.vocab_size

    def batch(number: int) -> Batch:
        prompts = random_prompts(settings["prompts"], settings["prompt_tokens"], vocabulary, key=(number,))
        return Batch(prompts, settings["n"], settings["new_tokens"], seed=number)

    with torch.inference_mode():
        side.run(batch(0))
        synchronize(device)
        take_peak(device)
        side.run(batch(1))
        peak = take_peak(device)
        seconds = [_run_seconds(side, batch(2 + number), device) for number in range(TIMED)]
    return {"seconds": statistics.median(seconds), "peaks": {"generation": peak}, "samples": seconds}


def _phase_seconds(work: Callable[[], object], device: torch.device) -> dict[str, float]:
    """By device events on CUDA, of the processor elsewhere."""
    return phase_seconds(work, device)[1] if device.type == "cuda" else phase_differences(work, time.process_time)


def _run_seconds(side: EngineSide, batch: Batch, device: torch.device) -> float:
    started = time.process_time()
    seconds = side.run(batch).seconds
    return seconds if device.type == "cuda" else time.process_time() - started


if __name__ == "__main__":
    main()
