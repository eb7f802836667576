"""The least time that generation can take on a machine: every weight, key and value that a step needs has to be read, and
every product computed.

    step    = max(bytes / bandwidth, operations / peak)
    bytes   = weights + (prompts under way · prompt tokens + sequences · new tokens so far) · bytes per token
    operations = sequences · (2 · parameters + 4 · layers · heads · head size · context)

The n completions of a prompt may read its keys and values once. Sampling, activations and everything else count as free.
"""

from __future__ import annotations

from dataclasses import dataclass

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
