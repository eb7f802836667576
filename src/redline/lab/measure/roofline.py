"""The least time that generation and training can take on a machine.

Generation: every weight, key and value that a step needs has to be read, and every product computed.

    step    = max(bytes / bandwidth, operations / peak)
    bytes   = weights + (prompts under way · prompt tokens + sequences · new tokens so far) · bytes per token
    operations = sequences · (2 · parameters + 4 · layers · heads · head size · context)

Of a mixture, a step reads the experts that its tokens go to between them, if all are as likely: of 128 with 8 each, one row
reads 8, eight rows 52; of a family whose experts cannot be told nothing is bounded. A layer with a sliding window needs the
keys and values within it alone. The n completions of a prompt may read its keys and values once. Sampling, activations and
everything else count as free. Where completions differ in length there are at least as many steps as the longest needs, each
reads the weights once, and a sequence's keys and values are read as long as it goes on.

Where the engine guesses tokens (`engine.speculation`), a step may bring any number of them, and nothing says how many guesses
could have been right. What is left is that each token's products have to be computed, and the weights read once.

Training: the operations of `models/sizes/flops.py`. The optimizer moves memory, which can overlap with products: it is free.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from redline.lab.evidence.document import Bound
from redline.lab.measure.machine import Machine
from redline.models.sizes.flops import NetworkCost, TrainLoad, training_flops


@dataclass(slots=True, frozen=True)
class Load:
    """What was asked of the engine."""

    prompts: int
    prompt_tokens: float
    """Tokens of a prompt, on average."""
    n: int
    new_tokens: int
    """Tokens of a completion, on average."""
    max_num_seqs: int
    lengths_S: np.ndarray | None = None
    """int64[sequences]: tokens of each completion, where they differ."""
    guesses: bool = False
    """Whether a step may bring a sequence more than one token."""

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    @property
    def batch(self) -> int:
        """Sequences that can decode at once."""
        return min(self.sequences, self.max_num_seqs)

    @property
    def lengths(self) -> np.ndarray:
        """int64[sequences]: tokens of each completion."""
        return np.full(self.sequences, self.new_tokens) if self.lengths_S is None else self.lengths_S

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def steps(self) -> float:
        """Fewest decode steps."""
        return self._decode[0]

    @property
    def rows(self) -> float:
        """Sequences of a step, on average."""
        return self._decode[1]

    @property
    def _decode(self) -> tuple[float, float]:
        return decode_steps(self.sequences, self.tokens, float(self.lengths.max()), self.batch)

    @property
    def new_tokens_so_far(self) -> float:
        """New tokens in the cache of a sequence when it takes a step, on average: over (L - 1) steps they are 1 … L - 1."""
        lengths = self.lengths.astype(np.float64)
        return float((lengths * (lengths - 1)).sum() / 2 / max(1.0, (lengths - 1).sum()))

    @property
    def context(self) -> float:
        """Tokens that a sequence sees when it takes a step, on average."""
        return self.prompt_tokens + self.new_tokens_so_far

    def hidden(self, window: int, before: float) -> float:
        """Tokens that a window hides from a sequence when it takes a step, on average, if `before` tokens precede its own."""
        decoded = self.lengths.astype(np.float64) - 1
        past = np.maximum(0.0, decoded - max(0.0, window - before))  # steps whose first token is hidden
        return float((past * max(0.0, before - window) + past * (past + 1) / 2).sum() / max(1.0, decoded.sum()))

    def most_cached_tokens(self, windows: tuple[tuple[int, float], ...] = ()) -> float:
        """Most tokens whose keys and values a batch holds at once, in a layer on average; completions share their prompt, and
        nobody needs what a window hides from every later token."""
        lengths = np.sort(self.lengths)[::-1].astype(np.float64)
        rows = np.minimum(np.arange(1, len(lengths) + 1), self.batch)
        each = self.prompt_tokens / self.n + lengths
        for window, share in windows:
            within = np.minimum(lengths, window)
            each -= share * (self.prompt_tokens / self.n + lengths)
            each += share * (within + np.minimum(self.prompt_tokens, window - within) / self.n)
        return float((rows * each).max())


def decode_steps(sequences: float, tokens: float, longest: float, rows: float) -> tuple[float, float]:
    """Fewest decode steps of completions with so many tokens in all, and the sequences of a step on average. A row is refilled
    as soon as its sequence ends: all rows are busy to the end, or there are as many steps as the longest completion needs. The
    first token of a completion comes with its prompt."""
    decoded = max(0.0, tokens - sequences)
    steps = max(longest - 1, decoded / rows)
    return steps, decoded / steps if steps else 0.0


NOT_KNOWN = Bound(0.0, "none: it cannot be told how many of its experts a token of this family goes to")


def prefill_seconds(cost: NetworkCost, load: Load, machine: Machine) -> float:
    """All prompts."""
    flops, tokens = _prefill_flops(cost, load), load.prompts * load.prompt_tokens
    return max(flops / machine.flops, cost.weight_bytes(tokens) / machine.bandwidth)


def _prefill_flops(cost: NetworkCost, load: Load) -> float:
    """The head is needed for the last token of each prompt only, and a token sees half of the prompt on average, less what
    windows hide."""
    p = load.prompt_tokens
    pairs = p * p / 2 - sum(share * max(0.0, p - window) ** 2 / 2 for window, share in cost.windows)
    return load.prompts * (cost.product_flops(p, 1) + cost.attention_flops * pairs)


def step_seconds(cost: NetworkCost, load: Load, machine: Machine) -> float:
    """One decode step of as many rows as there are on average, at their mean context."""
    own, seen = _seen(cost, load)
    moved = cost.weight_bytes(load.rows) + load.rows * (own + (seen - own) / load.n) * cost.kv_bytes_per_token
    return max(moved / machine.bandwidth, _decode_flops(cost, load, load.rows) / machine.flops)


def _decode_flops(cost: NetworkCost, load: Load, tokens: float) -> float:
    """Of so many tokens at the mean context, within windows."""
    return tokens * (cost.product_flops(1, 1) + cost.attention_flops * _seen(cost, load)[1])


def generation_seconds(cost: NetworkCost, load: Load, machine: Machine) -> float:
    """All prompts and all decode steps; with guesses one pass over prompts and answers, as if all had been right."""
    if load.guesses:
        flops = _prefill_flops(cost, load) + _decode_flops(cost, load, load.tokens - load.sequences)
        return max(flops / machine.flops, cost.weight_bytes(load.tokens) / machine.bandwidth)
    return prefill_seconds(cost, load, machine) + load.steps * step_seconds(cost, load, machine)


def _seen(cost: NetworkCost, load: Load) -> tuple[float, float]:
    """Tokens that a sequence sees when it takes a step, in a layer on average: of its own, and of all."""
    own = load.new_tokens_so_far - sum(share * load.hidden(window, 0) for window, share in cost.windows)
    seen = load.context - sum(share * load.hidden(window, load.prompt_tokens) for window, share in cost.windows)
    return own, seen


def throughput_bound(cost: NetworkCost, load: Load, machine: Machine) -> Bound:
    """New tokens per second."""
    if not cost.is_known:
        return NOT_KNOWN
    if load.guesses:
        seconds = generation_seconds(cost, load, machine)
        why = (
            f"tokens / max(bytes / bandwidth, operations / peak): {load.tokens:,} tokens in {seconds * 1e3:.4g} ms, weights"
            " read once, however many guesses are right (2 · parameters + attention operations per token of prompts and"
            f" answers{_in_fewer_bits(cost)}); {machine.how}"
        )
        return Bound(load.tokens / seconds, why)
    prefill, step = prefill_seconds(cost, load, machine), step_seconds(cost, load, machine)
    why = (
        f"tokens / (prefill + steps · max(bytes / bandwidth, operations / peak)): {load.tokens:,} tokens,"
        f" prefill {prefill * 1e3:.3g} ms (2 · parameters + attention operations per prompt token),"
        f" {load.steps:,.0f} steps of {step * 1e3:.3g} ms at batch {load.rows:.4g} and mean context {load.context:.0f}"
        f" (weights {cost.weight_bytes(load.rows) / 1e9:.3g} GB, keys and values {cost.kv_bytes_per_token:,} bytes per token,"
        " read once;"
        f" 2 · parameters + attention operations per token{_in_fewer_bits(cost)}{_within(cost)}); {machine.how}"
    )
    return Bound(load.tokens / generation_seconds(cost, load, machine), why)


def _in_fewer_bits(cost: NetworkCost) -> str:
    if cost.product_rate == 1:
        return ""
    known, numbers = math.isfinite(cost.product_rate), "whole numbers" if cost.quantizes_head else "8-bit floating point"
    return f", products by weights {f'{cost.product_rate:g} times as fast' if known else 'not counted'}: in {numbers}"


def _within(cost: NetworkCost) -> str:
    each = (f"{share:.0%} of the layers see the last {window:,} tokens alone" for window, share in cost.windows)
    return "".join(f"; {layers}" for layers in each)


def first_token_bound(cost: NetworkCost, load: Load, machine: Machine) -> Bound:
    """Seconds to the median request's first token, all submitted at once."""
    if not cost.is_known:
        return NOT_KNOWN
    half = prefill_seconds(cost, load, machine) / 2
    value = max(half, cost.weight_bytes(load.prompts * load.prompt_tokens / 2) / machine.bandwidth)
    return Bound(value, f"half of the prompts have to be computed before the median request's first token; {machine.how}")


def inter_token_bound(cost: NetworkCost, load: Load, machine: Machine) -> Bound:
    """Seconds between two tokens of a sequence, in a step of as many rows as there are on average."""
    if not cost.is_known:
        return NOT_KNOWN
    if load.guesses:
        return Bound(0.0, "none: tokens that were guessed come several at once")
    return Bound(
        step_seconds(cost, load, machine), f"one decode step of {load.rows:.4g} sequences at mean context; {machine.how}"
    )


def memory_bound(cost: NetworkCost, load: Load, all_weights: int) -> Bound:
    """Bytes that must be held when a batch is at its largest."""
    kv = load.most_cached_tokens(cost.windows) * cost.kv_bytes_per_token
    return Bound(all_weights + kv, f"weights {all_weights:,} bytes, keys and values of a batch at its largest {kv:,.0f} bytes")


def kv_bound(cost: NetworkCost, load: Load) -> Bound:
    tokens = load.most_cached_tokens(cost.windows)
    why = f"{tokens:,.0f} tokens held at once, {cost.kv_bytes_per_token:,} bytes each{_within(cost)}"
    return Bound(tokens * cost.kv_bytes_per_token, why)


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def training_bound(cost: NetworkCost, load: TrainLoad, machine: Machine, epochs: int = 1) -> Bound:
    """Seconds of one step that goes over its batch so many times."""
    if not cost.is_known:
        return NOT_KNOWN
    flops = epochs * training_flops(cost, load)
    frozen = "" if not cost.frozen_body_params else f" - 2 · {cost.frozen_body_params:,} frozen parameters · {load.tokens:,}"
    frozen += "" if not cost.frozen_head_params else f" - 2 · {cost.frozen_head_params:,} frozen · {load.trained_tokens:,}"
    why = (
        f"operations / peak: {flops / 1e12:,.3g} TFLOP = {'' if epochs == 1 else f'{epochs} epochs of '}"
        f"6 · {cost.body_params:,} parameters · {load.tokens:,} tokens"
        f" + 6 · {cost.head_params:,} parameters of the head · {load.trained_tokens:,} trained tokens{frozen}"
        f" + {3 * cost.attention_flops:,} · {load.seen_pairs(cost.windows):,} pairs of query and key{_within(cost)};"
        f" no padding, a group's prompt once, nothing computed twice; {machine.how}"
    )
    return Bound(flops / machine.flops, why)


def mean_load(loads: Sequence[TrainLoad]) -> TrainLoad:
    """A step that takes as much as these do on average, and has the longest of their sequences."""
    mean = TrainLoad(*(round(sum(getattr(load, field.name) for load in loads) / len(loads)) for field in fields(TrainLoad)))
    return replace(mean, longest=max(load.longest for load in loads))


def training_memory_bound(all_weights: int, trained: int) -> Bound:
    """Bytes that must be held at once: the gradient's norm is known only when all of it is there. Everything else can be
    computed again, or held by the host."""
    why = f"weights {all_weights:,} bytes, and the gradient of {trained:,} bytes of them in the same dtype"
    return Bound(all_weights + trained, why)


def micro_batch_bound(limit_bytes: int, all_weights: int, trained: int, bytes_per_token: int) -> Bound:
    """Tokens that fit if of each token nothing is kept but the input of every layer."""
    room = max(0, limit_bytes - int(training_memory_bound(all_weights, trained).value))
    return Bound(
        room // bytes_per_token,
        f"({limit_bytes:,} bytes - weights, {all_weights:,} - their gradient, {trained:,}) / {bytes_per_token:,} bytes per"
        " token: the input of every layer; the rest is computed again",
    )
