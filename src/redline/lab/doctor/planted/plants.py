"""The library: a small run, and what is done to it. Each plant knows the cause that the doctor should name first.

Causes that need a GPU are not planted here: kv_cache_too_large, too_much_tensor_parallelism, offload_not_needed, memory_spike,
cpu_bound and throttling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

STEPS = 12
MATERIAL = "redline.lab.doctor.planted.material"
TASKS = {"kind": "import", "path": f"{MATERIAL}:Puzzles"}
RECIPE: Mapping[str, Any] = {
    "run": {"name": "planted", "steps": STEPS, "device": "cpu", "num_threads": 1, "checkpoint_every": 0},
    "model": {"path": "builtin:tiny", "dtype": "float32"},
    "rollouts": {
        "task": TASKS,
        "groups_per_step": 4,
        "group_size": 8,
        "max_new_tokens": 16,
        "evaluation": {"num_tasks": 0},
    },
    "engine": {"kv_cache_memory_bytes": 64 << 20},
    "trainer": {"learning_rate": 1e-4},
    "telemetry": {"sample_every_s": 0.25},
}
"""The run that every plant is made of: a tiny random model on one core."""


@dataclass(slots=True, frozen=True)
class Plant:
    """A run with a known bottleneck, or none."""

    cause: str | None
    """What the doctor should name first; None for a healthy run."""
    what: str
    """What was done to the run."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Dotted keys of the recipe that make the bottleneck, or that the run needs anyway."""
    fix: Mapping[str, Any] | None = None
    """Keys that take it away, while delays and neighbours go; None does what the doctor's finding says, in the same world."""
    delays: Mapping[str, float] = field(default_factory=dict)
    """Span → seconds that it sleeps in every step."""
    first_delays: Mapping[str, float] = field(default_factory=dict)
    """The same in the first step alone. The gain is then of all steps, not of the steady ones."""
    neighbours: int = 0
    """Processes that keep a core busy each, beside the run."""
    ranks: int = 1
    """Processes that train together, by gloo."""


def talk(turns: int = 2, **params: Any) -> dict[str, Any]:
    """Keys of a run whose attempts are conversations."""
    return {
        "rollouts.task": None,
        "rollouts.environment": {"name": f"{MATERIAL}:Talk", "params": {"turns": turns, **params}},
        "rollouts.max_new_tokens": 8,
    }


def board(step_s: float, **environment: Any) -> dict[str, Any]:
    """Keys of a run whose attempts are games of slow steps."""
    params = {"step_s": step_s}
    return {
        "rollouts.task": None,
        "rollouts.environment": {"name": f"{MATERIAL}:Board", "params": params, **environment},
        "rollouts.max_new_tokens": 8,
    }


def puzzles(**params: Any) -> dict[str, Any]:
    """Keys of a run whose tasks are slow in some way."""
    return {"rollouts.task.params": params}


PLANTS: Mapping[str, Plant] = {
    # ── healthy ──
    "healthy": Plant(None, "nothing"),
    "healthy-large": Plant(None, "large batches", {"rollouts.groups_per_step": 8}),
    "healthy-long-prompts": Plant(None, "prompts of 200 tokens, shared by their groups", puzzles(prompt_chars=200)),
    "healthy-no-prefix-cache": Plant(
        None,
        "no prefix cache, and prompts that their groups share anyway",
        {**puzzles(prompt_chars=200), "engine.enable_prefix_caching": False},
    ),
    "healthy-talk": Plant(None, "conversations of two turns", talk()),
    "healthy-rare": Plant(
        None,
        "checkpoints and evaluations now and then",
        {"run.checkpoint_every": 10, "rollouts.evaluation": {"num_tasks": 4, "every": 10}},
    ),
    # ── rewards, tasks, environments ──
    "reward-waits": Plant("slow_reward", "each score waits 20 ms for something", puzzles(score_s=0.02)),
    "reward-computes": Plant("slow_reward", "each score computes for a while in Python", puzzles(score_loops=200_000)),
    "reward-delayed": Plant("slow_reward", "the rewards of a step take 0.4 s longer", fix={}, delays={"rollouts.reward": 0.4}),
    "reward-waits-lag": Plant(
        "slow_reward", "each score waits 30 ms, beside the trainer", {**puzzles(score_s=0.03), "buffer.max_lag": 1}
    ),
    "task-waits": Plant("loading_stall", "each task is read in 60 ms", puzzles(task_s=0.06), puzzles(task_s=0.0)),
    "prompts-delayed": Plant("loading_stall", "a slow tokenizer", fix={}, delays={"rollouts.prompts": 0.3}),
    "scores-fail": Plant("failed_attempts", "a third of the scores raises", puzzles(fails=0.33), puzzles(fails=0.0)),
    "one-worker": Plant("serial_episodes", "games take turns in one thread", board(0.008, workers=1)),
    "four-workers": Plant("serial_episodes", "32 games share four threads", board(0.03, workers=4)),
    "game-in-the-loop": Plant("serial_episodes", "games block the event loop", board(0.006, run_in="loop")),
    "environments-lockstep": Plant("no_overlap", "environments that await, and a lag of 0", talk(turns=3, wait_s=0.15)),
    "replies-again": Plant(
        "retokenising",
        "each of four turns is rendered and encoded from the beginning",
        {**talk(turns=4, says=24), "rollouts.environment.keep_replies": False},
    ),
    "evaluates-always": Plant(
        "frequent_evaluation",
        "32 held-out tasks after each step",
        {"rollouts.evaluation": {"num_tasks": 32, "every": 1}},
    ),
    # ── engine ──
    "eight-rows": Plant("low_concurrency", "eight sequences are decoded at once", {"engine.max_num_seqs": 8}),
    "sixteen-rows": Plant("low_concurrency", "sixteen sequences are decoded at once", {"engine.max_num_seqs": 16}),
    "no-prefix-cache-talk": Plant(
        "prefix_cache_off",
        "conversations of four turns, and no prefix cache",
        {**talk(turns=4, says=24), "engine.enable_prefix_caching": False},
    ),
    "no-prefix-cache-long-talk": Plant(
        "prefix_cache_off",
        "conversations of six turns, and no prefix cache",
        {**talk(turns=6, says=24), "engine.enable_prefix_caching": False},
    ),
    "small-cache": Plant(
        "preemption",
        "a KV cache of 70 blocks for answers of 64 tokens",
        {"engine.kv_cache_memory_bytes": 70 << 13, "rollouts.max_new_tokens": 64},
    ),
    "small-cache-long-prompts": Plant(
        "kv_cache_too_small",
        "a KV cache that holds a quarter of the prompts",
        {**puzzles(prompt_chars=400), "engine.kv_cache_memory_bytes": 40 << 13, "rollouts.max_new_tokens": 8},
    ),
    "texts-repeat": Plant(
        "speculation_off",
        "eight attempts that repeat themselves and each other, and nothing is guessed",
        {
            **puzzles(prompt_chars=200),
            "rollouts.temperature": 0.05,
            "rollouts.groups_per_step": 2,
            "rollouts.group_size": 4,
            "rollouts.max_new_tokens": 200,
        },
    ),
    "healthy-long-texts": Plant(
        None,
        "eight attempts that repeat nothing",
        {
            **puzzles(prompt_chars=200),
            "rollouts.groups_per_step": 2,
            "rollouts.group_size": 4,
            "rollouts.max_new_tokens": 200,
        },
    ),
    # ── trainer ──
    "small-pieces": Plant("micro_batch_too_small", "micro-batches of 64 tokens", {"trainer.max_tokens_per_micro_batch": 64}),
    "recomputes": Plant(
        "checkpointing_not_needed",
        "whole layers are computed again in the backward pass",
        {"trainer.gradient_checkpointing": "full", **puzzles(prompt_chars=200), "rollouts.max_new_tokens": 8},
    ),
    "logprobs-twice": Plant(
        "double_forward",
        "four updates a step, old logprobs computed again",
        {"trainer.mini_batches": 4, "trainer.recompute_old_logprobs": True},
    ),
    "uneven-ranks": Plant(
        "imbalance",
        "two ranks, and one attempt of four that is told fifty times as much",
        {
            **talk(turns=4, says=4, long_says=200, long_every=4),
            "rollouts.max_new_tokens": 4,
            "rollouts.groups_per_step": 2,
            "rollouts.group_size": 2,
        },
        ranks=2,
    ),
    # ── between the stages ──
    "few-long": Plant(
        "long_tail", "one attempt of sixteen has twelve turns, the others one", talk(turns=1, long_turns=12, long_every=16)
    ),
    "engine-apart": Plant("no_overlap", "an engine in a process of its own, in turn", {"placement.engines": 1}),
    "lag-too-small": Plant(
        "staleness_waits",
        "environments that await longer than a step, and a lag of 1",
        {**talk(turns=3, wait_s=0.8), "buffer.max_lag": 1},
    ),
    "weights-delayed": Plant("sync_stall", "new weights take 0.3 s", fix={}, delays={"weight_sync.publish": 0.3}),
    "store-delayed": Plant("serialisation", "a batch is packed in 0.25 s", fix={}, delays={"buffer.pack": 0.25}),
    "slow-disk": Plant(
        "io_bound",
        "a checkpoint after each step, on a disk that takes 1 s",
        {"run.checkpoint_every": 1},
        delays={"run.write_checkpoint": 1.0},
    ),
    # ── machine ──
    "first-step": Plant("slow_first_step", "something takes 4 s once", fix={}, first_delays={"trainer.forward": 4.0}),
    "busy-machine": Plant("noisy_neighbour", "four other processes want the cores", fix={}, neighbours=4),
}
"""Name → plant."""
