"""Sizes that a run chooses for itself, chosen as it would: the engine's cache and the trainer's micro-batches."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.cache.sizing import CPU_CACHE_BYTES, block_size_for
from redline.errors import NoRoomError
from redline.lab.plan.held import held_terms, per_token, policy_bytes
from redline.lab.plan.setup import Setup, Work
from redline.trainer.batches.budget import FORWARD_RATIO, Budgets, MemoryPlan, cpu_budgets, logits_bytes, tokens_kept

CUDA_CONTEXT = 700 * 2**20
"""Bytes of one process for the driver, cuBLAS and Triton modules. 500 to 800 MiB on Hopper."""


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
    most = max(setup.longest, -(-limit // setup.stages))  # at least a micro-batch for every stage
    training = dealt(setup, min(most, max(budgets.training, setup.longest)), setup.config.trainer.mini_batches)
    forward = dealt(setup, min(most, max(forward, setup.longest)))
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


def dealt(setup: Setup, most: int, mini_batches: int = 1) -> int:
    """Tokens of the largest micro-batch when those of a step, or of one of its mini-batches, are dealt evenly. What shares a
    prompt stays together where it fits."""
    work = setup.work.share(mini_batches).share(setup.data_ranks)
    together = work.group_size if setup.shares_prompts else 1
    each = work.prompt_tokens + together * work.max_new_tokens
    if each > most:
        return balanced(-(-setup.tokens_per_rank // mini_batches), most)
    count = work.sequences // together
    return each * balanced(count, most // each)


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
    shared, own = _blocks_of_attempt(work, block, work.max_new_tokens)
    return -(-rows // work.group_size) * shared + rows * own


def _blocks_of_attempt(work: Work, block: int, new_tokens: float) -> tuple[int, int]:
    """Blocks of the prompt that a group shares, and those of an attempt of so many tokens alone."""
    shared = work.prompt_tokens // block
    return shared, math.ceil((work.prompt_tokens - shared * block + new_tokens) / block)


def rows_in(setup: Setup, kv_tokens: int, new_tokens: float) -> int:
    """Attempts of so many new tokens that a cache of `kv_tokens` holds at their end, at least one; a group shares the whole
    blocks of its prompt."""
    size, block = setup.work.group_size, block_size_for(setup.config.engine, torch.device(setup.kind))
    shared, own = _blocks_of_attempt(setup.work, block, new_tokens)
    groups, rest = divmod(kv_tokens // block, shared + size * own)
    return max(1, groups * size + max(0, rest - shared) // own)


def decoding_rows(setup: Setup, sizes: Sizes) -> int:
    """Attempts that one engine decodes at once: those it has, at most `engine.max_num_seqs`, and at most those of mean length
    that its cache holds."""
    work = setup.work.share(setup.engines)
    return min(work.sequences, setup.config.engine.max_num_seqs, rows_in(setup, sizes.kv_tokens, work.mean_new_tokens))


def kv_bytes_needed(setup: Setup) -> int:
    """Bytes of the KV cache of all attempts of one engine at their end; a group shares the whole blocks of its prompt."""
    engine = setup.config.engine
    block = block_size_for(engine, torch.device(setup.kind))
    each = KVCache.bytes_per_block(setup.model.shape, block, setup.dtype) // setup.tensor_parallel_size
    return (_touched_blocks(setup, block) + 1) * each
