"""Causes in the trainer: micro-batches, recomputed activations, offloaded states, passes that could be left out."""

from __future__ import annotations

import numpy as np

from redline.lab.doctor.facts import Facts, Parts
from redline.lab.doctor.finding import Abstention, Answer, Evidence, Finding

FEW_TOKENS = {"cpu": 256, "cuda": 4096}
"""Tokens of a micro-batch under which the products of a layer no longer fill the device."""
AGREES_KL = 1e-6
"""Nats up to which the engine's logprobs are the trainer's, but for rounding."""
HEADROOM = 0.3
"""Share of the memory that must be free before a setting that spares memory is called needless."""


def micro_batch_too_small(facts: Facts) -> Answer:
    """A batch is trained on in many small pieces, although its tokens would fit into fewer."""
    pieces, tokens = facts.mean("trainer/micro_batches"), facts.mean("trainer/tokens")
    updates = facts.mean("trainer/updates") or 1.0
    if not pieces or not tokens or pieces < 2 * updates:
        return None
    each, few = tokens / pieces, FEW_TOKENS[_device(facts)]
    if each >= few:
        return None
    now = facts.setting("trainer.max_tokens_per_micro_batch")
    if now is None:
        return Abstention(
            "micro_batch_too_small", "the trainer chose the size of its micro-batches by memory; `redline plan` says more"
        )
    part = 1 - each / few
    return Finding(
        cause="micro_batch_too_small",
        title=f"A batch is trained on in {pieces:.0f} pieces of {each:.0f} tokens.",
        why="Each piece reads all weights and starts all kernels once.",
        evidence=(
            Evidence("trainer.max_tokens_per_micro_batch", now, "tokens of a piece, at most"),
            facts.evidence("trainer/micro_batches", "pieces of a batch"),
            facts.evidence("trainer/tokens", "tokens of a batch"),
            facts.evidence("trainer/tokens_per_s", "tokens a second"),
        ),
        gain=facts.saved(
            "trainer",
            facts.phase("training"),
            "training",
            Parts(0.1 * part, 0.6 * part, part),
            "a piece costs as much for itself as for its tokens; at most, only for itself",
        ),
        change={"trainer.max_tokens_per_micro_batch": int(max(2 * now, min(few, 1.2 * tokens / updates + 1)))},
    )


def checkpointing_not_needed(facts: Facts) -> Answer:
    """Activations are computed twice although the memory would hold them."""
    kind = facts.setting("trainer.gradient_checkpointing", "none")
    if kind == "none":
        return None
    free = _free_share(facts)
    if free is None:
        return Abstention("checkpointing_not_needed", f"memory was not recorded; {facts.how_to_sample}")
    if free < HEADROOM:
        return None
    again = {"full": 1.0, "selective": 0.5, "light": 0.2}.get(kind, 0.4)
    return Finding(
        cause="checkpointing_not_needed",
        title=f"Activations are computed twice, with {free:.0%} of the memory free.",
        why=f"trainer.gradient_checkpointing={kind} runs forward passes again during backward to spare memory.",
        evidence=(
            Evidence("trainer.gradient_checkpointing", kind, "what is computed again"),
            Evidence("free memory", free, "share of the device's memory at its fullest"),
            facts.evidence("trainer/forward_s", "seconds a step of the passes that are run again"),
            facts.evidence("trainer/backward_s", "seconds a step"),
        ),
        gain=facts.saved(
            "trainer",
            facts.column("trainer/forward_s"),
            "training",
            Parts(0.4 * again, again, 1.5 * again),
            "layers take as long again as in the forward pass, and some more to set up",
        ),
        change={"trainer.gradient_checkpointing": "none"},
    )


def offload_not_needed(facts: Facts) -> Answer:
    """Optimizer states or the reference travel between host and device although the device would hold them."""
    keys = [key for key in ("trainer.offload_optimizer", "trainer.reference_offload") if facts.setting(key, False)]
    if not keys:
        return None
    memory, used = facts.sampled("gpu/0/memory_total_bytes"), facts.sampled("memory/peak_bytes")
    away = facts.sampled("memory/offloaded_bytes")
    if memory is None or used is None or away is None:
        return Abstention("offload_not_needed", "memory of the GPU was not recorded; install the extra `gpu`")
    if used + away > (1 - HEADROOM / 2) * memory:
        return None
    lost = facts.column("trainer/optimizer_s")
    return Finding(
        cause="offload_not_needed",
        title=f"{away / 1e9:.1f} GB travel to the GPU at every step, and would fit there.",
        why="The bus is fifty times slower than the GPU's memory.",
        evidence=(
            Evidence("memory/offloaded_bytes", away, "bytes in host memory"),
            Evidence("memory/peak_bytes", used, "bytes used on the GPU at most"),
            facts.evidence("trainer/optimizer_s", "seconds a step"),
        ),
        gain=facts.saved(
            "trainer", lost, "training", Parts(0.3, 0.7, 0.95), "most of the update's time is the way of its states"
        ),
        change=dict.fromkeys(keys, False),
    )


def double_forward(facts: Facts) -> Answer:
    """Logprobs that the engine has recorded are computed once more."""
    again, mismatch = facts.column("trainer/recompute_s"), facts.mean("trainer/mismatch_kl")
    if not again.any() or facts.setting("trainer.recompute_old_logprobs", "auto") is False:
        return None
    if not facts.is_lockstep or mismatch is None or mismatch > AGREES_KL:
        return None  # the engine's are those of another policy, or rounded otherwise
    return Finding(
        cause="double_forward",
        title="Logprobs of the sampled tokens are computed twice.",
        why="The engine has recorded them, and they agree with the trainer's, of whose first update they are the old ones.",
        evidence=(
            facts.evidence("trainer/recompute_s", "seconds a step"),
            facts.evidence("trainer/mismatch_kl", "nats between engine and trainer: next to nothing"),
            Evidence("buffer.max_lag", 0, "what is trained on was sampled by the policy that the step begins with"),
        ),
        gain=facts.saved(
            "trainer",
            again,
            "training",
            Parts(0.8, 1.0, 1.4),
            "engine and trainer go on agreeing; batches are packed once less",
        ),
        change={"trainer.recompute_old_logprobs": False},
    )


def imbalance(facts: Facts) -> Answer:
    """One rank has more to do than the others, and these wait."""
    dearest = facts.steps.get("trainer/rank_imbalance")
    if dearest is None:
        return None
    waits = _passes(facts) * (1 - 1 / np.maximum(1.0, np.nan_to_num(dearest, nan=1.0)))
    return Finding(
        cause="imbalance",
        title=f"The rank with the most to do has {float(np.nanmean(dearest)):.1f} times the mean of all.",
        why="A step ends when the rank with the dearest sequences has done them, and the others wait for it.",
        evidence=(
            facts.evidence("trainer/rank_imbalance", "cost of the dearest rank over the mean"),
            facts.evidence("trainer/forward_s", "seconds a step"),
            facts.evidence("trainer/backward_s", "seconds a step"),
        ),
        gain=facts.saved("trainer", waits, "training", Parts(0.2, 0.6, 1.0), "more sequences can be divided more evenly"),
        change={},
        advice="A sequence is computed by one rank: more groups a step are divided more evenly, and"
        " trainer.sequence_parallel_size divides long ones. Whether one device is slower is not in this figure: the lanes of"
        " each rank in `redline show RUN --ledger` tell.",
    )


def memory_spike(facts: Facts) -> Answer:
    """Memory ran out now and then, and passes began again."""
    retries = facts.column("trainer/oom_retries")
    if not retries.any():
        return None
    training = facts.phase("training")
    usual = float(np.median(training[retries == 0])) if (retries == 0).any() else 0.0
    now = facts.setting("trainer.max_tokens_per_micro_batch")
    return Finding(
        cause="memory_spike",
        title=f"The trainer ran out of memory {retries.sum():.0f} times, and began again.",
        why="What it had computed by then is lost, and its micro-batches are smaller from then on.",
        evidence=(
            facts.evidence("trainer/oom_retries", "passes that began again, in steps with any"),
            Evidence("timeline/training_s", usual, "seconds of a step in which memory was enough"),
        ),
        gain=facts.saved(
            "trainer",
            np.where(retries > 0, np.maximum(0.0, training - usual), 0.0),
            "training",
            Parts(0.5, 0.9, 1.0),
            "smaller micro-batches from the beginning are enough",
        ),
        change={"trainer.max_tokens_per_micro_batch": int(0.75 * now)} if isinstance(now, int) else {},
        advice="The run's own words name the size that would have spared it; engine.gpu_memory_utilization leaves the trainer"
        " more, trainer.gradient_checkpointing needs less.",
    )


def _passes(facts: Facts) -> np.ndarray:
    """Seconds of forward and backward passes in each steady step."""
    return facts.column("trainer/forward_s") + facts.column("trainer/backward_s")


def _free_share(facts: Facts) -> float | None:
    """Share of the device's memory that was free when most was used; None where it was not recorded."""
    if _device(facts) == "cuda":
        total, used = facts.samples.get("gpu/0/memory_total_bytes"), facts.samples.get("gpu/0/memory_used_bytes")
        return None if total is None or used is None else float(1 - np.nanmax(used) / np.nanmax(total))
    total, available = facts.samples.get("host/total_bytes"), facts.samples.get("host/available_bytes")
    return None if total is None or available is None else float(np.nanmin(available) / np.nanmax(total))


def _device(facts: Facts) -> str:
    return "cuda" if str(facts.setting("run.device", "cpu")).startswith("cuda") else "cpu"
