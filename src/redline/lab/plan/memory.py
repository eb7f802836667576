"""Bytes of every phase of a step, term by term, on one device and on its host.

    all the time   weights, masters, moments; reference, critic and reward model where there are; the engine's cache
    generation     + a step's activations, or the sampler's logits
    logprobs       + activations of a pass that keeps nothing, a chunk of logits          where a pass is asked for
    training       + gradients, what the backward pass reads, and the larger of logits and the layer at work
    optimizer      + gradients, a stretch on its way
    weight sync    + what is on its way to engines that do not share the weights
    wake-up        + nothing: the cache comes back to where it was

`held.py` has what stays and what a token takes, `sizes.py` the cache and the micro-batches. The numbers of the CUDA context and
of gaps are allowances; torch's allocator counts neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from redline.lab.plan.held import FEWER_BITS, critic_bytes, held_terms, kept_logits, layer, per_token, policy_bytes
from redline.lab.plan.setup import Setup
from redline.lab.plan.sizes import CUDA_CONTEXT, Sizes, choose_sizes
from redline.lab.plan.stages import layers_of
from redline.models.sizes.memory import FLOAT32, around_bytes, message_bytes
from redline.trainer.loss.logprobs import CHUNK_BYTES
from redline.trainer.optimizer.offload import STRETCH_ELEMENTS
from redline.trainer.optimizer.quantized_states import bytes_per_moments
from redline.trainer.parallel.place import Division

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


# ── phases ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _always(setup: Setup, sizes: Sizes) -> dict[str, int]:
    base = {"CUDA context": CUDA_CONTEXT} if setup.device.is_gpu else {"process": setup.process_bytes}
    return held_terms(setup) | {"KV cache": sizes.kv_bytes} | base


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
    whole = FLOAT32 * setup.own_parameters // setup.shards
    made_later = ("weights", "gradients", "engine weights", FEWER_BITS)
    rest = {name: size for name, size in held.items() if name not in made_later}
    return {"weights": max(whole, own.weights), **rest, **base}


def _generation(setup: Setup) -> dict[str, int]:
    """Prompts go through the network a few at once; then every row's logits are sampled from."""
    engine, work, size = setup.config.engine, setup.work, setup.dtype.itemsize
    shape = setup.model.shape
    rows = min(engine.max_num_seqs, work.share(setup.engines).sequences)
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
    if gathered := _gathered_in_passes(setup):
        terms["gathered weights"] = gathered
    return terms | {"logits": chunk}


def trained_share(setup: Setup) -> float:
    """The share of trained tokens among those that go through the trainer: all but the prompts."""
    new = setup.work.max_new_tokens
    prompt = setup.work.prompt_tokens / (setup.work.group_size if setup.shares_prompts else 1)
    return new / (new + prompt)


def _training(setup: Setup, tokens: int) -> dict[str, int]:
    """At the peak: everything is kept, and either the head or the last layer is at work. Of stages the one that takes more: the
    first, with a micro-batch for every stage, or the last, with the head."""
    first, last = layers_of(setup.model, setup.stages)
    at_end = _training_of(setup, tokens, setup.stages - 1, last) | _head_gradient(setup)
    at_begin = _training_of(setup, tokens, 0, setup.stages * first)
    return max(at_end, at_begin, key=lambda terms: sum(terms.values())) if setup.stages > 1 else at_end


def _training_of(setup: Setup, tokens: int, stage: int, layers: int) -> dict[str, int]:
    """Bytes of a stage that keeps the activations of so many layers, of all micro-batches under way."""
    each, kind, shape = layer(setup, tokens), setup.checkpointing, setup.model.shape
    size, has_head = setup.dtype.itemsize, stage == setup.stages - 1
    around = around_bytes(shape, setup.dtype, setup.layer_code) if has_head else 0
    activations = tokens * (layers * each.kept_with(kind) + around)
    if not setup.device.is_gpu:
        activations += round(FLOAT32 * setup.scores_per_token(tokens) * tokens)  # the mask, once for all layers
    kept, passing = kept_logits(setup, round(tokens * trained_share(setup))) if has_head else (0, 0)
    at_head = kept + passing + tokens * size * shape.hidden_size if has_head else 0
    at_layer = tokens * (each.again(kind) + each.backward) + setup.attention_room
    terms = {"gradients": policy_bytes(setup).gradients, "activations": activations} | (
        {"logits": at_head} if at_head > at_layer else {"layer at work": at_layer}
    )
    if setup.stages > 1:
        terms["messages"] = tokens * message_bytes(shape, setup.dtype, setup.stages, stage).training
    if setup.shards > 1:
        terms["gathered weights"] = _gathered(setup)
    return terms


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


def _gathered_in_passes(setup: Setup) -> int:
    """The same in passes without gradients: those of a reference of its own come together with either sharding."""
    if setup.shards == 1:
        return 0
    if setup.sharding == "grad_op":
        return setup.dtype.itemsize * setup.model.parameters if setup.config.needs_reference and not setup.adapter else 0
    return _gathered(setup)


def _optimizer(setup: Setup) -> dict[str, int]:
    trainer, stretch = setup.config.trainer, min(STRETCH_ELEMENTS, -(-setup.own_trained // setup.shards))
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
    state = (kept.masters or FLOAT32 * -(-setup.own_trained // setup.shards)) + kept.moments
    if on_device and config.trainer.offload_optimizer:
        terms["offloaded state"] = kept.masters + kept.moments
    if on_device and config.trainer.reference_offload and config.needs_reference and not setup.adapter:
        terms["reference"] = size * setup.model.parameters
    if config.run.checkpoint_every:
        terms["checkpoint"] = state  # its part
    return terms
