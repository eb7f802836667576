"""`redline bench n-sampling`: n completions of a prompt as one request against n requests with that prompt.

One request prefills its prompt once. The n requests are made in three ways: one after the other, and all at once, to an engine
without prefix caching (each prefills the prompt for itself); and all at once to an engine with it (the first to be scheduled
prefills it for all). In every round all run in an order drawn by lot; the speed-up is a ratio of seconds, from pairs.

Its bound is what the fastest possible request would have gained over the same requests. That is not n: how long the others
take is measured, not given, and n requests one after the other may each take longer than the fewest rows need.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from rich.console import Console

from redline.lab.bench.settings import NSamplingSettings, fit_engine
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.material.networks import make_network
from redline.lab.material.prompts import random_prompts
from redline.lab.measure import roofline
from redline.lab.measure.machine import Machine, measure_machine
from redline.lab.measure.pairs import interleave
from redline.lab.measure.warmup import WarmUp, warm_up
from redline.lab.peers.generation_sides import Batch, EngineSide, Run
from redline.launch.engines import make_engine

TOGETHER = "one request"
IN_TURN, AT_ONCE, CACHED = "one after the other", "at once, prefix caching off", "at once, prefix caching on"
REFERENCE = {2: 1.8, 4: 2.3, 8: 2.8, 16: 3.5}
"""n → the speed-up to beat: Qwen2.5-0.5B-Instruct, 10 prompts, 128 new tokens. Its n requests take n times as long as one, so
they were made one after the other."""
Rounds = Sequence[Mapping[str, Run]]


class Arms:
    """The ways to get n completions of a prompt, over one set of weights."""

    def __init__(self, settings: NSamplingSettings) -> None:
        device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
        decoder = make_network(settings.model, device, dtype, settings.seed).decoder
        self._settings = settings
        self._cost = roofline.NetworkCost.of(decoder).quantized(settings.engine.quantization, dtype)
        self._vocab_size = decoder.spec.vocab_size
        longest = settings.prompt_tokens + settings.new_tokens
        self.config = fit_engine(settings.engine, settings.prompts * max(settings.n), longest)
        self._plain, self._caching = (
            EngineSide(make_engine(decoder, self.config.model_copy(update={"enable_prefix_caching": caching})), device)
            for caching in (False, True)
        )

    def least_seconds(self, n: int, machine: Machine) -> float:
        """What this machine needs for one request of n completions for each prompt."""
        s, guesses = self._settings, self.config.speculation != "off"
        load = roofline.Load(s.prompts, s.prompt_tokens, n, s.new_tokens, self.config.max_num_seqs, guesses=guesses)
        return roofline.generation_seconds(self._cost, load, machine)

    def of(self, n: int) -> dict[str, Callable[[int], Run]]:
        return {
            TOGETHER: lambda number: self._plain.run(self._batch(number, n, 1)),
            IN_TURN: lambda number: self._in_turn(number, n),
            AT_ONCE: lambda number: self._plain.run(self._batch(number, 1, n)),
            CACHED: lambda number: self._caching.run(self._batch(number, 1, n)),
        }

    def _in_turn(self, number: int, n: int) -> Run:
        runs = [self._plain.run(self._batch(number, 1, 1)) for _ in range(n)]
        seconds = sum(run.seconds for run in runs)
        return Run(seconds, sum(run.num_tokens for run in runs), runs[0].mean_logprob)

    def _batch(self, number: int, n: int, copies: int) -> Batch:
        s = self._settings
        prompts = random_prompts(s.prompts, s.prompt_tokens, self._vocab_size, (s.seed, number))
        return Batch([prompt for prompt in prompts for _ in range(copies)], n, s.new_tokens, s.seed + number)


def measure(settings: NSamplingSettings, console: Console) -> Measured:
    machine = measure_machine(torch.device(settings.device), getattr(torch, settings.dtype))
    console.print(machine.how, style="dim")
    arms = Arms(settings)
    results: list[Result] = []
    warm_ups: dict[str, WarmUp] = {}
    for n in settings.n:
        runs = arms.of(n)
        for name, run in runs.items():
            _, warm_ups[f"n = {n}: {name}"] = warm_up(_always_first(run), max_seconds=settings.warmup_s)
        rounds = interleave(
            {name: _after_warm_up(run) for name, run in runs.items()}, settings.pairs, settings.seed + n, lambda *_: None
        )
        least = arms.least_seconds(n, machine)
        results += [_speed_up(rounds, n, against, least, machine) for against in (IN_TURN, AT_ONCE, CACHED)]
        console.print(f"n = {n}: " + ", ".join(f"{result.value:.2f}×" for result in results[-3:]))
    return Measured(settings.model_copy(update={"engine": arms.config}), results, warm_ups=warm_ups)


def _always_first(run: Callable[[int], Run]) -> Callable[[int], Run]:
    return lambda _: run(0)


def _after_warm_up(run: Callable[[int], Run]) -> Callable[[int], Run]:
    return lambda number: run(number + 1)


def _speed_up(rounds: Rounds, n: int, against: str, least_s: float, machine: Machine) -> Result:
    comparison = compare([row[against].seconds for row in rounds], [row[TOGETHER].seconds for row in rounds])
    reference = REFERENCE.get(n) if against == IN_TURN else None
    interval = None if comparison.interval is None else list(comparison.interval)
    return Result(
        f"n = {n}: one request against {n} request{'s'[: n > 1]}, {against}",
        comparison.ratio,
        "×",
        [{name: row[name].as_json() for name in (TOGETHER, against)} for row in rounds],
        Bound(
            statistics.median(row[against].seconds for row in rounds) / least_s,
            f"seconds of the {n} requests as measured / {least_s:.4g} s, the least for the one (its prompts once, and"
            f" max(bytes / bandwidth, operations / peak) of every decode step); {machine.how}",
        ),
        PeerFigure("reference", reference, comparison.ratio / reference) if reference else None,
        details={"interval_95": interval, "p_value": comparison.p_value, "pairs": comparison.pairs},
        fractions=[least_s / row[TOGETHER].seconds for row in rounds],
    )
