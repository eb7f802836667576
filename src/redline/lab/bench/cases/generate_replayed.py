"""`redline bench generate replay=…`: what guessed tokens bring on texts that a run has sampled, and cost on others.

Two engines of the same network draw given texts, one with `engine.speculation` off, one with auto, in turn. In every round
are new groups: their siblings run together, and the earlier visits at their tasks are remembered, as in a run. Every completion
must be the text that was given, token by token.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from rich.console import Console

from redline.engine import NativeEngine
from redline.errors import ConfigError, EngineError
from redline.lab.bench.settings import GenerateSettings, fit_engine
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare
from redline.lab.material.attempts import Attempts, read_attempts
from redline.lab.material.networks import make_network
from redline.lab.material.prompts import random_prompts
from redline.lab.measure import roofline
from redline.lab.measure.machine import measure_machine, synchronize
from redline.launch.engines import make_engine
from redline.types import GenerateRequest, SamplingParams

PROMPT_TOKENS = 64
"""Where the settings ask for questions: a replay needs none."""
WARM_UPS = 2
MODES = ("off", "auto")


@dataclass(slots=True, frozen=True)
class Round:
    """What one mode did in a round."""

    seconds: float
    num_tokens: int
    drafted: int
    accepted: int
    saved_s: float
    """As the engine says."""

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds

    def as_json(self) -> dict[str, float]:
        return {
            "seconds": self.seconds,
            "tokens_per_s": self.tokens_per_s,
            "drafted_tokens": self.drafted,
            "accepted_tokens": self.accepted,
            "saved_s": self.saved_s,
        }


@dataclass(slots=True, frozen=True)
class Replayed:
    """The work of a round."""

    requests: Sequence[GenerateRequest]
    texts: Sequence[np.ndarray]
    earlier: Sequence[tuple[str, np.ndarray]]
    """Task and tokens, prompt included, of earlier attempts."""


class Texts:
    """The rounds."""

    def __init__(self, settings: GenerateSettings, lengths_P: np.ndarray, vocab_size: int, attempts: Attempts | None) -> None:
        """Without attempts all texts are random."""
        self._settings, self._lengths_P, self._vocab_size, self._attempts = settings, lengths_P, vocab_size, attempts

    def round(self, number: int) -> Replayed:
        s, size = self._settings, self._attempts.group_size if self._attempts else 8
        num_groups = -(-s.prompts // size)
        prompts = random_prompts(num_groups, s.prompt_tokens or PROMPT_TOKENS, self._vocab_size, (s.seed, number))
        requests, texts, earlier = [], [], []
        for row, length in enumerate(self._lengths_P.tolist()):
            group, sibling = row % num_groups, row // num_groups
            task = f"{number}/{group}"
            sampling = SamplingParams(max_tokens=length, seed=(number * s.prompts + row) % 2**31)
            requests.append(GenerateRequest(prompts[group], sampling, task=task))
            texts.append(self._text(number * num_groups + group, 1, sibling, length))
            earlier.append(
                (task, np.concatenate([prompts[group], self._text(number * num_groups + group, 0, sibling, length)]))
            )
        return Replayed(requests, texts, earlier)

    def _text(self, group: int, visit: int, sibling: int, length: int) -> np.ndarray:
        if self._attempts is None:
            drawn = np.random.default_rng((group, visit, sibling))
            return drawn.integers(0, self._vocab_size, length).astype(np.int32)
        return self._attempts.text(group, self._attempts.num_visits - 2 + visit, sibling, length)


class Player:
    """An engine of one mode that draws what it is given."""

    def __init__(self, engine: NativeEngine, device: torch.device, longest: int) -> None:
        self._engine, self._device = engine, device
        self._given: dict[int, np.ndarray] = {}
        engine.replay(self._given, longest)

    def play(self, work: Replayed) -> Round:
        engine = self._engine
        self._given.clear()
        self._given |= {request.sampling.seed: text for request, text in zip(work.requests, work.texts, strict=True)}
        for task, token_ids in work.earlier:
            engine.remember(task, token_ids)
        engine.reset_prefix_cache()
        before = engine.stats
        synchronize(self._device)
        began = time.perf_counter()
        groups = engine.generate(work.requests)
        synchronize(self._device)
        seconds, after = time.perf_counter() - began, engine.stats
        for (completion,), text in zip(groups, work.texts, strict=True):
            if not np.array_equal(completion.token_ids, text):
                raise EngineError("a completion is not the text that was given", "this is a fault of redline: please report it")
        return Round(
            seconds,
            sum(map(len, work.texts)),
            after.drafted_tokens - before.drafted_tokens,
            after.accepted_tokens - before.accepted_tokens,
            after.speculation_saved_s - before.speculation_saved_s,
        )


def measure(settings: GenerateSettings, lengths_P: np.ndarray, console: Console) -> Measured:
    assert settings.replay is not None
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    attempts, machine = read_attempts(settings.replay), measure_machine(device, dtype)
    console.print(machine.how, style="dim")
    network = make_network(settings.model, device, dtype, settings.seed)
    if attempts.vocab_size > network.decoder.spec.vocab_size:
        raise ConfigError(
            f"{settings.replay} has tokens of a vocabulary of {attempts.vocab_size:,} or more, {settings.model} of"
            f" {network.decoder.spec.vocab_size:,}",
            "give the run's model, or one of a larger vocabulary: model=random:tiny-64k",
        )
    prompt_tokens = settings.prompt_tokens or PROMPT_TOKENS
    fitted = fit_engine(settings.engine, settings.prompts, prompt_tokens + int(lengths_P.max()))
    if device.type == "cuda" and "kv_cache_memory_bytes" not in fitted.model_fields_set:  # two engines share the device
        fitted = fitted.model_copy(update={"gpu_memory_utilization": fitted.gpu_memory_utilization / 2})
    players = {
        mode: Player(
            make_engine(network.decoder, fitted.model_copy(update={"speculation": mode})), device, int(lengths_P.max())
        )
        for mode in MODES
    }
    load = roofline.Load(settings.prompts, float(prompt_tokens), 1, settings.new_tokens, fitted.max_num_seqs, lengths_P)
    cost = roofline.NetworkCost.of(network.decoder).quantized(fitted.quantization, dtype)
    results = []
    for name, source in (("recorded texts", attempts), ("texts that do not repeat", None)):
        texts = Texts(settings, lengths_P, network.decoder.spec.vocab_size, source)
        # A text that repeats may be guessed whole; of random tokens nobody guesses the next one.
        bound = roofline.throughput_bound(cost, replace(load, guesses=source is not None), machine)
        results.append(_result(name, _rounds(players, texts, settings, name, console), bound))
    return Measured(settings.model_copy(update={"engine": fitted}), results)


def _rounds(
    players: dict[str, Player], texts: Texts, settings: GenerateSettings, name: str, console: Console
) -> list[dict[str, Round]]:
    """The modes in turn, in the other order every time."""
    rounds = []
    for number in range(WARM_UPS + settings.pairs):
        work = texts.round(number)
        row = {mode: players[mode].play(work) for mode in (MODES if number % 2 else MODES[::-1])}
        off, auto = row["off"], row["auto"]
        console.print(
            f"{name}, {f'round {number + 1 - WARM_UPS}' if number >= WARM_UPS else 'warm-up'}: off {off.tokens_per_s:,.0f},"
            f" auto {auto.tokens_per_s:,.0f} tok/s ({auto.tokens_per_s / off.tokens_per_s:.3f}×), {auto.accepted:,} of"
            f" {auto.drafted:,} guesses right, {auto.saved_s:.2f} s saved as it says, {auto.num_tokens:,} tokens as given",
            soft_wrap=True,
        )
        if number >= WARM_UPS:
            rounds.append(row)
    return rounds


def _result(name: str, rounds: list[dict[str, Round]], bound: Bound) -> Result:
    auto, off = ([row[mode].tokens_per_s for row in rounds] for mode in ("auto", "off"))
    comparison = compare(auto, off)
    figure = PeerFigure("speculation off", statistics.median(off), comparison.ratio, comparison)
    drafted, accepted = (sum(getattr(row["auto"], part) for row in rounds) for part in ("drafted", "accepted"))
    details = {"drafted_tokens": drafted, "accepted_tokens": accepted, "acceptance": accepted / max(1, drafted)}
    samples = [{mode: row[mode].as_json() for mode in MODES} for row in rounds]
    return Result(f"throughput, {name}", statistics.median(auto), "tok/s", samples, bound, figure, details=details)
