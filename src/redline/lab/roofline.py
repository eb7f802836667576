"""The least time that generation and training can take on a machine.

Generation: every weight, key and value that a step needs has to be read, and every product computed.

    step    = max(bytes / bandwidth, operations / peak)
    bytes   = weights + (prompts under way · prompt tokens + sequences · new tokens so far) · bytes per token
    operations = sequences · (2 · parameters + 4 · layers · heads · head size · context)

The n completions of a prompt may read its keys and values once. Sampling, activations and everything else count as free.

Training: every product has to be computed forward, and twice more backward, for its input and for its weight.

    operations = 6 · body parameters · tokens + 6 · head parameters · trained tokens
               + 12 · layers · heads · head size · Σ pairs of a query and a key that it sees

Tokens are those of the sequences themselves, without padding, and the prompt of a group counts once: its attempts can share it.
What is computed a second time to save memory does not count, so that MFU (these operations / seconds / peak) is about
progress, not about being busy. The optimizer moves memory, which can overlap with products, and counts as free.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redline.lab.document import Bound
from redline.lab.machine import Machine
from redline.models.decoder import Decoder
from redline.models.hf import AnyDecoder


@dataclass(slots=True, frozen=True)
class NetworkCost:
    """What one token costs in a network."""

    body_params: int
    """Of the layers: products for every token."""
    head_params: int
    """Of the language-model head: products only where a token is sampled."""
    bytes_per_param: int
    kv_bytes_per_token: int
    """2 · layers · kv heads · head size · bytes per value."""
    attention_flops: int
    """Per query and key: 4 · layers · heads · head size."""

    @classmethod
    def of(cls, decoder: AnyDecoder) -> NetworkCost:
        shape, head = decoder.spec, decoder.output_weight
        embed = decoder.embed if isinstance(decoder, Decoder) else decoder.network.get_input_embeddings().weight
        total = sum(parameter.numel() for parameter in decoder.parameters())
        looked_up = 0 if embed is head else embed.numel()
        width = shape.num_layers * shape.head_dim
        return cls(
            body_params=total - head.numel() - looked_up,
            head_params=head.numel(),
            bytes_per_param=head.element_size(),
            kv_bytes_per_token=2 * width * shape.num_kv_heads * head.element_size(),
            attention_flops=4 * width * shape.num_heads,
        )

    @property
    def weight_bytes(self) -> int:
        """Read by every step: the embedding is looked up, not read, unless it is the head as well."""
        return (self.body_params + self.head_params) * self.bytes_per_param


@dataclass(slots=True, frozen=True)
class Load:
    """What was asked of the engine."""

    prompts: int
    prompt_tokens: float
    """Of a prompt, on average."""
    n: int
    new_tokens: int
    max_num_seqs: int

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    @property
    def batch(self) -> int:
        """Sequences that can decode at once."""
        return min(self.sequences, self.max_num_seqs)

    @property
    def tokens(self) -> int:
        return self.sequences * self.new_tokens

    def cached_tokens(self, new_tokens: float) -> float:
        """Tokens whose keys and values a full batch holds once each has `new_tokens`; completions share their prompt."""
        return self.batch / self.n * self.prompt_tokens + self.batch * new_tokens


def prefill_seconds(cost: NetworkCost, load: Load, machine: Machine) -> float:
    """All prompts. The head is needed for the last token of each only, and a token sees half of the prompt on average."""
    p = load.prompt_tokens
    flops = load.prompts * (2 * cost.body_params * p + 2 * cost.head_params + cost.attention_flops * p * p / 2)
    return max(flops / machine.flops, cost.weight_bytes / machine.bandwidth)


def step_seconds(cost: NetworkCost, load: Load, machine: Machine) -> float:
    """One decode step of a full batch at the mean context: the prompt and half of the new tokens."""
    moved = cost.weight_bytes + load.cached_tokens(load.new_tokens / 2) * cost.kv_bytes_per_token
    context = load.prompt_tokens + load.new_tokens / 2
    flops = load.batch * (2 * (cost.body_params + cost.head_params) + cost.attention_flops * context)
    return max(moved / machine.bandwidth, flops / machine.flops)


def throughput_bound(cost: NetworkCost, load: Load, machine: Machine) -> Bound:
    """New tokens per second."""
    prefill, step = prefill_seconds(cost, load, machine), step_seconds(cost, load, machine)
    steps = (load.new_tokens - 1) * load.sequences / load.batch
    context = load.prompt_tokens + load.new_tokens / 2
    why = (
        f"tokens / (prefill + steps · max(bytes / bandwidth, operations / peak)): {load.tokens:,} tokens,"
        f" prefill {prefill * 1e3:.3g} ms (2 · parameters + attention operations per prompt token),"
        f" {steps:,.0f} steps of {step * 1e3:.3g} ms at batch {load.batch} and mean context {context:.0f}"
        f" (weights {cost.weight_bytes / 1e9:.3g} GB, keys and values {cost.kv_bytes_per_token:,} bytes per token, read once;"
        f" 2 · parameters + attention operations per token); {machine.how}"
    )
    return Bound(load.tokens / (prefill + steps * step), why)


def first_token_bound(cost: NetworkCost, load: Load, machine: Machine) -> Bound:
    """Seconds to the median request's first token, all submitted at once."""
    half = prefill_seconds(cost, load, machine) / 2
    value = max(half, cost.weight_bytes / machine.bandwidth)
    return Bound(value, f"half of the prompts have to be computed before the median request's first token; {machine.how}")


def inter_token_bound(cost: NetworkCost, load: Load, machine: Machine) -> Bound:
    """Seconds between two tokens of a sequence in a full batch."""
    return Bound(step_seconds(cost, load, machine), f"one decode step of {load.batch} sequences at mean context; {machine.how}")


def memory_bound(cost: NetworkCost, load: Load, all_weights: int) -> Bound:
    """Bytes that must be held when a full batch is at its end."""
    kv = load.cached_tokens(load.new_tokens) * cost.kv_bytes_per_token
    return Bound(all_weights + kv, f"weights {all_weights:,} bytes, keys and values of a full batch at its end {kv:,.0f} bytes")


def kv_bound(cost: NetworkCost, load: Load) -> Bound:
    tokens = load.cached_tokens(load.new_tokens)
    return Bound(tokens * cost.kv_bytes_per_token, f"{tokens:,.0f} tokens held at once, {cost.kv_bytes_per_token:,} bytes each")


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class TrainLoad:
    """What a trainer is given for one step, and what of it has to be computed."""

    sampled_tokens: int
    """The sum of the sequences' lengths."""
    tokens: int
    """The same with each group's prompt once."""
    trained_tokens: int
    """All but the prompts: only these need the head."""
    pairs: int
    """Of a query and a key that it sees, itself included; a prompt's own once for its group."""

    @classmethod
    def of(cls, lengths: np.ndarray, prompt_tokens: int, group_size: int) -> TrainLoad:
        """`lengths` are those of whole sequences, int64[S]; the first `prompt_tokens` of each are common to its group."""
        own = lengths - prompt_tokens
        groups = len(lengths) // group_size
        shared = groups * prompt_tokens * (prompt_tokens + 1) // 2
        return cls(
            sampled_tokens=int(lengths.sum()),
            tokens=int(groups * prompt_tokens + own.sum()),
            trained_tokens=int(own.sum()),
            pairs=int(shared + (own * prompt_tokens + own * (own + 1) // 2).sum()),
        )


def training_flops(cost: NetworkCost, load: TrainLoad) -> int:
    """Of one step: three times a forward pass."""
    products = 2 * cost.body_params * load.tokens + 2 * cost.head_params * load.trained_tokens
    return 3 * (products + cost.attention_flops * load.pairs)


def training_bound(cost: NetworkCost, load: TrainLoad, machine: Machine) -> Bound:
    """Seconds of one step."""
    flops = training_flops(cost, load)
    why = (
        f"operations / peak: {flops / 1e12:,.3g} TFLOP = 6 · {cost.body_params:,} parameters · {load.tokens:,} tokens"
        f" + 6 · {cost.head_params:,} parameters of the head · {load.trained_tokens:,} trained tokens"
        f" + {3 * cost.attention_flops:,} · {load.pairs:,} pairs of query and key;"
        f" no padding, a group's prompt once, nothing computed twice; {machine.how}"
    )
    return Bound(flops / machine.flops, why)


def training_memory_bound(all_weights: int) -> Bound:
    """Bytes that must be held at once: the gradient's norm is known only when all of it is there. Everything else can be
    computed again, or held by the host."""
    return Bound(2 * all_weights, f"weights {all_weights:,} bytes, and their gradient in the same dtype")


def micro_batch_bound(limit_bytes: int, all_weights: int, bytes_per_token: int) -> Bound:
    """Tokens that fit if of each token nothing is kept but the input of every layer."""
    room = max(0, limit_bytes - int(training_memory_bound(all_weights).value))
    return Bound(
        room // bytes_per_token,
        f"({limit_bytes:,} bytes - weights and their gradient, {all_weights:,} bytes each) / {bytes_per_token:,} bytes per"
        " token: the input of every layer; the rest is computed again",
    )
