"""Bytes of every phase of a step, term by term, on one device and on its host.

    all the time   weights, masters, moments; reference, critic and reward model where there are; the engine's cache
    generation     + a step's activations, or the sampler's logits
    logprobs       + activations of a pass that keeps nothing, a chunk of logits          where a pass is asked for
    training       + gradients, what the backward pass reads, and the larger of logits and the layer at work
    optimizer      + gradients, a stretch on its way
    weight sync    + what is on its way to engines that do not share the weights
    wake-up        + nothing: the cache comes back to where it was

`models/sizes/memory.py` has what each term is made of, and the trainer plans its micro-batches with it. The numbers of the
CUDA context and of gaps are allowances; torch's allocator counts neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.cache.sizing import CPU_CACHE_BYTES, block_size_for
from redline.errors import NoRoomError
from redline.lab.plan.setup import Setup
from redline.models.sizes.memory import (
    FLOAT32,
    LayerBytes,
    ParameterBytes,
    TokenBytes,
    around_bytes,
    counted_bytes,
    layer_bytes,
)
from redline.trainer.batches.budget import Budgets, MemoryPlan, cpu_budgets, logits_bytes, tokens_kept
from redline.trainer.loss.logprobs import CHUNK_BYTES, KEPT_BYTES, chunk_rows
from redline.trainer.optimizer.offload import STRETCH_ELEMENTS
from redline.trainer.optimizer.quantized_states import bytes_per_moments
from redline.trainer.parallel.place import Division
from redline.trainer.trainer import FORWARD_RATIO

CUDA_CONTEXT = 700 * 2**20
"""Bytes of one process for the driver, cuBLAS and Triton modules. 500 to 800 MiB on Hopper."""
GAPS = 0.03
"""Share of what comes and goes that is lost: the allocator's rounding, and holes that no later block fits."""
HEAP_GAPS = 0.10
"""The same on a CPU, where freed memory stays with the process and small blocks move into it."""
QUANTIZED_SCRATCH = 10
"""float32 copies of a stretch while its 8-bit moments are decoded, updated and encoded."""
NOT_TORCH = ("CUDA context", "gaps", "process")
"""Terms that torch's allocator does not count."""


@dataclass(slots=True, frozen=True)
class Phase:
    """A part of a step, and what fills the memory at its peak."""

    name: str
    terms: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    @property
    def allocated(self) -> int:
        """What torch's allocator has given out."""
        return sum(size for name, size in self.terms.items() if name not in NOT_TORCH)


@dataclass(slots=True, frozen=True)
class Sizes:
    """Tokens and bytes that a run chooses for itself, chosen as it would."""

    kv_bytes: int
    kv_tokens: int
    """That its blocks hold."""
    training_tokens: int
    """Tokens of the largest micro-batch."""
    forward_tokens: int
    refused: tuple[str, ...] = ()
    """Stages that would refuse to begin for want of memory: `engine`, `trainer`."""
    reasons: Mapping[str, str] = field(default_factory=dict)
    """Why each size is what it is, for people."""


@dataclass(slots=True, frozen=True)
class MemoryEstimate:
    sizes: Sizes
    phases: tuple[Phase, ...]
    host: Mapping[str, int]
    """Host memory of one process, term by term; on the CPU it is the device's."""

    @property
    def worst(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)


def estimate_memory(setup: Setup) -> MemoryEstimate:
    sizes = choose_sizes(setup)
    return MemoryEstimate(sizes, tuple(_phases(setup, sizes)), host_terms(setup))


# ── held all the time ──────────────────────────────────────────────────────────────────────────────────────────────────


def policy_bytes(setup: Setup) -> ParameterBytes:
    """The trainer's parameters, on one device. With FSDP the parts are float32 masters, and whole weights exist beside them."""
    trainer = setup.config.trainer
    return counted_bytes(
        setup.model.parameters + setup.adapter,
        setup.trained,
        setup.dtype,
        bytes_per_moments=bytes_per_moments(trainer.optimizer_states),
        offloaded=trainer.offload_optimizer and setup.device.is_gpu,
        num_shards=setup.shards,
        sharded_weights=setup.sharding == "full",
    )


def held_terms(setup: Setup) -> dict[str, int]:
    """On one device from the first step to the last, the KV cache apart."""
    own, config, size = policy_bytes(setup), setup.config, setup.dtype.itemsize
    terms = {"weights": own.weights, "masters": own.masters, "moments": own.moments}
    if not setup.engine_shares_weights:
        terms["engine weights"] = size * setup.model.parameters // setup.tensor_parallel_size
    if config.needs_reference and not config.trainer.lora.rank and not config.trainer.reference_offload:
        terms["reference"] = size * setup.model.parameters
    if config.needs_critic:
        critic = critic_bytes(setup)
        terms["critic"] = critic.weights + critic.masters + critic.moments
    if setup.reward_model is not None:
        terms["reward model"] = size * setup.reward_model.parameters
    if not setup.device.is_gpu:
        terms["gradients"] = own.gradients  # kept from step to step (trainer/optimizer/adamw.py)
    return {name: value for name, value in terms.items() if value}


def critic_bytes(setup: Setup) -> ParameterBytes:
    """A copy of the policy without its head, or a second adapter beside the same frozen weights."""
    trainer, model = setup.config.trainer, setup.model
    kept = model.parameters - (0 if model.tied else model.head_parameters)
    count = setup.adapter or kept
    moments = bytes_per_moments(trainer.optimizer_states)
    offloaded = trainer.offload_optimizer and setup.device.is_gpu
    return counted_bytes(count, count, setup.dtype, bytes_per_moments=moments, offloaded=offloaded)


def _always(setup: Setup, sizes: Sizes) -> dict[str, int]:
    base = {"CUDA context": CUDA_CONTEXT} if setup.device.is_gpu else {"process": setup.process_bytes}
    return held_terms(setup) | {"KV cache": sizes.kv_bytes} | base


# ── sizes that a run chooses ───────────────────────────────────────────────────────────────────────────────────────────


def choose_sizes(setup: Setup) -> Sizes:
    cache = _kv_cache(setup)
    reasons, refused = {"KV cache": cache.reason}, [] if cache.fits else ["engine"]
    given, limit = setup.config.trainer.max_tokens_per_micro_batch, setup.tokens_per_rank
    if given:
        budgets = Budgets(given, FORWARD_RATIO * given, "as the recipe says")
    elif setup.device.is_gpu:
        budgets = _budgets(trainer_plan(setup, cache.num_bytes), setup.longest, refused)
    else:
        budgets = cpu_budgets()
    forward = setup.config.trainer.max_tokens_per_forward or budgets.forward
    training, forward = (balanced(limit, max(most, setup.longest)) for most in (budgets.training, forward))
    of = f"; a step has {limit:,}" if budgets.training > limit else ""
    reasons["trainer.max_tokens_per_micro_batch"] = f"{budgets.training:,} ({budgets.reason}{of})"
    return Sizes(cache.num_bytes, cache.num_tokens, training, forward, tuple(refused), reasons)


def _budgets(plan: MemoryPlan, longest: int, refused: list[str]) -> Budgets:
    """Where there is no room the trainer is added to `refused`; the plan goes on with one sequence at a time, to say by how
    much."""
    try:
        return plan.budgets()
    except NoRoomError:
        refused.append("trainer")
        return Budgets(longest, longest, "no room: one sequence at a time")


def balanced(tokens: int, most: int) -> int:
    """Tokens of a micro-batch when so many are dealt evenly to as few micro-batches as hold them."""
    return -(-tokens // max(1, -(-tokens // most)))


def trainer_plan(setup: Setup, kv_bytes: int) -> MemoryPlan:
    """What the trainer will find when it plans its first step (`trainer/batches/budget.py`)."""
    own = policy_bytes(setup)
    held = held_terms(setup)
    others = sum(held.values()) - own.weights - own.masters - own.moments + kv_bytes + CUDA_CONTEXT
    return MemoryPlan(
        device=setup.device.memory_bytes,
        others=others,
        parameters=own,
        logits=logits_bytes(setup.model.shape, setup.dtype),
        keeps=tokens_kept(setup.model.shape, setup.dtype),
        per_token=per_token(setup, 0),
    )


@dataclass(slots=True, frozen=True)
class _Cache:
    """The engine's cache, or where it does not fit the one that would be needed."""

    num_bytes: int
    num_tokens: int
    reason: str
    fits: bool = True


def _kv_cache(setup: Setup) -> _Cache:
    """As `engine/native/cache/sizing.py` has it: the bytes given, or what the utilization leaves beside the trainer's state."""
    engine, shape = setup.config.engine, setup.model.shape
    block = block_size_for(engine, torch.device(setup.kind))
    per_block = KVCache.bytes_per_block(shape, block, setup.dtype) // setup.tensor_parallel_size
    rows = -(-_max_len(setup) // block) * engine.max_num_seqs + 1
    given, budget = engine.kv_cache_memory_bytes, _kv_budget(setup)
    if (given or budget) < 2 * per_block:  # the engine refuses; the plan goes on with what is needed, to say by how much
        needed = _touched_blocks(setup, block) + 1
        return _Cache(needed * per_block, (needed - 1) * block, "no room: what the attempts of a step need", fits=False)
    blocks = min((given or budget) // per_block, rows)
    # On the CPU only what is touched becomes resident.
    resident = blocks if setup.device.is_gpu else min(blocks, _touched_blocks(setup, block) + 1)
    why = (
        "engine.kv_cache_memory_bytes"
        if given
        else f"what engine.gpu_memory_utilization = {engine.gpu_memory_utilization:g} leaves"
    )
    if not given and not setup.device.is_gpu:
        why = "4 GiB, of which only what is touched becomes resident"
    if blocks == rows:
        why = f"all {engine.max_num_seqs} rows at {_max_len(setup):,} tokens, less than {why}"
    return _Cache(resident * per_block, (blocks - 1) * block, why)


def _kv_budget(setup: Setup) -> int:
    if not setup.device.is_gpu:
        return CPU_CACHE_BYTES
    used = sum(held_terms(setup).values()) + CUDA_CONTEXT
    return max(0, int(setup.device.memory_bytes * setup.config.engine.gpu_memory_utilization) - used)


def _max_len(setup: Setup) -> int:
    positions = setup.model.shape.max_positions
    return min(setup.config.engine.max_model_len or positions, positions)


def _touched_blocks(setup: Setup, block: int) -> int:
    """By a step's attempts at their end: whole blocks, and a group's prompt once."""
    work, engine = setup.work, setup.config.engine
    rows = min(work.sequences, engine.max_num_seqs)
    shared = work.prompt_tokens // block
    own = -(-(setup.longest - shared * block) // block)
    return -(-rows // work.group_size) * shared + rows * own


def kv_bytes_needed(setup: Setup) -> int:
    """Bytes of the KV cache of all attempts of one engine at their end; a group shares the whole blocks of its prompt."""
    engine = setup.config.engine
    block = block_size_for(engine, torch.device(setup.kind))
    each = KVCache.bytes_per_block(setup.model.shape, block, setup.dtype) // setup.tensor_parallel_size
    return (_touched_blocks(setup, block) + 1) * each


# ── what tokens take ───────────────────────────────────────────────────────────────────────────────────────────────────


def layer(setup: Setup, tokens: int) -> LayerBytes:
    """Bytes of a token in a micro-batch of `tokens`."""
    lora = setup.config.trainer.lora
    return layer_bytes(
        setup.model.shape,
        setup.model.parameters,
        setup.dtype,
        setup.layer_code,
        adapter_columns=lora.rank * len(lora.targets) if lora.rank else 0,
        scores=setup.scores_per_token(tokens),
    )


def per_token(setup: Setup, tokens: int) -> TokenBytes:
    """What each of so many tokens adds to a micro-batch."""
    around = around_bytes(setup.model.shape, setup.dtype, setup.layer_code)
    return layer(setup, tokens).through(setup.model.shape.num_layers, setup.checkpointing, around)


def kept_logits(setup: Setup, predicted: int) -> tuple[int, int]:
    """Logits that stay for the backward pass, and the most that are there beside them, chunk by chunk as
    `trainer/loss/logprobs.py` makes them."""
    kind, vocabulary = setup.kind, setup.model.shape.vocab_size
    rows = chunk_rows(predicted, vocabulary, setup.dtype, kind, KEPT_BYTES[kind])
    chunks = [rows] * (predicted // rows) + ([predicted % rows] if predicted % rows else [])
    room, kept, passing = KEPT_BYTES[kind], 0, 0
    for chunk in chunks:
        size = chunk * vocabulary * setup.dtype.itemsize
        room -= size
        kept += size if room >= 0 else 0
        # The CPU also has a float32 copy, which becomes the log-probabilities, and the probabilities.
        passing = max(passing, (0 if room >= 0 else size) + (0 if setup.device.is_gpu else 2 * chunk * vocabulary * FLOAT32))
    return kept, passing


# ── phases ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _phases(setup: Setup, sizes: Sizes) -> list[Phase]:
    always = _always(setup, sizes)
    config = setup.config
    phases = [Phase("loading", _loading(setup))]
    phases.append(_with_gaps(setup, "generation", always, _generation(setup)))
    if config.needs_reference or config.needs_anchor or config.needs_critic:
        phases.append(_with_gaps(setup, "logprob passes", always, _passes(setup, sizes)))
    phases.append(_with_gaps(setup, "forward/backward", always, _training(setup, sizes.training_tokens)))
    phases.append(_with_gaps(setup, "optimizer step", always, _optimizer(setup)))
    if config.needs_critic:
        phases.append(_with_gaps(setup, "critic step", always, _critic(setup)))
    phases.append(_with_gaps(setup, "weight sync", always, _weight_sync(setup)))
    phases.append(_with_gaps(setup, "wake-up", always, {}))
    return phases


def _with_gaps(setup: Setup, name: str, always: Mapping[str, int], terms: Mapping[str, int]) -> Phase:
    share = GAPS if setup.device.is_gpu else HEAP_GAPS
    gaps = {"gaps": round(share * sum(size for name, size in terms.items() if name != "gradients"))}
    return Phase(name, {name: size for name, size in (dict(always) | dict(terms) | gaps).items() if size})


def _loading(setup: Setup) -> dict[str, int]:
    """The model comes as float32 and is converted once the optimizer has its masters: before there is a cache. Processes that
    divide it are taken to read a part each."""
    held, own = held_terms(setup), policy_bytes(setup)
    base = {"CUDA context": CUDA_CONTEXT} if setup.device.is_gpu else {"process": setup.process_bytes}
    whole = FLOAT32 * setup.model.parameters // setup.shards
    rest = {name: size for name, size in held.items() if name not in ("weights", "gradients", "engine weights")}
    return {"weights": max(whole, own.weights), **rest, **base}


def _generation(setup: Setup) -> dict[str, int]:
    """Prompts go through the network a few at once; then every row's logits are sampled from."""
    engine, work, size = setup.config.engine, setup.work, setup.dtype.itemsize
    shape = setup.model.shape
    rows = min(engine.max_num_seqs, work.share(max(1, setup.gpus // setup.tensor_parallel_size)).sequences)
    prompts = min(engine.max_num_batched_tokens, -(-rows // work.group_size) * work.prompt_tokens)
    each = layer(setup, 0)
    activations = prompts * (each.forward + around_bytes(shape, setup.dtype, setup.layer_code)) // setup.tensor_parallel_size
    if setup.device.is_gpu:
        logits = rows * shape.vocab_size * size + (rows * shape.vocab_size * size if work.group_size > 1 else 0)
        return {"activations": max(activations, logits)}
    # The sampler has the logits, a scaled copy, its weights and a chunked copy; attention gathers a layer's keys and values.
    logits = rows * shape.vocab_size * (size + 3 * FLOAT32)
    gathered = 2 * rows * setup.longest * shape.num_kv_heads * shape.head_dim * size
    return {"activations": max(activations, gathered + logits)}


def _passes(setup: Setup, sizes: Sizes) -> dict[str, int]:
    tokens = sizes.forward_tokens
    terms = {"activations": tokens * per_token(setup, tokens).forward}
    predicted = min(tokens, round(tokens * trained_share(setup)))
    kept, passing = kept_logits(setup, predicted)
    chunk = max(passing, min(CHUNK_BYTES[setup.kind], kept))
    if setup.config.trainer.reference_offload and setup.config.needs_reference and not setup.adapter:
        terms["reference"] = setup.dtype.itemsize * setup.model.parameters
    return terms | {"logits": chunk}


def trained_share(setup: Setup) -> float:
    """The share of trained tokens among those that go through the trainer: all but the prompts."""
    new = setup.work.max_new_tokens
    prompt = setup.work.prompt_tokens / (setup.work.group_size if setup.shares_prompts else 1)
    return new / (new + prompt)


def _training(setup: Setup, tokens: int) -> dict[str, int]:
    """At the peak: everything is kept, and either the head or the last layer is at work."""
    each, kind, shape = layer(setup, tokens), setup.checkpointing, setup.model.shape
    size, own = setup.dtype.itemsize, policy_bytes(setup)
    activations = tokens * (shape.num_layers * each.kept_with(kind) + around_bytes(shape, setup.dtype, setup.layer_code))
    if not setup.device.is_gpu:
        activations += round(FLOAT32 * setup.scores_per_token(tokens) * tokens)  # the mask, once for all layers
    kept, passing = kept_logits(setup, round(tokens * trained_share(setup)))
    at_head = kept + passing + tokens * size * shape.hidden_size
    at_layer = tokens * (each.again(kind) + each.backward)
    terms = {"gradients": own.gradients, "activations": activations} | (
        {"logits": at_head} if at_head > at_layer else {"layer at work": at_layer}
    )
    if setup.shards > 1:
        terms["gathered weights"] = _gathered(setup)
    return terms | _head_gradient(setup)


def _head_gradient(setup: Setup) -> dict[str, int]:
    """Where products are not added to a float32 sum as they are made: the head's gradient waits for the embedding's."""
    summed = setup.device.is_gpu and setup.dtype != torch.float32
    if summed or setup.adapter:
        return {}
    count = setup.model.head_parameters
    return {"head gradient": (setup.dtype.itemsize + FLOAT32) * count}


def _gathered(setup: Setup) -> int:
    """Weights that FSDP puts together: all of them with `grad_op`, else the embeddings and the layers at work and fetched."""
    model, size = setup.model, setup.dtype.itemsize
    if setup.sharding == "grad_op":
        return 0  # counted as weights
    per_layer = model.body_parameters // model.shape.num_layers
    around = model.parameters - model.body_parameters
    return size * (around + (2 + Division().prefetch_layers) * per_layer)


def _optimizer(setup: Setup) -> dict[str, int]:
    trainer, stretch = setup.config.trainer, min(STRETCH_ELEMENTS, -(-setup.trained // setup.shards))
    scratch = 0
    if trainer.optimizer_states == "int8" and not setup.device.is_gpu:  # there one kernel does it
        scratch += QUANTIZED_SCRATCH * FLOAT32 * stretch
    if trainer.offload_optimizer:
        moments = bytes_per_moments(trainer.optimizer_states)
        scratch += round(2 * stretch * (moments + (0 if setup.dtype == torch.float32 else FLOAT32)))
    return {"gradients": policy_bytes(setup).gradients, "scratch": scratch}


def _critic(setup: Setup) -> dict[str, int]:
    tokens = min(setup.config.trainer.critic.max_tokens_per_micro_batch, setup.tokens_per_rank)
    return {"gradients": critic_bytes(setup).gradients, "activations": tokens * per_token(setup, tokens).training}


def _weight_sync(setup: Setup) -> dict[str, int]:
    """Nothing where the engine reads the trainer's storage. Else weights travel a layer at a time, one ahead."""
    if setup.engine_shares_weights:
        return {}
    model = setup.model
    largest = max(model.head_parameters, model.body_parameters // model.shape.num_layers)
    return {"on its way": 2 * setup.dtype.itemsize * largest}


# ── the host ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def host_terms(setup: Setup) -> dict[str, int]:
    """Host memory of one process. A checkpoint is copied to host memory that stays (`trainer/checkpoints/background.py`)."""
    config, size = setup.config, setup.dtype.itemsize
    on_device = setup.device.is_gpu
    terms = {"process": setup.process_bytes}
    kept = policy_bytes(setup.changed(trainer={"offload_optimizer": False}))
    state = (kept.masters or FLOAT32 * -(-setup.trained // setup.shards)) + kept.moments
    if on_device and config.trainer.offload_optimizer:
        terms["offloaded state"] = kept.masters + kept.moments
    if on_device and config.trainer.reference_offload and config.needs_reference and not setup.adapter:
        terms["reference"] = size * setup.model.parameters
    if config.run.checkpoint_every:
        terms["checkpoint"] = state * setup.shards
    return terms
