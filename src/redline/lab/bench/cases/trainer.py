"""`redline bench trainer`: tokens per second, MFU, time by phase and memory by kind of training, beside transformers.

Every side takes the same optimizer steps on the same sequences: forward, backward and AdamW, with GRPO's loss on the
logprobs of all tokens after the prompt. In every round all sides run once, in an order drawn by lot.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from redline.config.sections.trainer import TrainerConfig
from redline.errors import RunFolderError
from redline.lab.bench.settings import MICRO_BATCH_TOKENS, TrainerSettings, fit_trainer
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.material.networks import make_network
from redline.lab.material.recorded import RecordedStep, recorded_steps
from redline.lab.material.train_batches import TAIL, long_tailed_lengths, random_batch, random_groups
from redline.lab.measure import roofline
from redline.lab.measure.machine import MemoryMeter, measure_machine
from redline.lab.measure.pairs import interleave
from redline.lab.measure.phases import Memory, memory_by_kind
from redline.lab.measure.warmup import WarmUp, warm_up
from redline.lab.peers.contest import AGAIN, OURS
from redline.lab.peers.training_sides import (
    RedlineTraining,
    TrainingSide,
    TrainRun,
    TransformersTraining,
    run_steps,
    trained_size_of,
)
from redline.types import TrainBatch

Rounds = Sequence[Mapping[str, TrainRun]]


class Workload:
    """The batches of every round: other tokens each time, always the same lengths, or those of a run's steps in turn."""

    def __init__(self, settings: TrainerSettings, vocab_size: int) -> None:
        self._settings = settings
        self._vocab_size = vocab_size
        self._recorded = _replayed(settings.replay) if settings.replay else []
        self.lengths = np.concatenate([step.lengths for step in self._recorded]) if self._recorded else _lengths(settings)

    @property
    def load(self) -> roofline.TrainLoad:
        """The load of a step; where steps differ, the mean of those that are timed."""
        if not self._recorded:
            return roofline.TrainLoad.of(self.lengths, self._settings.prompt_tokens, self._settings.group_size)
        numbers = range(self._settings.steps, self._settings.steps * (self._settings.pairs + 1))
        return roofline.mean_load([self._recorded[number % len(self._recorded)].load for number in numbers])

    @property
    def peer_rows(self) -> int:
        """Sequences that fit our micro-batch if each were as long as the longest. A side that pads has to count on that."""
        return max(1, (self._settings.trainer.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS) // int(self.lengths.max()))

    def batch(self, number: int) -> TrainBatch:
        s = self._settings
        if self._recorded:
            step = self._recorded[number % len(self._recorded)]
            return random_groups(step.lengths, step.prompt_lengths, step.group_offsets, self._vocab_size, (s.seed, number))
        return random_batch(
            self.lengths,
            prompt_tokens=s.prompt_tokens,
            group_size=s.group_size,
            vocab_size=self._vocab_size,
            key=(s.seed, number),
        )

    def round(self, number: int) -> list[TrainBatch]:
        """Round 0 is the warm-up."""
        steps = self._settings.steps
        return [self.batch(number * steps + step) for step in range(steps)]


def _replayed(run: Path) -> list[RecordedStep]:
    """Raises `RunFolderError` where attempts are more than a prompt and a reply: lengths do not say which token is whose."""
    steps = recorded_steps(run)
    if not all(step.shares_prompts for step in steps):
        raise RunFolderError(
            f"replay = {run}: its attempts have several turns, or a group's have other prompts",
            "take a run of one prompt and one reply, or give sizes: sequences, tokens, prompt_tokens, group_size",
        )
    return steps


def _lengths(settings: TrainerSettings) -> np.ndarray:
    if settings.lengths == "equal":
        return np.full(settings.sequences, settings.tokens, dtype=np.int64)
    longest = settings.longest or TAIL * settings.tokens
    return long_tailed_lengths(settings.sequences, settings.total_tokens, settings.prompt_tokens + 1, longest, settings.seed)


class Contest:
    """The sides, each with its optimizer's states in place."""

    def __init__(self, settings: TrainerSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._device = torch.device(settings.device)
        self.sides: dict[str, TrainingSide] = {}
        self.memory: dict[str, Memory] = {}
        self.versions: dict[str, str] = {}
        self.warm_ups: dict[str, WarmUp] = {}
        dtype = getattr(torch, settings.dtype)
        meter = MemoryMeter(self._device)
        self.network = make_network(settings.model, self._device, dtype, settings.seed)
        self.workload = Workload(settings, self.network.decoder.spec.vocab_size)
        self._enter(OURS, RedlineTraining(self.network.decoder, dtype, settings.trainer), meter)
        for peer in settings.peers or ():
            self._enter_peer(peer)

    @property
    def peers(self) -> list[str]:
        return [name for name in self.sides if name != OURS]

    def run(self, name: str, number: int) -> TrainRun:
        return run_steps(self.sides[name], self.workload.round(number), self._device)

    def _enter_peer(self, peer: str) -> None:
        if peer == "redline":
            self.sides[AGAIN] = self.sides[OURS]
        elif peer == "transformers":
            from transformers import __version__

            self.versions[peer] = __version__
            meter = MemoryMeter(self._device)
            model = self.network.as_transformers()
            self._enter(peer, TransformersTraining(model, self._settings.trainer, self.workload.peer_rows), meter)
        else:
            raise AssertionError(peer)

    def _enter(self, name: str, side: TrainingSide, meter: MemoryMeter) -> None:
        """Rounds that do not count, until they are steady, in which kernels are compiled and the optimizer's states made, and
        then a step whose memory is watched."""
        self.sides[name] = side
        run, self.warm_ups[name] = warm_up(lambda _: self.run(name, 0), max_seconds=self._settings.warmup_s)
        self.memory[name] = memory_by_kind(
            lambda: side.step(self.workload.batch(0)), meter, side.weight_bytes, side.gradient_bytes
        )
        self._console.print(f"{name} is warm: {run.tokens_per_s:,.0f} tok/s", style="dim")


def measure(settings: TrainerSettings, console: Console) -> Measured:
    machine = measure_machine(torch.device(settings.device), getattr(torch, settings.dtype))
    console.print(machine.how, style="dim")
    _import_everything(settings)
    contest = Contest(settings, console)

    def tell(number: int, row: Mapping[str, TrainRun]) -> None:
        each = ", ".join(f"{name} {run.tokens_per_s:,.0f}" for name, run in row.items())
        console.print(f"round {number + 1}/{settings.pairs}: {each} tok/s", soft_wrap=True)

    def rounds_of(name: str) -> Callable[[int], TrainRun]:
        return lambda number: contest.run(name, number + 1)

    rounds = interleave({name: rounds_of(name) for name in contest.sides}, settings.pairs, settings.seed, tell)
    decoder = contest.network.decoder
    cost, load = roofline.NetworkCost.of(decoder), contest.workload.load
    least = roofline.training_bound(cost, load, machine, settings.trainer.epochs)
    opponents: list[str | None] = [*contest.peers] or [None]
    beside = "transformers" if "transformers" in contest.peers else opponents[0]
    fastest = Bound(least.rate_of(load.sampled_tokens), f"{load.sampled_tokens:,} tokens of a step / seconds, {least.why}")
    results = [
        *(_throughput(rounds, opponent, fastest) for opponent in opponents),
        *([_mfu(rounds, beside, fastest)] if fastest.value else []),
        _phases(rounds, beside, least),
        _memory(contest, roofline.training_memory_bound(contest.sides[OURS].weight_bytes, trained_size_of(decoder))),
    ]
    return Measured(settings, results, contest.versions, contest.warm_ups)


def _import_everything(settings: TrainerSettings) -> None:
    """Code and workspaces that are loaded on the way to a first step would count as that step's memory."""
    kept = settings.model_dump(include={"device", "dtype", "num_threads", "peers"})
    trainer = fit_trainer(TrainerConfig())
    Contest(
        TrainerSettings(model="builtin:tiny", sequences=2, tokens=4, warmup_s=0, trainer=trainer, **kept), Console(quiet=True)
    )


# ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _throughput(rounds: Rounds, peer: str | None, bound: Bound) -> Result:
    figure = None
    if peer is not None:
        ours, theirs = ([row[name].tokens_per_s for row in rounds] for name in (OURS, peer))
        comparison = compare(ours, theirs)
        figure = PeerFigure(peer, statistics.median(theirs), comparison.ratio, comparison)
    samples = [{name: row[name].as_json() for name in (OURS, peer) if name is not None} for row in rounds]
    return Result("throughput", _median(rounds, OURS, "tokens_per_s"), "tok/s", samples, bound, figure)


def _mfu(rounds: Rounds, peer: str | None, fastest: Bound) -> Result:
    """MFU of both sides by the work that has to be done, whatever they did beyond it: the share of the fastest possible."""
    percent = {name: 100 * _median(rounds, name, "tokens_per_s") / fastest.value for name in (OURS, peer) if name is not None}
    figure = PeerFigure(peer, percent[peer], percent[OURS] / percent[peer]) if peer is not None else None
    samples = [{name: 100 * row[name].tokens_per_s / fastest.value for name in percent} for row in rounds]
    return Result("MFU", percent[OURS], "%", samples, Bound(100, f"the machine's peak: {fastest.why}"), figure)


def _phases(rounds: Rounds, peer: str | None, least: Bound) -> Result:
    """Medians over the rounds, per step. On CUDA they are the device's, without what the host does before and after."""
    parts = {name: _phase_medians(rounds, name) for name in (OURS, peer) if name is not None}
    figure = None
    if peer is not None:
        theirs = _median(rounds, peer, "step_s")
        figure = PeerFigure(peer, theirs, theirs / _median(rounds, OURS, "step_s"))
    details = {"parts": parts[OURS]} | ({"peer_parts": parts[peer]} if peer is not None else {})
    samples = [{name: {"step_s": row[name].step_s, **row[name].step_phase_s} for name in parts} for row in rounds]
    return Result("step", _median(rounds, OURS, "step_s"), "s", samples, least, figure, larger_is_better=False, details=details)


def _phase_medians(rounds: Rounds, name: str) -> dict[str, float]:
    runs = [row[name] for row in rounds]
    return {
        phase: statistics.median(run.step_phase_s.get(phase, 0.0) for run in runs)
        for phase in dict.fromkeys(phase for run in runs for phase in run.phase_s)
    }


def _memory(contest: Contest, bound: Bound) -> Result:
    ours, theirs = contest.memory[OURS], contest.memory.get("transformers")
    details = {"parts": ours.as_json()} | ({"peer_parts": theirs.as_json()} if theirs else {})
    figure = PeerFigure("transformers", theirs.peak, theirs.peak / ours.peak) if theirs and ours.peak else None
    samples = [{name: memory.as_json() for name, memory in contest.memory.items()}]
    return Result("peak memory", ours.peak, "bytes", samples, bound, figure, larger_is_better=False, details=details)


def _median(rounds: Rounds, name: str, what: str) -> float:
    return statistics.median(getattr(row[name], what) for row in rounds)
