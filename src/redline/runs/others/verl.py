"""verl's logs (0.4 to 0.8): its file logger's JSONL, what it prints, TensorBoard, W&B."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from statistics import fmean
from typing import Any

from redline.runs.others.framework import Figures, Framework, Metrics, phases, setting, time_of, whole
from redline.runs.others.log import Log, Row

GIB = 2.0**30
METRICS: Metrics = {
    "critic/score/mean": ("rollouts/reward_mean", 1.0),
    "response_length/mean": ("rollouts/completion_tokens_mean", 1.0),
    "response_length/max": ("rollouts/completion_tokens_max", 1.0),
    "response_length/clip_ratio": ("rollouts/truncated_fraction", 1.0),
    "num_turns/mean": ("rollouts/turns_mean", 1.0),
    "num_turns/max": ("rollouts/turns_max", 1.0),
    "tool_call_counts/mean": ("rollouts/tool_calls_mean", 1.0),
    "actor/pg_loss": ("trainer/loss", 1.0),
    "actor/grad_norm": ("trainer/grad_norm", 1.0),
    "actor/lr": ("trainer/learning_rate", 1.0),
    "actor/entropy": ("trainer/entropy", 1.0),
    "actor/entropy_loss": ("trainer/entropy", 1.0),
    "actor/pg_clipfrac": ("trainer/clip_fraction", 1.0),
    "actor/kl_loss": ("trainer/kl", 1.0),
    "rollout_corr/k3_kl": ("trainer/mismatch_kl", 1.0),
    "perf/total_num_tokens": ("trainer/tokens", 1.0),
    "perf/mfu/actor": ("trainer/mfu", 1.0),
    "perf/max_memory_allocated_gb": ("memory/peak_bytes", GIB),
    "actor/perf/max_memory_allocated_gb": ("memory/peak_bytes", GIB),
    "timing_s/step": ("run/step_s", 1.0),
    "timing_s/old_log_prob": ("trainer/recompute_s", 1.0),
    "timing_s/ref": ("trainer/reference_s", 1.0),
    "timing_s/RefPolicy": ("trainer/reference_s", 1.0),
    "timing_s/values": ("trainer/values_s", 1.0),
    "timing_s/update_critic": ("trainer/critic_s", 1.0),
}
"""trainer/ppo/metric_utils.py, ray_trainer.py, workers/. The score is the reward before any KL penalty is taken from it."""
_PHASES = {
    "timing_s/gen": "generation",
    "timing_s/gen_max": "generation",
    "timing_s/reward": "reward",
    "timing_s/old_log_prob": "training",
    "timing_s/ref": "training",
    "timing_s/RefPolicy": "training",
    "timing_s/values": "training",
    "timing_s/adv": "data",
    "timing_s/dump_rollout_generations": "data",
    "timing_s/update_critic": "training",
    "timing_s/update_actor": "training",
    "timing_s/update_weights": "weight_sync",
    "timing_s/sync_rollout_weights": "weight_sync",
    "timing_s/param_sync": "weight_sync",
    "timing_s/testing": "evaluation",
    "timing_s/save_checkpoint": "checkpoint",
}
"""`marked_timer` directly inside `timing_s/step`; others lie inside these."""
_MAY_BE_AFTER = ("timing_s/testing", "timing_s/save_checkpoint")
"""Inside `timing_s/step` or after it, as the version has it."""
_BESIDE = ("timing_s/sync_rollout_weights", "timing_s/param_sync", "fully_async/")
"""Names of the recipes in which rollouts run beside the trainer: its `gen` is then a wait for them."""
_HELD_OUT = re.compile(r"val-core/.*/mean@\d+")


def is_beside(names: AbstractSet[str]) -> bool:
    """Whether rollouts ran beside the trainer."""
    return any(name.startswith(_BESIDE) for name in names)


def _rows(log: Log) -> Iterator[Row]:
    """Give the rows by verl's own step; its W&B rows are logged under it too."""
    for row in log.rows:
        step = row.values.get("training/global_step", row.step)
        yield Row(row.values, None if step is None else int(step), row.time)


def _derive(theirs: Mapping[str, float], row: Figures, names: AbstractSet[str]) -> None:
    """Add the phases, the engine's speed, and how evenly sequences were divided among ranks. The names of all rows say whether
    rollouts ran beside the trainer: weights may be synchronised in a few of them alone."""
    table = {**_PHASES, "timing_s/gen": "wait_for_rollouts"} if is_beside(names) else _PHASES
    phases(row, theirs, table)
    _add_what_came_after(theirs, row)
    if "critic/rewards/mean" in theirs:
        row.setdefault("rollouts/reward_mean", theirs["critic/rewards/mean"])
    per_token_ms = theirs.get("timing_per_token_ms/gen")
    if per_token_ms and per_token_ms > 0 and not is_beside(names):
        row["engine/tokens_per_s"] = 1e3 / per_token_ms
    mean, most = theirs.get("global_seqlen/mean"), theirs.get("global_seqlen/balanced_max")
    if mean and most:
        row["trainer/imbalance"] = most / mean


def _add_what_came_after(theirs: Mapping[str, float], row: Figures) -> None:
    """Make the step as long as its phases, where these say that it was tested or saved after `timing_s/step` had ended."""
    known = sum(value for name, value in row.items() if name.startswith("timeline/"))
    for name in _MAY_BE_AFTER:
        seconds = time_of(theirs, name)
        if seconds is not None and "run/step_s" in row and known > row["run/step_s"] * (1 + 1e-6):
            row["run/step_s"] += seconds


def _evaluated(theirs: Mapping[str, float]) -> float | None:
    """Return the mean over the data sets of their main figure."""
    found = [value for name, value in theirs.items() if _HELD_OUT.fullmatch(name)]
    return fmean(found) if found else None


def _settings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": whole(setting(config, "trainer.total_training_steps")) or 0},
        "model": {"path": str(setting(config, "actor_rollout_ref.model.path") or "")},
        "trainer": {"algorithm": str(setting(config, "algorithm.adv_estimator") or "")},
        "rollouts": {"group_size": whole(setting(config, "actor_rollout_ref.rollout.n")) or 0},
        "buffer": {"max_lag": 0},
    }


def _devices(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return those of `trainer`, which sample too unless there is a section `rollout` beside it."""
    return _gpus(config, "trainer"), _gpus(config, "rollout")


def _gpus(config: Mapping[str, Any], section: str) -> int:
    nodes, each = (whole(setting(config, f"{section}.{name}")) for name in ("nnodes", "n_gpus_per_node"))
    return (nodes or 0) * (each or 0)


VERL = Framework(
    "verl",
    "verl",
    METRICS,
    ("timing_s/", "timing_per_token_ms/", "critic/score/mean", "actor/pg_loss", "response_length/mean"),
    _rows,
    _derive,
    _evaluated,
    _settings,
    _devices,
)
