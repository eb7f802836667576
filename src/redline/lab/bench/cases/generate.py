"""`redline bench generate`: tokens per second, latency and memory of generation, beside transformers and vLLM.

Every side generates completions of the same lengths and prompts at temperature 1 and returns the logprob of each sampled
token. In every round all sides run once, in an order drawn by lot. Our engine, or the one that `engine.kind` names, runs twice:
as a rollout stage uses it, and streamed, which is what latency between tokens is taken from.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from rich.console import Console

from redline.config.sections.engine import EngineConfig
from redline.engine import NativeEngine
from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.cache.sizing import block_size_for
from redline.errors import ConfigError
from redline.lab.bench.settings import GenerateSettings, fit_engine
from redline.lab.evidence.document import Bound, Measured, PeerFigure, Result
from redline.lab.evidence.statistics import compare, percentiles
from redline.lab.material.networks import Network, make_network
from redline.lab.material.prompts import question_prompts, random_prompts
from redline.lab.material.train_batches import TAIL, long_tailed_lengths
from redline.lab.measure import roofline
from redline.lab.measure.machine import Machine, MemoryMeter, measure_machine
from redline.lab.measure.pairs import interleave
from redline.lab.peers.contest import OURS, STREAMED, Contest
from redline.lab.peers.generation_sides import Batch, EngineSide, Run, Side, StreamSide
from redline.launch.engines import make_engine
from redline.launch.kinds import OtherEngine, sample_from

Rounds = Sequence[Mapping[str, Run]]


class Workload:
    """The prompts of every round."""

    def __init__(self, settings: GenerateSettings, network: Network) -> None:
        self._settings = settings
        self._vocab_size = network.decoder.spec.vocab_size
        self._questions = None if settings.prompt_tokens else question_prompts(settings.prompts, network.tokenizer)
        self.lengths_P = completion_lengths(settings)

    def batch(self, number: int) -> Batch:
        """Round 0 is the warm-up."""
        s = self._settings
        prompts = self._questions
        if prompts is None:
            assert s.prompt_tokens is not None
            prompts = random_prompts(s.prompts, s.prompt_tokens, self._vocab_size, (s.seed, number))
        return Batch(prompts, s.n, s.new_tokens, s.seed + number, self.lengths_P.tolist())

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(prompt) for prompt in self.batch(0).prompts]

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(length + int(new) for length, new in zip(self.prompt_lengths, self.lengths_P, strict=True))

    def load(self, max_num_seqs: int) -> roofline.Load:
        s = self._settings
        lengths_S = np.repeat(self.lengths_P, s.n)
        prompt_tokens, guesses = float(np.mean(self.prompt_lengths)), s.engine.speculation != "off"
        return roofline.Load(s.prompts, prompt_tokens, s.n, s.new_tokens, max_num_seqs, lengths_S, guesses)


def completion_lengths(settings: GenerateSettings) -> np.ndarray:
    """int64[prompts]: the tokens of each prompt's completions, the same for the same settings."""
    s = settings
    if s.lengths == "equal":
        return np.full(s.prompts, s.new_tokens)
    if s.lengths == "long-tailed":
        return long_tailed_lengths(s.prompts, s.prompts * s.new_tokens, 1, s.longest or TAIL * s.new_tokens, s.seed)
    raise AssertionError(s.lengths)


def measure(settings: GenerateSettings, console: Console) -> Measured:
    if settings.replay is not None:
        from redline.lab.bench.cases import generate_replayed

        return generate_replayed.measure(settings, completion_lengths(settings), console)
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    machine = measure_machine(device, dtype)
    console.print(machine.how, style="dim")
    _import_everything()
    with ExitStack() as stack:
        meter = MemoryMeter(device)
        network = make_network(settings.model, device, dtype, settings.seed)
        workload = Workload(settings, network)
        fitted = fit_engine(settings.engine, settings.prompts * settings.n, workload.longest)
        engine = _make_engine(network, fitted)
        if fitted.kind != "native":
            console.print(f"engine.kind = {fitted.kind}: it samples in the place of redline's engine")
        contest = Contest(settings, workload, console)
        contest.enter(OURS, EngineSide(engine, device), meter)
        contest.enter(STREAMED, StreamSide(engine))
        for peer in settings.peers or ():
            contest.enter_peer(peer, network, fitted, stack)

        def tell(number: int, row: Mapping[str, Run]) -> None:
            each = ", ".join(f"{name} {run.tokens_per_s:,.0f}" for name, run in row.items())
            console.print(f"round {number + 1}/{settings.pairs}: {each} tok/s", soft_wrap=True)

        runs = {name: _rounds_of(side, workload) for name, side in contest.sides.items()}
        rounds = interleave(runs, settings.pairs, settings.seed, tell)
    cost = roofline.NetworkCost.of(network.decoder).quantized(fitted.quantization, dtype)
    results = _results(rounds, contest, network, workload.load(fitted.max_num_seqs), machine, cost)
    if isinstance(engine, NativeEngine):  # others keep to themselves how large theirs is
        results.append(_kv_cache(engine, fitted, workload.load(fitted.max_num_seqs)))
    return Measured(settings.model_copy(update={"engine": fitted}), results, contest.versions, contest.warm_ups)


def _make_engine(network: Network, config: EngineConfig) -> NativeEngine | OtherEngine:
    """The engine under test: ours, or the one that `engine.kind` names."""
    if config.kind == "native":
        return make_engine(network.decoder, config)
    if network.folder is None:
        raise ConfigError(f"engine.kind = {config.kind}: it reads a model's folder, and a shape has none", "give model=FOLDER")
    return sample_from(network.decoder, network.folder, config)


def _import_everything() -> None:
    """Code that is loaded on the way to a first model would count as that model's memory."""
    make_network("builtin:tiny", torch.device("cpu"), torch.float32, seed=0).as_transformers()


def _rounds_of(side: Side, workload: Workload) -> Callable[[int], Run]:
    return lambda number: side.run(workload.batch(number + 1))


# ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _results(
    rounds: Rounds,
    contest: Contest,
    network: Network,
    load: roofline.Load,
    machine: Machine,
    cost: roofline.NetworkCost,
) -> list[Result]:
    bound = roofline.throughput_bound(cost, load, machine)
    opponents: list[str | None] = [*contest.peers] or [None]
    peer = next((name for name in contest.peers if rounds[0][name].inter_token_s.size), None)
    first, gap = roofline.first_token_bound(cost, load, machine), roofline.inter_token_bound(cost, load, machine)
    weights = sum(p.numel() * p.element_size() for p in network.decoder.parameters())
    return [
        *(_throughput(rounds, opponent, bound) for opponent in opponents),
        _streamed(rounds, bound),
        _latency("time to first token", "first_token_s", rounds, OURS, peer, first),
        _latency("time between tokens, streamed", "inter_token_s", rounds, STREAMED, peer, gap),
        _memory(contest, roofline.memory_bound(cost, load, weights)),
    ]


def _throughput(rounds: Rounds, peer: str | None, bound: Bound) -> Result:
    ours = [row[OURS].tokens_per_s for row in rounds]
    figure = None
    if peer is not None:
        theirs = [row[peer].tokens_per_s for row in rounds]
        comparison = compare(ours, theirs)
        figure = PeerFigure(peer, statistics.median(theirs), comparison.ratio, comparison)
    samples = [{name: row[name].as_json() for name in (OURS, peer) if name is not None} for row in rounds]
    return Result("throughput", statistics.median(ours), "tok/s", samples, bound, figure)


def _streamed(rounds: Rounds, bound: Bound) -> Result:
    """Beside it stands which share it is of what the same engine does where only wholes are wanted, from the same rounds."""
    shares = [row[STREAMED].tokens_per_s / row[OURS].tokens_per_s for row in rounds]
    samples = [{name: row[name].as_json() for name in (STREAMED, OURS)} for row in rounds]
    value, details = statistics.median(row[STREAMED].tokens_per_s for row in rounds), {"of_wholes": statistics.median(shares)}
    return Result("throughput, streamed", value, "tok/s", samples, bound, details=details)


def _latency(title: str, what: str, rounds: Rounds, side: str, peer: str | None, bound: Bound) -> Result:
    """The value is p50 over all tokens of all rounds; a sample is one round's percentiles."""
    names = [name for name in (side, peer) if name is not None]
    samples = [{name: dict(percentiles(getattr(row[name], what).tolist())) for name in names} for row in rounds]
    pooled = {name: percentiles(np.concatenate([getattr(row[name], what) for row in rounds]).tolist()) for name in names}
    figure, details = None, {"percentiles": dict(pooled[side])}
    if peer is not None:
        comparison = compare([sample[peer]["p50"] for sample in samples], [sample[side]["p50"] for sample in samples])
        figure = PeerFigure(peer, pooled[peer]["p50"], comparison.ratio, comparison)
        details["peer_percentiles"] = dict(pooled[peer])
    return Result(title, pooled[side]["p50"], "s", samples, bound, figure, larger_is_better=False, details=details)


def _memory(contest: Contest, bound: Bound) -> Result:
    ours, theirs = contest.peak_bytes[OURS], contest.peak_bytes.get("transformers")
    figure = PeerFigure("transformers", theirs, theirs / ours) if theirs and ours else None
    return Result("peak memory", ours, "bytes", [dict(contest.peak_bytes)], bound, figure, larger_is_better=False)


def _kv_cache(engine: NativeEngine, config: EngineConfig, load: roofline.Load) -> Result:
    """All the blocks that sequences can hold, whether they do or not."""
    weight = engine.decoder.output_weight
    per_block = KVCache.bytes_per_block(engine.decoder.spec, block_size_for(config, weight.device), weight.dtype)
    size = engine.stats.kv_blocks_total * per_block
    bound = roofline.kv_bound(roofline.NetworkCost.of(engine.decoder), load)
    return Result("KV cache", size, "bytes", [size], bound, larger_is_better=False)
