"""A side of `redline compare` as a process of its own, and the pair that two of them make."""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redline.child import Child, ChildError
from redline.errors import CompareError, SideError
from redline.lab.evidence.experiment import Pair, Round
from redline.lab.measure.warmup import is_steady

PROGRAMS = ("lab/compare/process.py", "lab/compare_process.py")
"""Where a revision has its side of the conversation, the newest place first."""
MAX_WARMUP = 8
"""Rounds that do not count; a machine that others work on may never be steady."""


@dataclass(slots=True, frozen=True)
class Job:
    """What a side runs."""

    source: Path
    """The folder that holds its `redline`."""
    task: dict[str, Any]
    """As its `process.py` reads it, without the seed."""
    name: str
    """As the command line has it."""
    lag: int = 0
    """Steps that its samples may be old."""


@dataclass(slots=True)
class Worker:
    """Speaks with `process.py`, which keeps everything loaded and waits."""

    job: Job
    child: Child
    started_s: float = field(default_factory=time.perf_counter)
    device: str = ""
    identity: dict[str, Any] = field(default_factory=dict)
    larger_is_better: Sequence[str] = ()
    startup_s: float = 0.0
    limit_s: float | None = None
    """Seconds that it may take to start, and for a step; then it is killed. None waits for ever."""
    steps: int = 1
    """Steps of a round."""

    @classmethod
    @contextlib.contextmanager
    def of(cls, job: Job, seed: int, limit_s: float | None = None, steps: int = 1) -> Iterator[Worker]:
        """Starts the process at once; `wait` blocks until it is ready. It is gone when the block ends."""
        # -P: no module of that folder may stand in for one of the standard library.
        command = [sys.executable, "-P", str(_program(job.source)), json.dumps({**job.task, "seed": seed})]
        with Child(command, environment_of(job.source)) as child:
            yield cls(job, child, limit_s=limit_s, steps=steps)

    def wait(self) -> None:
        with self._explained():
            ready = self.child.read(self.limit_s)
        self.device, self.identity = ready["device"], ready["identity"]
        self.startup_s = time.perf_counter() - self.started_s

    def round(self) -> dict[str, float]:
        """Blocks until it has run a round; returns its metrics, in the mean of its steps."""
        found = [self._step() for _ in range(self.steps)]
        seconds = [each.get("run/step_s", each["wall_s"]) for each in found]
        names = [name for name in found[-1] if all(name in each for each in found)]
        return {name: _mean([each[name] for each in found], seconds if name.endswith("_per_s") else None) for name in names}

    def _step(self) -> dict[str, float]:
        with self._explained():
            answer = self.child.ask("round", self.limit_s)
        self.larger_is_better = answer["larger_is_better"]
        return answer["metrics"]

    def peak_bytes(self) -> float:
        """The last thing it can be asked."""
        with self._explained():
            return float(self.child.ask("end", self.limit_s)["peak_bytes"])

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except ChildError as failed:
            hint = "run it alone first; an older revision may not know all keys"
            raise SideError(f"{self.job.name} {failed}", hint, side=self.job.name, code=failed.code) from None


def _mean(values: Sequence[float], seconds: Sequence[float] | None) -> float:
    """The mean over steps; for what is counted by the second, over the seconds that they took."""
    return statistics.fmean(values, seconds) if seconds is not None and all(seconds) else statistics.fmean(values)


@dataclass(slots=True, frozen=True)
class Turns:
    """How two processes share the machine."""

    rounds: int
    alternate: bool
    """Else one side ends before the other starts, which a GPU's memory may ask for; who is first is drawn for the pair."""
    limit_s: float | None = None
    """Seconds that a start or a step may take. A side that takes longer is killed, and `SideError` raised. None waits."""


@dataclass(slots=True, frozen=True)
class Told:
    """What the processes of a pair say of themselves."""

    devices: tuple[str, str]
    identities: tuple[dict[str, Any], dict[str, Any]]
    metrics: Sequence[str]
    """That both give."""
    larger_is_better: Sequence[str]
    startup_s: float
    """Seconds until the slower side was ready."""
    round_s: float
    """Seconds of both sides together in their fastest round."""


def steps_of_a_round(a: Job, b: Job) -> int:
    """One, or with a lag one more than it: samples of several steps come together then, and a step that waits for them is
    followed by steps that find them there. The median of such steps, or the mean of their logs, is no speed; the mean is. Both
    sides take as many, so that they stay at the same step of the same run."""
    return 1 + max(a.lag, b.lag)


def measure_pair(a: Job, b: Job, turns: Turns, number: int, seed: int) -> tuple[Pair, Told]:
    """Both get the same seed, another one in each pair; the lot has its own."""
    lot = random.Random(f"{seed}/{number}")
    return _alternating(a, b, turns, number, lot) if turns.alternate else _one_after_the_other(a, b, turns, number, lot)


def _alternating(a: Job, b: Job, turns: Turns, number: int, lot: random.Random) -> tuple[Pair, Told]:
    own = number, turns.limit_s, steps_of_a_round(a, b)
    with Worker.of(a, *own) as first, Worker.of(b, *own) as second:
        workers = (first, second)
        for worker in workers:
            worker.wait()
        _warm_up(workers)
        rounds = []
        for a_first in _orders(turns.rounds, lot):
            order = (0, 1) if a_first else (1, 0)
            found = {side: workers[side].round() for side in order}
            rounds.append(Round(found[0], found[1], a_first))
        return Pair(rounds, (first.peak_bytes(), second.peak_bytes())), _told(workers, rounds)


def _one_after_the_other(a: Job, b: Job, turns: Turns, number: int, lot: random.Random) -> tuple[Pair, Told]:
    a_first = lot.random() < 0.5
    found: dict[int, list[dict[str, float]]] = {}
    peaks, workers = [0.0, 0.0], list[Worker]()
    for side in (0, 1) if a_first else (1, 0):
        with Worker.of((a, b)[side], number, turns.limit_s, steps_of_a_round(a, b)) as worker:
            worker.wait()
            _warm_up([worker])
            found[side] = [worker.round() for _ in range(turns.rounds)]
            peaks[side] = worker.peak_bytes()
            workers.append(worker)
    rounds = [Round(x, y, a_first) for x, y in zip(found[0], found[1], strict=True)]
    in_order = (workers[0], workers[1]) if a_first else (workers[1], workers[0])
    return Pair(rounds, (peaks[0], peaks[1])), _told(in_order, rounds)


def _warm_up(workers: Sequence[Worker]) -> None:
    """Until every side is steady. All take as many rounds, so that they stay at the same step of the same run."""
    seconds: list[list[float]] = [[] for _ in workers]
    while len(seconds[0]) < MAX_WARMUP and not all(map(is_steady, seconds)):
        for worker, own in zip(workers, seconds, strict=True):
            own.append(worker.round()["wall_s"])


def _orders(rounds: int, lot: random.Random) -> list[bool]:
    """Whether A is first: as often as not, in an order drawn by lot."""
    orders = [number % 2 == 0 for number in range(rounds)]
    lot.shuffle(orders)
    return orders


def _told(workers: Sequence[Worker], rounds: Sequence[Round]) -> Told:
    a, b = workers
    return Told(
        (a.device, b.device),
        (a.identity, b.identity),
        [name for name in rounds[-1].a if name in rounds[-1].b],
        a.larger_is_better,
        max(a.startup_s, b.startup_s),
        a.steps * min(each.a["wall_s"] + each.b["wall_s"] for each in rounds),
    )


def environment_of(source: Path) -> dict[str, str]:
    """What a process that runs a source has in its environment: that source before the folders of the user's own modules."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))}


def _program(source: Path) -> Path:
    """The program of that revision: what it imports has the names that it has there."""
    there = [path for name in PROGRAMS if (path := source / "redline" / name).is_file()]
    if not there:
        raise CompareError(f"{source}: this revision has no side of redline compare", "take a newer one")
    return there[0]
