"""Hold the simulator against ten measured configurations: one is recorded, and all ten are predicted from that recording alone.

python benchmarks/simulate/ten.py --save benchmarks/results/cpu --figure docs/images/simulate.svg    (half an hour)

Every configuration is a run of `redline train` with a tiny model, in a process of its own, with an engine in another; its
answers have lengths with a tail, and its environment takes a tenth of a second after every reply. A machine is not as fast in
one minute as in the next, so the recorded settings are run anew before and after each of the others, which is predicted from
these two; the recorded ones themselves are predicted from the run before. A configuration is the median of its rounds. A run
from which a virtual machine's host took more than a few percent of the time, or after which the machine is faster or slower
than before, is run again. The table is on stderr, one JSON document is saved.
Exit code 1: a step time is more than 10% off, or a distribution of lags is.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import yaml

from redline.lab.doctor.facts import FIRST, Facts
from redline.lab.doctor.finding import Finding
from redline.lab.doctor.rules.machine import noisy_neighbour
from redline.lab.simulate.recorded import Recording
from redline.lab.simulate.whatif import simulate
from redline.runs import Run
from redline.telemetry import describe_environment, write_json

STEPS, ROUNDS = 20, 3
SETTLED = 6
"""Steps that the measured mean leaves out: with a lag, a run takes so many until the trainer is as far behind as it will be."""
TAKEN, FASTER, AGAIN = 0.03, 0.06, 3
"""Share of the processors' time that a host may take from a run, and by which the machine may be faster or slower after it than
before: where either is more, the run is run again, so often."""
TOLERANCE = 0.10
"""Share by which a predicted step time may be off, and of the groups that may be predicted at another lag."""
ENVIRONMENT = '''
import asyncio
import random

from redline import Task


class Timed:
    """Questions whose answers have a tail, and whose score takes a while."""

    def __init__(self, seed=0, pause_s=0.0, length=24.0):
        self.pause_s, self.length, self.random = pause_s, length, random.Random(seed)

    def train(self, index):
        return Task(f"timed/{index}", [{"role": "user", "content": f"say {index % 10}"}])

    def held_out(self, count):
        return []

    async def play(self, task, policy):
        length = self.length * min(4.0, self.random.lognormvariate(0.0, 0.5))
        turn = await policy.say(task.messages, max_tokens=max(2, round(length)))
        await asyncio.sleep(self.pause_s)
        return float(sum(map(ord, turn.text)) % 5)
'''
PAUSE_S, LENGTH = 0.1, 24.0
"""Seconds of the environment after a reply, and the median of tokens in one, as recorded."""
RECIPE = {
    "run": {"steps": STEPS, "checkpoint_every": 0, "num_threads": 1, "device": "cpu"},
    "model": {"path": "builtin:tiny", "dtype": "float32"},
    "rollouts": {
        "environment": {"name": "timed:Timed", "params": {"pause_s": PAUSE_S, "length": LENGTH}},
        "groups_per_step": 8, "group_size": 8, "max_new_tokens": 256,
        "evaluation": {"num_tasks": 0},
    },
    "trainer": {"learning_rate": 1e-4},
    "placement": {"engines": 1},
    "telemetry": {"sample_every_s": 0.5},
}  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """What is run, and what the simulator is asked."""

    name: str
    overrides: Sequence[str]
    asked: Sequence[str]


def same(name: str, *overrides: str) -> Configuration:
    """The simulator knows these keys by their own names."""
    return Configuration(name, overrides, overrides)


CONFIGURATIONS = (
    same("recorded"),
    same("16 groups", "rollouts.groups_per_step=16"),
    same("4 groups", "rollouts.groups_per_step=4"),
    same("groups of 16", "rollouts.group_size=16"),
    same("groups of 4", "rollouts.group_size=4"),
    same("32 rows", "engine.max_num_seqs=32"),
    same("lag 1", "buffer.max_lag=1"),
    same("lag 2", "buffer.max_lag=2"),
    Configuration("answers twice as long", (f"rollouts.environment.params.length={2 * LENGTH}",), ("lengths=2",)),
    Configuration(
        "environments three times as slow", (f"rollouts.environment.params.pause_s={3 * PAUSE_S}",), ("environments=3",)
    ),
)


@dataclass(frozen=True)
class Row:
    """One configuration, predicted and measured."""

    name: str
    predicted_s: float
    low_s: float
    high_s: float
    measured_s: float
    spread_s: float
    """Standard deviation of the measured steps."""
    lags_off: float
    """Share of the groups that were predicted at another lag than they had."""
    neighbours: float
    """Share of the time that other processes took from it, or from the recording it is predicted from."""

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1

    @property
    def holds(self) -> bool:
        return abs(self.error) <= TOLERANCE and self.lags_off <= TOLERANCE


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--keep", type=Path, help="folder for the runs, instead of one that is thrown away")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = compared((asked.keep or Path(scratch)).resolve())
    document = {
        "case": "simulate",
        "identity": describe_environment() | {"config": RECIPE},
        "results": [asdict(row) | {"error": row.error, "holds": row.holds} for row in rows],
    }
    if asked.save:
        write_json(asked.save / "simulate.json", document)
    if asked.figure:
        asked.figure.write_text(figure(rows))
    print(json.dumps(document["results"]))
    sys.exit(0 if all(row.holds for row in rows) else 1)


def compared(folder: Path) -> list[Row]:
    """Run all configurations in turn, some rounds, each between two recordings, and predict them. Blocks for minutes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "timed.py").write_text(ENVIRONMENT)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    rounds = [one_round(folder, number) for number in range(ROUNDS)]
    rows = [median_of(of_one) for of_one in zip(*rounds, strict=True)]
    for row in rows:
        print(
            f"{row.name:<32} predicted {row.predicted_s:.3f} s, measured {row.measured_s:.3f} s: {row.error:+.1%},"
            f" lags {row.lags_off:.0%} off, neighbours {row.neighbours:.0%}",
            file=sys.stderr,
        )
    return rows


def one_round(folder: Path, number: int) -> list[Row]:
    recorded, *others = CONFIGURATIONS
    before = run(folder, f"ten{number}-0", recorded)
    rows: list[Row] = []
    for place, configuration in enumerate(others, 1):
        measured = run(folder, f"ten{number}-{place}", configuration)
        after = run(folder, f"ten{number}-0-{place}", recorded)
        if not rows:
            rows.append(row_of(recorded, [before], after))
        rows.append(row_of(configuration, [before, after], measured))
        before = after
    return rows


def run(folder: Path, name: str, configuration: Configuration) -> Run:
    """Run it, unless it has been; again where the machine was another one meanwhile."""
    found = folder / "runs" / f"{name}-001"
    for left in reversed(range(AGAIN + 1)):
        if (found / "ledger.json").exists():
            break
        command = [sys.executable, "-m", "redline", "train", "recipe.yaml", f"run.name={name}", *configuration.overrides]
        speed, before = _speed(), psutil.cpu_times()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
        after = psutil.cpu_times()
        taken, faster = (_stolen(after) - _stolen(before)) / max(1e-9, sum(after) - sum(before)), _speed() / speed - 1
        print(f"{name}: {configuration.name}, {taken:.1%} taken by the host, {faster:+.1%}", file=sys.stderr, flush=True)
        if left and (taken > TAKEN or abs(faster) > FASTER):
            shutil.rmtree(found)
    return Run.open(found)


def _stolen(times: NamedTuple) -> float:
    return float(getattr(times, "steal", 0.0))


def _speed() -> float:
    """How fast this machine is, in a second: what shares a core with a virtual machine is not in its own books."""
    began, turns, matrix = time.perf_counter(), 0, np.ones((128, 128), np.float32)
    while time.perf_counter() < began + 1.0:
        matrix @ matrix
        turns += len([number * number for number in range(1000)]) // 1000
    return turns / (time.perf_counter() - began)


def row_of(configuration: Configuration, recorded: Sequence[Run], measured: Run) -> Row:
    predictions = [simulate(Recording.of(each), configuration.asked).simulated for each in recorded]
    facts = Facts.of(measured)
    settled = {name: values[SETTLED - FIRST :] for name, values in facts.steps.items()}
    steps, lags = settled["run/step_s"], lags_of(settled)
    return Row(
        name=configuration.name,
        predicted_s=_mean(each.step_s for each in predictions),
        low_s=_mean(each.low_s for each in predictions),
        high_s=_mean(each.high_s for each in predictions),
        measured_s=float(steps.mean()),
        spread_s=float(steps.std()),
        lags_off=_mean(distance(each.lags, lags) for each in predictions),
        neighbours=max(neighbours(each) for each in (facts, *map(Facts.of, recorded))),
    )


def median_of(rows: Sequence[Row]) -> Row:
    """One configuration over its rounds: the round whose prediction is off by the median."""
    return sorted(rows, key=lambda row: row.error)[len(rows) // 2]


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def neighbours(facts: Facts) -> float:
    """Share of the time that other processes took, as the doctor says."""
    found = noisy_neighbour(facts)
    return found.gain.likely_s / facts.wall_s if isinstance(found, Finding) else 0.0


def lags_of(steps: Mapping[str, np.ndarray]) -> dict[int, float]:
    """Lag → share of the groups that were trained on at it."""
    counts = {
        int(name.rpartition("_")[2]): float(np.nansum(values))
        for name, values in steps.items()
        if name.startswith("buffer/groups_at_lag_")
    }
    total = sum(counts.values()) or 1.0
    return {lag: count / total for lag, count in counts.items()}


def distance(a: Mapping[int, float], b: Mapping[int, float]) -> float:
    return sum(abs(a.get(lag, 0.0) - b.get(lag, 0.0)) for lag in a.keys() | b.keys()) / 2


# ── the figure ─────────────────────────────────────────────────────────────────────────────────────────────────────────

SIDE, MARGIN, NAMES, LINE = 420, 60, 230, 16


def figure(rows: Sequence[Row]) -> str:
    """Predicted over measured seconds of a step, both axes logarithmic; the grey band is 10%. Names stand beside the square."""
    values = [value for row in rows for value in (row.measured_s, row.predicted_s)]
    low, high = min(values) / 1.3, max(values) * 1.3
    at = lambda value: MARGIN + SIDE * (np.log(value / low) / np.log(high / low))  # noqa: E731
    up = lambda value: MARGIN + SIDE - (at(value) - MARGIN)  # noqa: E731
    band = [(low, low * 0.9), (high, high * 0.9), (high, high * 1.1), (low, low * 1.1)]
    square = f'x="{MARGIN}" y="{MARGIN}" width="{SIDE}" height="{SIDE}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIDE + 2 * MARGIN + NAMES} {SIDE + 2 * MARGIN}"'
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<clipPath id="square"><rect {square}/></clipPath>',
        f'<polygon points="{" ".join(f"{at(x):.1f},{up(y):.1f}" for x, y in band)}" fill="#eee" clip-path="url(#square)"/>',
        f'<rect {square} fill="none" stroke="#999"/>',
        f'<line x1="{at(low):.1f}" y1="{up(low):.1f}" x2="{at(high):.1f}" y2="{up(high):.1f}" stroke="#bbb"/>',
        f'<text x="{MARGIN + SIDE / 2}" y="{SIDE + 2 * MARGIN - 15}" text-anchor="middle">measured, s a step</text>',
        f'<text x="18" y="{MARGIN + SIDE / 2}" text-anchor="middle" transform="rotate(-90 18 {MARGIN + SIDE / 2})">'
        "predicted, s a step</text>",
    ]  # fmt: skip
    for tick in (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1, 2, 5, 10):
        if low <= tick <= high:
            parts.append(f'<text x="{at(tick):.1f}" y="{MARGIN + SIDE + 16}" text-anchor="middle" fill="#666">{tick:g}</text>')
            parts.append(f'<text x="{MARGIN - 8}" y="{up(tick) + 4:.1f}" text-anchor="end" fill="#666">{tick:g}</text>')
    side, free = MARGIN + SIDE + 14, float("-inf")
    for row in sorted(rows, key=lambda row: -row.predicted_s):
        x, y = at(row.measured_s), up(row.predicted_s)
        free = max(y, free + LINE)
        parts.append(
            f'<polyline points="{x:.1f},{y:.1f} {side - 24},{free:.1f} {side - 4},{free:.1f}" fill="none" stroke="#ccc"/>'
        )
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{"#1a6faf" if row.holds else "#c0392b"}"/>')
        parts.append(f'<text x="{side}" y="{free + 4:.1f}" fill="#333">{row.name} {row.error:+.1%}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
