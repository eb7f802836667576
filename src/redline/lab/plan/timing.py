"""Seconds of every phase of a step: what its kernels have to move and compute, at the rates that our code reaches.

    decode step   max(weights / bandwidth, products / peak) + keys and values / bandwidth + logits / bandwidth
    prompts       products / peak
    training      products / peak + activations, some times over / bandwidth
    optimizer     gradients, masters, moments and weights / bandwidth, or over the bus where they are offloaded

A kernel is bound by memory or by products, and kernels follow one another: so it is the sum of their bounds, not the larger of
two sums (`lab/measure/roofline.py` has that, which nothing can beat). Products and memory are divided by the share of the
device's rate that our code reaches, and every layer of every pass adds an overhead: the kernels that are too small to count,
and their launches. `calibration.py` finds the three.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from redline.lab.measure.roofline import NetworkCost, decode_steps
from redline.lab.plan.held import layer, policy_bytes
from redline.lab.plan.memory import MemoryEstimate, trained_share
from redline.lab.plan.rates import Cost, Efficiency, Rates
from redline.lab.plan.setup import Setup
from redline.lab.plan.shapes import Model
from redline.lab.plan.sizes import decoding_rows
from redline.lab.plan.stages import time_share
from redline.models.sizes.memory import FLOAT32, expert_share, idle_parameters, inner_columns, knows_experts
from redline.models.spec import DecoderSpec

KEPT_TRAFFIC = 3
"""Times that the elements a layer keeps cross the memory bus outside of products: those of norms and heads four times, written
and read forward and, with their gradients, backward; those of the MLP less than three."""
ADAPTER_TRAFFIC = 5
"""The same for the inputs and outputs of projections with an adapter: read for its first product, read and written by its
second, and as much again for three gradients."""
FOUND_IN_CACHE = 0.5
"""Share of a shared prompt that the second row reads beyond the first. Rows of a group stand side by side."""
QUANTIZED_PASSES = 75
"""Operations of `trainer/optimizer/quantized_states.py` on both moments, on a CPU one after the other: each reads and
writes float32 elements."""
LINK_SHARE = 0.7
"""Share of a link's bandwidth that collectives of megabytes reach."""
COLLECTIVE_LATENCY = 12e-6
"""Seconds of a small sum over the devices of one machine."""


@dataclass(slots=True, frozen=True)
class TimedPhase:
    name: str
    seconds: float
    bound: str


@dataclass(slots=True, frozen=True)
class TimeEstimate:
    phases: tuple[TimedPhase, ...]

    @property
    def step_s(self) -> float:
        return sum(phase.seconds for phase in self.phases)

    @property
    def bottleneck(self) -> TimedPhase:
        return max(self.phases, key=lambda phase: phase.seconds)

    def seconds_of(self, name: str) -> float:
        return sum(phase.seconds for phase in self.phases if phase.name == name)


def network_cost(model: Model, dtype: torch.dtype) -> NetworkCost:
    """What a token costs as our code computes it: attention that has windows reads all keys and values, and hides some."""
    shape = model.shape
    width, idle = shape.num_layers * shape.head_dim, idle_parameters(shape)
    return NetworkCost(
        body_params=model.body_parameters - idle,
        head_params=model.head_parameters,
        bytes_per_param=dtype.itemsize,
        kv_bytes_per_token=2 * width * shape.num_kv_heads * dtype.itemsize,
        attention_flops=4 * width * shape.num_heads,
        idle_params=idle,
        expert_share=expert_share(shape),
        is_known=knows_experts(shape),
    )


# ── generation ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def prompt_cost(cost: NetworkCost, layers: int, prompts: float, tokens: float, batched: int, rates: Rates) -> Cost:
    """Each prompt once, `batched` tokens at a time."""
    flops = prompts * (cost.product_flops(tokens, 1) + cost.attention_flops * tokens * tokens / 2)
    passes = max(1, math.ceil(prompts * tokens / batched))
    weights = passes * cost.weight_bytes(prompts * tokens / passes)
    return Cost(products=flops / rates.flops, memory=weights / rates.bandwidth, layers=passes * layers)


def read_context(prompt_tokens: float, new_tokens: float, n: int) -> float:
    """Tokens whose keys and values a row reads from memory on average: its own, and its part of the prompt it shares."""
    return prompt_tokens * (1 / n + (1 - 1 / n) * FOUND_IN_CACHE) + new_tokens / 2


def decode_cost(cost: NetworkCost, layers: int, vocabulary: int, batch: float, context: float, rates: Rates) -> Cost:
    """One step of so many sequences, each of which reads the keys and values of so many tokens."""
    products = batch * cost.product_flops(1, 1) / rates.flops
    weights = cost.weight_bytes(batch) / rates.bandwidth
    logits = 2 * batch * vocabulary * cost.bytes_per_param
    others = (batch * context * cost.kv_bytes_per_token + logits) / rates.bandwidth
    bound = Cost(products=products) if products > weights else Cost(memory=weights)
    return bound + Cost(memory=others, layers=layers)


def generation_cost(setup: Setup, rows: int, rates: Rates) -> Cost:
    """All attempts of a step, on the engine that has the most of them and decodes so many `rows` at once."""
    tp = setup.tensor_parallel_size
    work = setup.work.share(setup.engines)
    engine, shape = setup.config.engine, setup.model.shape
    cost = network_cost(setup.model, setup.dtype).quantized(engine.quantization, setup.dtype)
    steps, batch = decode_steps(work.sequences, work.new_tokens, work.max_new_tokens, rows)
    context = read_context(work.prompt_tokens, work.mean_new_tokens, work.group_size)
    prompts = prompt_cost(cost, shape.num_layers, work.groups, work.prompt_tokens, engine.max_num_batched_tokens, rates)
    step = decode_cost(cost, shape.num_layers, shape.vocab_size, batch, context, rates)
    return _divided(prompts, tp, setup, rates, work.groups * work.prompt_tokens) + _divided(
        step, tp, setup, rates, batch
    ).times(steps)


def _divided(cost: Cost, parts: int, setup: Setup, rates: Rates, rows: float) -> Cost:
    """Over the devices of a tensor-parallel engine: two sums of the hidden states in every layer."""
    if parts == 1:
        return cost
    moved = 2 * (parts - 1) / parts * rows * setup.model.shape.hidden_size * setup.dtype.itemsize
    each = COLLECTIVE_LATENCY + moved / (LINK_SHARE * setup.device.link_bandwidth)
    sums = 2 * setup.model.shape.num_layers * each
    return Cost(cost.products / parts, cost.memory / parts, cost.link + sums, cost.layers)


# ── training ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def pairs_of(setup: Setup, tokens: float) -> float:
    """Pairs of a query and a key that it sees, among `tokens` tokens of whole groups."""
    work, prompt, new = setup.work, setup.work.prompt_tokens, setup.work.mean_new_tokens
    if setup.shares_prompts:
        group_tokens, once = prompt + work.group_size * new, 1
    else:
        group_tokens, once = work.group_size * (prompt + new), work.group_size
    pairs = once * prompt * prompt / 2 + work.group_size * new * (prompt + new / 2)
    return tokens / group_tokens * pairs


def training_flops(setup: Setup, tokens: float, pairs: float, predicted: float) -> float:
    """Forward, backward, and what is computed again. Frozen weights have no gradient of their own."""
    cost = network_cost(setup.model, setup.dtype)
    forward = 2 * cost.body_params * tokens + cost.attention_flops * pairs
    head = 2 * cost.head_params * predicted
    passes = 2.0 if setup.adapter else 3.0
    again = {"none": 0.0, "light": 0.0, "selective": _mlp_share(setup.model), "full": 1.0}[setup.checkpointing]
    adapters = 6.0 * setup.adapter * tokens
    # Attention has two gradients of its own whatever is frozen, and recomputes its scores.
    attention = (3.5 - passes) * cost.attention_flops * pairs
    return passes * (forward + head) + again * forward + adapters + attention


def _mlp_share(model: Model) -> float:
    """The share of the MLP, or of the experts that a token goes to, in a layer's products."""
    shape = model.shape
    inner = inner_columns(shape) if isinstance(shape, DecoderSpec) else 0
    return 3 * shape.hidden_size * inner / max(1, model.body_parameters - idle_parameters(shape))


def training_cost(setup: Setup, tokens: float, micro_batches: float, rates: Rates, lengths_pairs: float | None = None) -> Cost:
    """Forward and backward passes of a step on one device."""
    shape, size = setup.model.shape, setup.dtype.itemsize
    pairs = pairs_of(setup, tokens) if lengths_pairs is None else lengths_pairs
    predicted = tokens * trained_share(setup)
    flops = training_flops(setup, tokens, pairs, predicted)
    each = layer(setup, round(tokens / micro_batches))
    made_again = each.activation if setup.checkpointing == "light" else 0
    traffic = tokens * shape.num_layers * (KEPT_TRAFFIC * each.kept + made_again)
    if setup.adapter:
        traffic += ADAPTER_TRAFFIC * tokens * size * setup.adapter / setup.config.trainer.lora.rank
    logits = 4 * predicted * shape.vocab_size * size
    weights = micro_batches * (2 * size * setup.model.parameters + 2 * FLOAT32 * setup.trained)
    passes = 2 + {"none": 0, "light": 0, "selective": 0.5, "full": 1}[setup.checkpointing]
    link = _gather_seconds(setup, micro_batches) + _message_seconds(setup, 2 * tokens)
    share = time_share(setup.stages, micro_batches)
    return Cost(
        products=share * flops / rates.flops,
        memory=share * (traffic + logits + weights) / rates.bandwidth,
        link=link,
        layers=share * passes * micro_batches * shape.num_layers,
    )


def _message_seconds(setup: Setup, tokens: float) -> float:
    """Seconds in which stages send or get the residual stream of so many tokens, or its gradient: they wait for it."""
    if setup.stages == 1:
        return 0.0
    moved = tokens * setup.model.shape.hidden_size * setup.dtype.itemsize
    return moved / (LINK_SHARE * setup.device.link_bandwidth)


def _gather_seconds(setup: Setup, micro_batches: float) -> float:
    """Seconds of moving weights and gradients between devices that products do not hide: half is assumed to be hidden."""
    if setup.data_ranks == 1:
        return 0.0
    sharding, size = setup.sharding, setup.dtype.itemsize
    part = (setup.data_ranks - 1) / setup.data_ranks
    gradients = FLOAT32 * setup.own_trained * part * (2 if sharding == "none" else 1)
    times = {"none": 0.0, "grad_op": 1.0, "full": 2 * micro_batches}[sharding]
    weights = size * setup.model.parameters * part * times
    return 0.5 * (gradients + weights) / (LINK_SHARE * setup.device.link_bandwidth)


def pass_cost(setup: Setup, tokens: float, micro_batches: float, rates: Rates) -> Cost:
    """A pass without gradients over a step's tokens."""
    cost, shape = network_cost(setup.model, setup.dtype), setup.model.shape
    predicted = tokens * trained_share(setup)
    flops = 2 * cost.body_params * tokens + 2 * cost.head_params * predicted + cost.attention_flops * pairs_of(setup, tokens)
    traffic = tokens * shape.num_layers * layer(setup, 0).forward + 2 * predicted * shape.vocab_size * setup.dtype.itemsize
    share, link = time_share(setup.stages, micro_batches), _message_seconds(setup, tokens)
    return Cost(share * flops / rates.flops, share * traffic / rates.bandwidth, link, share * micro_batches * shape.num_layers)


def optimizer_cost(setup: Setup, rates: Rates) -> Cost:
    """The gradient is read twice, for its norm and for the update; masters and moments are read and written, and weights are
    written. Weights that are their own masters are read as well. A CPU's update, which is torch's, also writes the clipped
    gradient, and reads the masters once more to copy them to the weights."""
    own, trainer = policy_bytes(setup.changed(trainer={"offload_optimizer": False})), setup.config.trainer
    part = setup.own_trained / setup.shards
    state = own.masters + own.moments
    weights = setup.dtype.itemsize * part
    moved = 2 * own.gradients + 2 * state + weights + (0 if own.masters else weights)
    if not setup.device.is_gpu:
        moved += own.gradients + own.masters
    if trainer.optimizer_states == "int8" and not setup.device.is_gpu:  # there one kernel does it
        moved += QUANTIZED_PASSES * 2 * FLOAT32 * part
    memory = moved / rates.bandwidth
    if trainer.offload_optimizer:  # both ways at once, while the stretch before is computed
        return Cost(memory=memory, link=max(0.0, state / rates.host_bandwidth - memory))
    return Cost(memory=memory)


# ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def estimate_time(setup: Setup, memory: MemoryEstimate, rates: Rates) -> TimeEstimate:
    config, sizes = setup.config, memory.sizes
    tokens = setup.mean_tokens_per_rank
    phases = [_timed("generation", generation_cost(setup, decoding_rows(setup, sizes), rates), rates.generation)]
    epochs, updates = config.trainer.epochs, config.trainer.updates_per_step
    passes = int(config.needs_reference) + int(config.needs_anchor) + int(config.needs_critic)
    if passes:
        each = pass_cost(setup, tokens, max(setup.stages, math.ceil(tokens / sizes.forward_tokens)), rates)
        phases.append(_timed("logprob passes", each.times(passes), rates.training))
    mini_batches = config.trainer.mini_batches
    micro_batches = mini_batches * max(setup.stages, math.ceil(tokens / mini_batches / sizes.training_tokens))
    step = training_cost(setup, tokens, micro_batches, rates).times(epochs)
    optimizer = optimizer_cost(setup, rates).times(updates)
    phases.append(_timed("forward/backward", step, rates.training))
    phases.append(_timed("optimizer step", optimizer, rates.optimizer))
    if config.needs_critic:
        phases.append(_timed("critic step", step, rates.training))
    phases.append(_timed("weight sync", _sync_cost(setup), rates.training))
    return TimeEstimate(tuple(phases))


def _timed(name: str, cost: Cost, efficiency: Efficiency) -> TimedPhase:
    return TimedPhase(name, cost.seconds(efficiency), cost.bound(efficiency))


def _sync_cost(setup: Setup) -> Cost:
    """Weights to engines that do not share them."""
    if setup.engine_shares_weights:
        return Cost()
    moved = setup.dtype.itemsize * setup.model.parameters / setup.tensor_parallel_size
    return Cost(link=moved / (LINK_SHARE * setup.device.link_bandwidth))
