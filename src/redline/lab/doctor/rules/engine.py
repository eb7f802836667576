"""Causes in the engine: how many sequences it decodes at once, its KV cache, prompts that are computed twice."""

from __future__ import annotations

import math

import numpy as np

from redline.lab.doctor.facts import Facts, Parts
from redline.lab.doctor.finding import Abstention, Answer, Evidence, Finding
from redline.lab.doctor.rules.sizes import attempts_at_once, num_engines, rows_of_an_engine

TENSOR_PARALLEL = ("tensor_parallel_size", "tp_size")
"""What vLLM and SGLang call the number of GPUs that divide an engine."""
FULL = 0.5
"""Share of the KV cache's blocks from which on it may be too full for one more group, whose blocks are given all at once."""


def low_concurrency(facts: Facts) -> Answer:
    """More attempts are there than the engine may decode at once."""
    limit, engines = facts.setting("engine.max_num_seqs", 256), num_engines(facts)
    attempts = math.ceil(attempts_at_once(facts) / engines)
    if attempts <= limit:
        return None
    queue, latency = facts.mean("engine/queue_p50_s"), facts.mean("rollouts/attempt_latency_p50_s")
    if queue is None or not latency:
        return Abstention("low_concurrency", "the times of requests in the engine's queue were not recorded")
    if queue < 0.1 * latency:
        return None
    more = int(min(attempts, 8 * limit))
    waves = more / limit
    return Finding(
        cause="low_concurrency",
        title=f"{attempts} attempts share {limit} rows of {'the' if engines == 1 else 'each'} engine.",
        why="The rest wait in its queue, and a decode step costs little more with more rows.",
        evidence=(
            Evidence("engine.max_num_seqs", limit, "sequences decoded at once, at most"),
            facts.evidence("engine/batch_size_mean", "sequences decoded at once"),
            facts.evidence("engine/queue_p50_s", "seconds that a request waits for a row"),
            facts.evidence("rollouts/attempt_latency_p50_s", "seconds of an attempt, that wait among them"),
        ),
        gain=facts.saved(
            "rollouts",
            facts.phase("generation", "rollouts"),
            "generation",
            Parts(0.2 * (1 - 1 / waves), 0.7 * (1 - 1 / waves), 1 - 1 / waves),
            "a decode step of more rows costs less than those rows cost one after the other",
        ),
        change={"engine.max_num_seqs": more},
    )


def prefix_cache_off(facts: Facts) -> Answer:
    """Every turn, or every attempt of a group, computes what an earlier one has computed."""
    if facts.setting("engine.enable_prefix_caching", True):
        return None
    turns = facts.mean("rollouts/turns_mean") or 1.0
    once = 2 / (turns + 1)  # n turns of one length have n (n + 1) / 2 lengths where each begins again, and n where none does
    if facts.setting("engine.kind", "native") != "native":
        once /= max(1, facts.setting("rollouts.group_size", 1))  # ours computes the prompt of a group once in any case
    if once >= 1:
        return None
    if facts.setting("placement.engines", 0) and not facts.column("engine/prefill_s").any():
        return Abstention("prefix_cache_off", "engines in processes of their own do not say how long prompts took")
    return Finding(
        cause="prefix_cache_off",
        title="Prompts are computed again that begin like earlier ones.",
        why="Turns of an attempt begin with the turns before them; without the prefix cache each computes all.",
        evidence=(
            Evidence("engine.enable_prefix_caching", False, "keys and values of equal beginnings are not shared"),
            facts.evidence("rollouts/turns_mean", "turns of an attempt"),
            facts.evidence("engine/prompt_tokens", "tokens of prompts computed, a step"),
            facts.evidence("engine/prefill_s", "seconds a step"),
        ),
        gain=facts.saved(
            "rollouts",
            facts.column("engine/prefill_s") * (1 - once),
            "generation",
            Parts(0.5, 0.9, 1.0),
            "most of a turn's prompt is older turns",
        ),
        change={"engine.enable_prefix_caching": True},
    )


def preemption(facts: Facts) -> Answer:
    """Blocks run out, sequences are put back, and what they had is computed again."""
    preempted, attempts = facts.total("engine/preemptions"), facts.total("rollouts/attempts")
    if not preempted or not attempts:
        return None
    again = facts.column("engine/preemptions") / np.maximum(1.0, facts.column("rollouts/attempts"))
    idle = max(0.0, 1 - (facts.mean("engine/batch_size_mean") or 0.0) / rows_of_an_engine(facts))
    lost = facts.phase("generation", "rollouts") * np.maximum(idle, np.minimum(1.0, again / 2))
    return Finding(
        cause="preemption",
        title="The KV cache runs out, and sequences are put back.",
        why="A sequence that is put back computes its prompt and what it had sampled again, and its row is empty until then.",
        evidence=(
            facts.evidence("engine/preemptions", "sequences put back, a step"),
            facts.evidence("engine/batch_size_mean", "sequences decoded at once"),
            facts.evidence("engine/kv_use_peak", "share of the cache's blocks held at most"),
        ),
        gain=facts.saved("rollouts", lost, "generation", Parts(0.2, 0.7, 1.0), "a decode step of more rows costs little more"),
        change=_larger_cache(facts),
    )


def kv_cache_too_small(facts: Facts) -> Answer:
    """Requests wait for blocks although there are rows."""
    peak, batch = facts.mean("engine/kv_use_peak"), facts.mean("engine/batch_size_mean")
    if facts.total("engine/preemptions") or peak is None or batch is None or peak < FULL:
        return None
    rows = rows_of_an_engine(facts)
    queue, latency = facts.mean("engine/queue_p50_s") or 0.0, facts.mean("rollouts/attempt_latency_p50_s") or 0.0
    if queue < 0.1 * latency or batch > 0.8 * rows:
        return None
    idle = 1 - batch / rows
    return Finding(
        cause="kv_cache_too_small",
        title=f"The KV cache holds {batch:.0f} sequences where {rows:.0f} could be decoded at once.",
        why="The others wait for blocks.",
        evidence=(
            facts.evidence("engine/kv_use_peak", "share of the cache's blocks held at most"),
            facts.evidence("engine/batch_size_mean", "sequences decoded at once"),
            facts.evidence("engine/queue_p50_s", "seconds that a request waits"),
        ),
        gain=facts.saved(
            "rollouts",
            facts.phase("generation", "rollouts"),
            "generation",
            Parts(0.1 * idle, 0.6 * idle, idle),
            "a decode step of more rows costs less than those rows cost one after the other",
        ),
        change=_larger_cache(facts),
    )


def kv_cache_too_large(facts: Facts) -> Answer:
    """Memory of the GPU lies in the cache unused, while the trainer spares memory at the cost of time."""
    if facts.setting("run.device", "cpu") != "cuda":
        return None
    peak, share = facts.mean("engine/kv_use_peak"), facts.setting("engine.gpu_memory_utilization", 0.5)
    recomputes = facts.setting("trainer.gradient_checkpointing", "none") != "none"
    offloads = facts.setting("trainer.offload_optimizer", False) and not recomputes
    if peak is None or peak > 0.4 or not (recomputes or offloads):
        return None
    training = facts.phase("training")
    return Finding(
        cause="kv_cache_too_large",
        title=f"At most {peak:.0%} of the KV cache is ever used.",
        why="The trainer computes activations twice, or keeps states in host memory, for want of memory that the cache holds.",
        evidence=(
            facts.evidence("engine/kv_use_peak", "share of the cache's blocks held at most"),
            Evidence("engine.gpu_memory_utilization", share, "share of the GPU's memory in use once the cache is made"),
        ),
        gain=facts.saved(
            "trainer", training, "training", Parts(0.05, 0.2, 0.35), "the memory is enough to train without recomputing"
        ),
        change={
            "engine.gpu_memory_utilization": round(max(0.1, share * (0.2 + peak)), 2),
            **({"trainer.offload_optimizer": False} if offloads else {"trainer.gradient_checkpointing": "none"}),
        },
    )


def too_much_tensor_parallelism(facts: Facts) -> Answer:
    """A model that one GPU holds is divided among several."""
    options = facts.setting("engine.options", {})
    own = next((name for name in TENSOR_PARALLEL if name in options), None)
    key = f"engine.options.{own}" if own else "engine.tensor_parallel_size"
    size = options[own] if own else facts.setting(key, 1)
    weights, memory = facts.sampled("memory/weights_bytes"), facts.sampled("gpu/0/memory_total_bytes")
    if size <= 1:
        return None
    if weights is None or memory is None:
        return Abstention(
            "too_much_tensor_parallelism", f"the sizes of weights and GPU were not recorded; {facts.how_to_sample}"
        )
    if weights > 0.4 * memory:
        return None
    return Finding(
        cause="too_much_tensor_parallelism",
        title=f"A model of {weights / 1e9:.1f} GB is divided among {size} GPUs.",
        why="Every layer waits for two sums over all of them; as several engines each GPU works by itself.",
        evidence=(
            Evidence(key, size, "GPUs that divide the model"),
            Evidence("memory/weights_bytes", weights, "bytes of weights"),
        ),
        gain=facts.saved(
            "rollouts",
            facts.phase("generation", "rollouts"),
            "generation",
            Parts(0.05, 0.25, 0.5),
            "requests are many enough for an engine on each GPU",
        ),
        change={},
        advice=f"engine.kind=native with placement.engines={size} has a whole engine on each GPU. Fewer GPUs for one engine"
        f" ({key}) make a token dearer, and leave the others to the trainer.",
    )


def _larger_cache(facts: Facts) -> dict[str, object]:
    share = facts.setting("engine.gpu_memory_utilization", 0.5)
    if facts.setting("run.device", "cpu") == "cuda" and not facts.setting("engine.kv_cache_memory_bytes"):
        return {"engine.gpu_memory_utilization": round(max(share, min(0.9, share + 0.2)), 2)}
    return {"engine.kv_cache_memory_bytes": 2 * facts.setting("engine.kv_cache_memory_bytes", 4 << 30)}
