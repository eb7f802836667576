"""`redline compare A B`: pairs of processes until they are enough, then a verdict, a document and an exit code."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from redline.errors import CompareError, ConfigError
from redline.lab.compare.saved import Saved, read_saved
from redline.lab.compare.sessions import other_hardware, other_software
from redline.lab.compare.sides import What, is_saved, jobs
from redline.lab.compare.worker import Job, Told, Turns, measure_pair
from redline.lab.evidence.experiment import Experiment, Metric, Pair, Phase, Round, Wish, run
from redline.lab.evidence.guards import TOLERANCES
from redline.lab.evidence.sample_size import MIN_PAIRS
from redline.lab.evidence.verdict import Verdict, judge, judge_unpaired
from redline.telemetry import describe_environment, write_json

DEFAULT_METRICS = {"recipe": "run/step_s", "trainer": "step_s"}
"""By what is run; of other cases the first result."""
MIN_ROUNDS, MAX_ROUNDS = 4, 40
FIRST_SEEDS: Mapping[Phase, int] = {"A/A": 1, "A/B": 1001}
"""Every pair has a seed of its own, and the trial 0."""


@dataclass(slots=True, frozen=True)
class Request:
    """The command line."""

    a: str
    b: str
    what: What
    wish: Wish
    metric: str | None = None
    rounds: int | None = None
    """Rounds of a pair; None takes as many as last twice as long as starting the processes."""
    guards: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(TOLERANCES))
    seed: int = 0


@dataclass(slots=True, frozen=True)
class Report:
    request: Request
    metric: Metric
    verdict: Verdict
    values: tuple[float | None, float | None]
    """Medians of A and B; None where nothing was measured."""
    samples: Sequence[Any]
    """Everything they were computed from."""
    noise: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """What was measured to know it, where something was."""
    identities: Sequence[Mapping[str, Any]] = ()
    """What the process of each side says about itself."""

    def as_json(self) -> dict[str, Any]:
        """The document that all benches share; no physics bounds a comparison."""
        result = {
            "name": self.metric.name,
            "value": self.values[1],
            "unit": self.metric.unit,
            "samples": list(self.samples),
            **self.noise,
            "bound": None,
            "fraction_of_bound": None,
            "peer": self._peer(),
        }
        return {"case": "compare", "identity": self._identity(), "results": [result], **self.verdict.as_json()}

    def _peer(self) -> dict[str, Any] | None:
        c = self.verdict.comparison
        if c is None:
            return None
        figure = {"name": self.request.a, "value": self.values[0], "ratio": c.ratio}
        return figure | {"interval_95": c.interval and list(c.interval), "p_value": c.p_value, "pairs": c.pairs}

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "compare.json"
        write_json(path, self.as_json())
        return path

    def _identity(self) -> dict[str, Any]:
        request = self.request
        config = {
            "a": request.a,
            "b": request.b,
            "recipe": None if request.what.recipe is None else str(request.what.recipe),
            "case": request.what.case,
            "overrides": list(request.what.overrides),
            "a_overrides": list(request.what.a_overrides),
            "b_overrides": list(request.what.b_overrides),
            "effect": request.wish.effect,
            "max_pairs": request.wish.max_pairs,
            "seed": request.seed,
        }
        sources = {side: told.get("source") for side, told in zip(("a", "b"), self.identities, strict=False)}
        return describe_environment() | {"config": config, "sources": sources}


def compare(request: Request, console: Console) -> Report:
    """Measure or read; a person follows on `console`."""
    if request.rounds is not None and request.rounds % 2:
        raise ConfigError(f"--rounds {request.rounds}: each side is to be first as often as the other", "give an even number")
    if is_saved(request.a) and is_saved(request.b):
        return _compare_saved(request)
    console.print(opening(request), style="dim", soft_wrap=True)
    with stopping_cleanly(), jobs(request.a, request.b, request.what) as (a, b):
        return _compare_runs(request, a, b, console)


def opening(request: Request) -> str:
    """What is about to be measured, and how long that may take: the first pair ends minutes later."""
    wish, what = request.wish, request.what
    a, b = " ".join([request.a, *what.a_overrides]), " ".join([request.b, *what.b_overrides])
    return (
        f"comparing A = {a} with B = {b}: one pair to warm up, {MIN_PAIRS} pairs of A with itself, then at most"
        f" {wish.max_pairs} of A and B, for at most {wish.max_seconds / 60:g} minutes in all; fewer than {MIN_PAIRS} pairs of A"
        " and B give no verdict"
    )


@contextlib.contextmanager
def stopping_cleanly() -> Iterator[None]:
    """Inside the block SIGTERM, which a CI sends when the time is up, is a Ctrl-C: processes end, and worktrees go."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, signal.default_int_handler) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# ── saved results ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _compare_saved(request: Request) -> Report:
    """Two sides of one file ran in turn, and are pairs. Two files are two sessions: nothing says that the machine was the same
    to both, beyond what they state."""
    if request.what != What() or request.rounds is not None or dict(request.guards) != dict(TOLERANCES):
        raise ConfigError(
            "saved results are read, and nothing runs that keys, --recipe, --case, --rounds and --guard would change or watch",
            "leave them out",
        )
    a = read_saved(request.a, request.metric)
    b = read_saved(request.b, f"{a.figure}:{a.field}" if a.field else a.figure)
    metric = Metric(a.figure, a.larger_is_better, a.unit)
    samples = [{"A": list(a.samples), "B": list(b.samples)}]
    verdict = (
        _judge_pairs(a, b, metric, request.wish) if a.path.samefile(b.path) else _judge_sessions(a, b, metric, request.wish)
    )
    return Report(request, metric, verdict, (statistics.median(a.samples), statistics.median(b.samples)), samples)


def _judge_pairs(a: Saved, b: Saved, metric: Metric, wish: Wish) -> Verdict:
    """The file does not say which side was first in a round."""
    if len(a.samples) != len(b.samples):
        found = f"{len(a.samples)} and {len(b.samples)} samples make no pairs"
        raise CompareError(f"{a.path}: {found}", "name two sides of one result")
    rounds = zip(a.samples, b.samples, strict=True)
    pairs = [Pair([Round({metric.name: x}, {metric.name: y}, a_first=True)]) for x, y in rounds]
    return judge(Experiment(metric, wish, pairs=pairs), {})


def _judge_sessions(a: Saved, b: Saved, metric: Metric, wish: Wish) -> Verdict:
    caveats = other_hardware(a.identity, b.identity)
    if a.config != b.config:
        caveats.append(f"not the same settings: {', '.join(_differing(a.config, b.config))}")
    sign = 1 if metric.larger_is_better else -1
    logs_a, logs_b = ([sign * math.log(value) for value in side.samples] for side in (a, b))
    return judge_unpaired(logs_b, logs_a, wish, metric, caveats, other_software(a.identity, b.identity))


def _differing(a: Any, b: Any) -> list[str]:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return ["config"]
    return sorted(key for key in a.keys() | b.keys() if a.get(key) != b.get(key))


# ── runs ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


class _Session:
    """Makes the pairs. The first one is thrown away: it finds out how long things take, and fills the machine's caches."""

    def __init__(self, request: Request, a: Job, b: Job, console: Console) -> None:
        self._request, self._a, self._b, self._console = request, a, b, console
        _, self._told = measure_pair(a, b, Turns(MIN_ROUNDS, alternate=False), 0, request.seed)
        if self._told.devices[0] != self._told.devices[1]:
            raise ConfigError(f"A runs on {self._told.devices[0]}, B on {self._told.devices[1]}", "set run.device for both")
        self.turns = Turns(request.rounds or _fitting_rounds(self._told), self._told.devices[0] == "cpu")
        self.identities = self._told.identities
        self.metric = self._choose_metric()

    def measure(self, phase: Phase, number: int) -> Pair:
        other = self._a if phase == "A/A" else self._b
        first = FIRST_SEEDS[phase]
        pair, _ = measure_pair(self._a, other, self.turns, first + number, self._request.seed)
        return pair

    def tell(self, experiment: Experiment, phase: Phase) -> None:
        pairs = experiment.against_itself if phase == "A/A" else experiment.pairs
        ratio = math.exp(pairs[-1].log_ratio(experiment.metric))
        most = f"{MIN_PAIRS}" if phase == "A/A" else f"at most {experiment.wish.max_pairs}"
        self._console.print(f"{phase} pair {len(pairs)} of {most}: {ratio:.3f}", style="dim", soft_wrap=True)
        if phase == "A/A" and len(pairs) == MIN_PAIRS:
            found = f"a pair of A with itself varies by {experiment.noise:.1%}"
            plan = f"{experiment.pairs_wanted:.0f} pairs for a difference of {experiment.wish.effect:.1%}"
            self._console.print(f"{found}: {plan}", soft_wrap=True)

    def _choose_metric(self) -> Metric:
        what, known = self._request.what, self._told.metrics
        default = DEFAULT_METRICS.get(what.case or "recipe", next(iter(known)))
        name = self._request.metric or default
        if name not in known:
            raise ConfigError(f"--metric {name}: not measured here", f"one of {', '.join(sorted(known))}")
        unit = "tok/s" if name.endswith("tokens_per_s") else "s" if name.endswith("_s") else ""
        return Metric(name, name in self._told.larger_is_better, unit)


def _compare_runs(request: Request, a: Job, b: Job, console: Console) -> Report:
    session = _Session(request, a, b, console)
    turns = session.turns
    how = "taking turns" if turns.alternate else "one after the other"
    console.print(
        f"{session.metric.name}: a pair is two fresh processes, {how}, {turns.rounds} rounds each", style="dim", soft_wrap=True
    )
    experiment = run(session.metric, request.wish, session.measure, time.monotonic, session.tell)
    return report_of(request, experiment, session.identities)


def report_of(request: Request, experiment: Experiment, identities: Sequence[Mapping[str, Any]] = ()) -> Report:
    """Judge what was measured; returns the document of it."""
    verdict = judge(experiment, request.guards)
    samples, values = [pair.as_json() for pair in experiment.pairs], _medians(experiment)
    return Report(request, experiment.metric, verdict, values, samples, _noise(experiment), identities)


def _fitting_rounds(told: Told) -> int:
    """An even number, so that each side is first as often; together they last twice as long as the start."""
    return 2 * math.ceil(min(MAX_ROUNDS, max(MIN_ROUNDS, 2 * told.startup_s / told.round_s)) / 2)


def _medians(experiment: Experiment) -> tuple[float | None, float | None]:
    rounds, name = [each for pair in experiment.pairs for each in pair.rounds], experiment.metric.name
    if not rounds:
        return None, None
    return statistics.median(each.a[name] for each in rounds), statistics.median(each.b[name] for each in rounds)


def _noise(experiment: Experiment) -> dict[str, Any]:
    wanted, spread = experiment.pairs_wanted, experiment.noise
    return {
        "against_itself": [pair.as_json() for pair in experiment.against_itself],
        "noise": spread if math.isfinite(spread) else None,
        "pairs_wanted": wanted if math.isfinite(wanted) else None,
    }
