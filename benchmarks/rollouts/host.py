"""What the host does in a lockstep step while a device would have nothing to do: before its first prompt, after its last token.

    PYTHONPATH=src python benchmarks/rollouts/host.py [--steps 20] [--tokenizer FOLDER] [groups_per_step=64 ...]

The settings are those of `redline bench e2e workload=E1`, on the CPU. The network is tiny and is not asked: tokens are drawn by
lot, and the trainer's logprobs are the engine's. What is left is the host. For each part the mean of a step, and its spans:

    before    the end of the step before ──► the first prompt goes to the network
    after     the last token was sampled ──► the trainer's first forward pass
    end       the last update of the weights ──► the step has ended

Full collections of Python's garbage are rare and long, so the mean counts and not the median. To compare two versions, run the
script with each one's `src` in turn.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import redline.trainer.passes.training as training
from redline.engine.native.running.cpu import CpuRunner
from redline.engine.native.running.runner import Runner, Samples
from redline.lab.bench.cases.e2e import LOCKSTEP, recipe
from redline.lab.bench.settings import E2ESettings, make_settings
from redline.lab.material import workloads
from redline.lab.material.random_folders import as_path
from redline.lab.measure.scratch_run import StepWatch, scratch_stages
from redline.launch.process import prepare_process
from redline.telemetry import Recorder, recording
from redline.watch.rows import FinishedStep

VOCABULARY = 4096
BLOCK_SIZE = 64
"""As on a GPU."""
TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}


class Parts:
    """Seconds of each step, by part and span."""

    def __init__(self, recorder: Recorder, skip: int) -> None:
        self.steps: list[Mapping[str, Mapping[str, float]]] = []
        self.full_s: list[float] = []
        """Of each full collection since the first steps."""
        self._recorder, self._skip = recorder, skip
        self._last_ns = self._began_s = 0.0

    def finished(self, step: FinishedStep) -> None:
        now = self._recorder.now_ns()
        spans = [span for span in self._recorder.drain() if span.lane == "main"]
        if step.update.version > self._skip:
            prefill, decode, forward, update = (
                [span for span in spans if span.name == name]
                for name in ("engine.prefill", "engine.decode", "trainer.forward", "trainer.optimizer")
            )
            edges = {
                "before": (self._last_ns, prefill[0].start_ns),
                "after": (decode[-1].end_ns, forward[0].start_ns),
                "end": (update[-1].end_ns, now),
            }
            self.steps.append({part: _exclusive(spans, begin, end) for part, (begin, end) in edges.items()})
        self._last_ns = self._recorder.now_ns()

    def collecting(self, phase: str, info: Mapping[str, int]) -> None:
        if phase == "start":
            self._began_s = time.perf_counter()
        elif info["generation"] == 2 and self.steps:
            self.full_s.append(time.perf_counter() - self._began_s)

    def show(self) -> None:
        for part in self.steps[0]:
            names = sorted({name for step in self.steps for name in step[part]})
            means = {name: statistics.fmean(step[part].get(name, 0.0) for step in self.steps) for name in names}
            told = ", ".join(f"{name} {1e3 * s:.1f}" for name, s in sorted(means.items(), key=lambda row: -row[1]) if s > 1e-4)
            print(f"{part:7} {1e3 * sum(means.values()):6.1f} ms   {told}")
        whole = [sum(sum(rows.values()) for rows in step.values()) for step in self.steps]
        mean, least, median = (1e3 * f(whole) for f in (statistics.fmean, min, statistics.median))
        print(f"all     {mean:6.1f} ms   least {least:.1f}, median {median:.1f}")
        print(f"{len(self.full_s)} full collections in {len(whole)} steps, {1e3 * sum(self.full_s):.0f} ms")


def _exclusive(spans: Sequence[Any], begin: float, end: float) -> dict[str, float]:
    """Seconds between two moments by the innermost span; `-` is what none owns."""
    rows: dict[str, float] = defaultdict(float)
    last, stack = begin, []

    def charge(now: float) -> None:
        nonlocal last
        now = min(max(now, begin), end)
        rows[stack[-1].name if stack else "-"] += (now - last) / 1e9
        last = now

    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        while stack and stack[-1].end_ns <= span.start_ns:
            charge(stack[-1].end_ns)
            stack.pop()
        charge(span.start_ns)
        stack.append(span)
    while stack:
        charge(stack[-1].end_ns)
        stack.pop()
    charge(end)
    return dict(rows)


def without_networks() -> None:
    """Draw tokens by lot, and train on logprobs that are known."""
    lot = torch.Generator().manual_seed(0)

    def decode(self: Runner, rows_B: Any, *_: Any) -> Samples:
        return Samples(torch.randint(0, VOCABULARY - 2, (1, len(rows_B)), generator=lot), torch.full((1, len(rows_B)), -8.0))

    def known(decoder: Any, micro_batch: Any, *_: Any) -> tuple[Tensor, Tensor]:
        nothing = next(iter(decoder.parameters())).sum() * 0
        return nothing + torch.from_numpy(micro_batch.old_logprobs_M), torch.zeros(len(micro_batch.index_M))

    Runner.decode = CpuRunner.decode = decode  # type: ignore[method-assign]
    training.chosen_logprobs = known  # type: ignore[attr-defined]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("settings", nargs="*")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path)
    asked = parser.parse_args()
    workloads.SHAPES["host"] = {**workloads.SHAPES["tiny-64k"], **TINY, "vocab_size": VOCABULARY}  # type: ignore[index]
    own = ["model=random:host", "device=cpu", "dtype=float32", f"engine.block_size={BLOCK_SIZE}"]
    counts = [f"steps={asked.steps}", f"warmup_steps={asked.skip}"]
    settings = make_settings("e2e", ["workload=E1", *own, *counts, *asked.settings])
    assert isinstance(settings, E2ESettings)
    recorder = Recorder()
    parts = Parts(recorder, asked.skip)
    without_networks()
    gc.callbacks.append(parts.collecting)
    with as_path(settings.model, torch.device("cpu"), torch.float32, 0, asked.tokenizer or "words") as path:
        config = recipe(settings.model_copy(update={"model": path}), LOCKSTEP, 0)
        prepare_process(config)
        with recording(recorder), scratch_stages(config) as stages:
            stages.run(StepWatch(parts.finished), asked.skip + asked.steps)
            gc.callbacks.remove(parts.collecting)
    parts.show()


if __name__ == "__main__":
    main()
