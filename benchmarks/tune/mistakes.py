"""`redline tune` from a recipe with every known mistake, and what it finds beside the best settings by hand, in one call.

    python benchmarks/tune/mistakes.py --save benchmarks/results/h200 --seconds 530       (one H200, nine minutes)
    python benchmarks/tune/mistakes.py --device cpu --model builtin:tiny --seconds 600    (two cores)

The mistakes: micro-batches of one attempt, activations computed again, four rows, no prefix cache, no lag. A search that is not
done after three quarters of the time is stopped, as with Ctrl-C: its log has what was kept. Then pairs of processes, the tuned
recipe beside each that was made by hand, until the time is up. The table is the last that is printed; exit code 1: the tuned
recipe has less than 90% of the best throughput by hand.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from redline.lab.material.random_folders import as_path
from redline.lab.material.workloads import RANDOM
from redline.lab.tune.bench import ProcessBench
from redline.lab.tune.space import name_of, overrides_of
from redline.lab.tune.trials import METRIC
from redline.telemetry import describe_environment, write_json

GROUPS, ATTEMPTS, PROMPT, NEW = 4, 4, 64, 64
ONE_ATTEMPT = PROMPT + NEW
MISTAKES: Mapping[str, Any] = {
    "trainer.max_tokens_per_micro_batch": ONE_ATTEMPT,
    "trainer.gradient_checkpointing": "full",
    "engine.max_num_seqs": ATTEMPTS,
    "engine.enable_prefix_caching": False,
    "buffer.max_lag": 0,
}
ALL_AT_ONCE = {"trainer.max_tokens_per_micro_batch": 2 * GROUPS * ATTEMPTS * ONE_ATTEMPT}
BY_HAND: Mapping[str, Mapping[str, Any]] = {"lag 0": ALL_AT_ONCE, "lag 1": {**ALL_AT_ONCE, "buffer.max_lag": 1}}
"""What a person who knows recipe and machine would set in place of the mistakes; all else is a recipe's default."""
SEARCH = 0.75
"""Share of the time that the search may take."""
WANTED = 0.9


@dataclass
class Found:
    """What came of it."""

    began: float = field(default_factory=time.monotonic)
    trials: list[dict[str, Any]] = field(default_factory=list)
    kept: dict[str, Any] = field(default_factory=dict)
    as_it_was_s: list[float] = field(default_factory=list)
    """Seconds of steps with the mistakes."""
    log_ratios: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in BY_HAND})
    """By hand → of each pair, how many times as fast the tuned recipe is."""
    step_s: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in (*BY_HAND, "tuned")})

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def times_as_fast(self, name: str) -> float:
        return math.exp(statistics.fmean(self.log_ratios[name]))

    @property
    def of_the_best(self) -> float:
        """Throughput of the tuned recipe over that of the best by hand."""
        return min(self.times_as_fast(name) for name, logs in self.log_ratios.items() if logs)

    def say(self, line: str) -> None:
        print(f"[{self.seconds:4.0f} s] {line}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=530)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", default=f"{RANDOM}qwen2.5-0.5b")
    parser.add_argument("--save", type=Path)
    asked, found = parser.parse_args(), Found()
    device, dtype = torch.device(asked.device), torch.bfloat16 if asked.device == "cuda" else torch.float32
    with as_path(asked.model, device, dtype, 0) as model, tempfile.TemporaryDirectory() as scratch:
        recipe = Path(scratch) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(recipe_of(model, asked.device)))
        found.say(f"{asked.model} is there")
        log = search(recipe, Path(scratch) / "tuned", SEARCH * asked.seconds, found)
        if asked.save:
            asked.save.mkdir(parents=True, exist_ok=True)
            (asked.save / "tune-log.jsonl").write_text(log)
        beside_hand(recipe, asked.seconds, found)
    if asked.save:
        write_json(asked.save / "tune.json", document(found, asked.model))
    print(table(found))
    sys.exit(0 if found.of_the_best >= WANTED else 1)


def recipe_of(model: str, device: str) -> dict[str, Any]:
    """A short task that any model has a signal in; words that are numbers where the model's are. On a CPU one thread: on cores
    that others use too, two wait for each other at every product."""
    threads = {"num_threads": 1} if device == "cpu" else {}
    task: dict[str, Any] = {"kind": "import", "path": "redline.lab.material.tasks:Letters"}
    if not model.startswith("builtin:"):
        task = {"kind": "import", "path": "redline.lab.material.tasks:Words", "params": {"tokens": PROMPT}}
    return {
        "run": {"name": "mistakes", "steps": 1000, "checkpoint_every": 0, "device": device, **threads},
        "model": {"path": model},
        "rollouts": {
            "task": task, "groups_per_step": GROUPS, "group_size": ATTEMPTS, "max_new_tokens": NEW,
            "evaluation": {"num_tasks": 0},
        },
        "engine": {"kv_cache_memory_bytes": 2**30 if device == "cuda" else 2**26},
        "trainer": {"learning_rate": 1e-6},
    }  # fmt: skip


def search(recipe: Path, out: Path, limit_s: float, found: Found) -> str:
    """Tune until the search has ended or the time is up. Returns the log."""
    command = [sys.executable, "-m", "redline", "tune", str(recipe), *overrides_of(MISTAKES), "--out", str(out)]
    tuning = subprocess.Popen(command)
    while tuning.poll() is None:
        time.sleep(1)
        is_over = any(row["kind"] == "proof" for row in rows_of(out))
        if is_over or found.seconds > limit_s:
            found.say("the search has ended" if is_over else "the time of the search is up")
            tuning.send_signal(signal.SIGINT)
            tuning.wait()
    for row in rows_of(out):
        if row["kind"] == "trial":
            found.trials.append(row)
            found.kept |= row["change"] if row["outcome"] == "kept" else {}
        if row["kind"] == "noise":
            found.as_it_was_s += [each["A"][METRIC.name] for each in row["pair"]["rounds"]]
    return (out / "log.jsonl").read_text()


def rows_of(out: Path) -> list[dict[str, Any]]:
    """Whole lines of the log; the last may be on its way."""
    path = out / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def beside_hand(recipe: Path, limit_s: float, found: Found) -> None:
    """Pairs of each recipe by hand and the tuned one, in turn, while there is time; each at least once."""
    bench = ProcessBench(recipe, (), recipe.parent / "hand", max_lag=1)
    tuned, number, longest_s = {**MISTAKES, **found.kept}, 0, 0.0
    while number < len(BY_HAND) or found.seconds + 1.2 * longest_s < limit_s:
        name, began = list(BY_HAND)[number % len(BY_HAND)], found.seconds
        pair = bench.measure(BY_HAND[name], tuned, 1 + number)
        found.log_ratios[name].append(pair.log_ratio(METRIC))
        found.step_s[name] += [each.a[METRIC.name] for each in pair.rounds]
        found.step_s["tuned"] += [each.b[METRIC.name] for each in pair.rounds]
        found.say(f"tuned beside {name}: {math.exp(found.log_ratios[name][-1]):.3f} times as fast")
        number, longest_s = number + 1, max(longest_s, found.seconds - began)


def document(found: Found, model: str) -> dict[str, Any]:
    return {
        "case": "tune",
        "identity": describe_environment() | {"model": model, "mistakes": dict(MISTAKES), "by_hand": dict(BY_HAND)},
        "kept": found.kept,
        "trials": found.trials,
        "as_it_was_s": found.as_it_was_s,
        "step_s": found.step_s,
        "log_ratios": found.log_ratios,
        "of_the_best": found.of_the_best,
        "seconds": found.seconds,
    }


def table(found: Found) -> str:
    lines = [f"\nas it was   {statistics.median(found.as_it_was_s):.3f} s a step"]
    for number, trial in enumerate(found.trials, 1):
        gain, guess = trial["measured"], trial["predicted"]
        times = f"{gain['ratio']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})" if gain else trial["failure"]
        expected = f"predicted {guess['likely']:.2f}, {guess['source']}" if guess else "nothing predicted"
        lines.append(f"{number:>3} {trial['outcome']:<9} {times:<22} {expected:<26} {name_of(trial['change'])}")
    tuned_s = statistics.median(found.step_s["tuned"])
    for name, logs in found.log_ratios.items():
        own_s, pairs = statistics.median(found.step_s[name]), f"{len(logs)} pair{'s' if len(logs) > 1 else ''}"
        lines.append(
            f"by hand, {name}: {own_s:.3f} s; tuned: {tuned_s:.3f} s, {found.times_as_fast(name):.3f} times as fast ({pairs})"
        )
    lines.append(f"kept: {name_of(found.kept)}")
    lines.append(f"{len(found.trials)} trials, {found.of_the_best:.0%} of the best by hand, {found.seconds:.0f} s")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
