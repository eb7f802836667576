"""prime-rl's logs (0.4 to 0.8): metrics.jsonl, W&B. Trainer and orchestrator write rows of their own, and both call something
`time/step`."""

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
    "reward": ("rollouts/reward_mean", 1.0),
    "progress/rollouts": ("rollouts/attempts", 1.0),
    "progress/tasks": ("rollouts/groups", 1.0),
    "train/agg/effective/num_output_tokens/mean": ("rollouts/completion_tokens_mean", 1.0),
    "train/agg/effective/num_output_tokens/max": ("rollouts/completion_tokens_max", 1.0),
    "train/agg/effective/num_turns/mean": ("rollouts/turns_mean", 1.0),
    "train/agg/effective/num_turns/max": ("rollouts/turns_max", 1.0),
    "train/agg/all/has_error/mean": ("rollouts/failed_fraction", 1.0),
    "truncated": ("rollouts/truncated_fraction", 1.0),
    "no_signal": ("rollouts/no_signal_fraction", 1.0),
    "off_policy/mean": ("buffer/lag_mean", 1.0),
    "off_policy/max": ("buffer/policy_lag_steps", 1.0),
    "off_policy/dropped": ("buffer/dropped_late", 1.0),
    "loss/mean": ("trainer/loss", 1.0),
    "optim/grad_norm": ("trainer/grad_norm", 1.0),
    "optim/lr": ("trainer/learning_rate", 1.0),
    "entropy/all/mean": ("trainer/entropy", 1.0),
    "entropy/mean": ("trainer/entropy", 1.0),
    "mismatch_kl/all/mean": ("trainer/mismatch_kl", 1.0),
    "mismatch_kl/mean": ("trainer/mismatch_kl", 1.0),
    "perf/throughput": ("trainer/tokens_per_s", 1.0),
    "perf/mfu": ("trainer/mfu", 0.01),
    "perf/peak_memory": ("memory/peak_bytes", GIB),
    "trainer/time/step": ("run/step_s", 1.0),
    "inference/agg/kv_cache_usage_perc/max": ("engine/kv_use_peak", 1.0),
    "inference/agg/num_requests_running/mean": ("engine/running", 1.0),
    "inference/agg/num_requests_waiting/mean": ("engine/waiting", 1.0),
    "inference/agg/prefix_cache_hit_rate/pooled": ("engine/prefix_hit_rate", 1.0),
    "inference/agg/generation_tokens_total:rate/sum": ("engine/tokens_per_s", 1.0),
}
"""trainer/rl/train.py, orchestrator/orchestrator.py, orchestrator/metrics.py. `perf/mfu` is in percent, memory in GiB."""
_PHASES = {
    "trainer/time/wait_for_batch": "wait_for_rollouts",
    "trainer/time/load_data": "data",
    "trainer/time/forward_backward": "training",
    "trainer/time/broadcast_weights": "weight_sync",
    "trainer/time/save_ckpt": "checkpoint",
}
"""Parts of the trainer's step; `forward_backward` has the update in it."""
_ROLLOUTS_PHASES = {
    "orchestrator/time/wait_for_policy": "wait_for_budget",
    "orchestrator/time/pack": "data",
    "orchestrator/time/save_ckpt": "checkpoint",
}
"""Parts of the orchestrator's step; the rest is sampling and scoring, which it does not tell apart."""
_AGENTS = {
    "reward": re.compile(r"train/agg/effective/[^/]+/reward/mean|reward/(all/)?mean"),
    "truncated": re.compile(r"train/agg/effective/[^/]+/is_truncated/mean|is_truncated/(all/)?mean"),
}
"""Figures that are logged for each agent of an environment, or in earlier versions for all."""
_WITHOUT_SIGNAL = re.compile(r"train/agg/all/[^/]+/(solved_none|solved_all)")
_HELD_OUT = re.compile(r"eval/[^/]+/effective/[^/]+/avg@\d+|eval/[^/]+/avg@\d+")
_ORCHESTRATOR = ("time/wait_for_policy", "progress/rollouts", "time/pack")


def _rows(log: Log) -> Iterator[Row]:
    """Give the rows by step, `time/` with the name of its writer before it. Figures of the inference servers have no step; they
    belong to the one that is logged next."""
    servers: dict[str, float] = {}
    for row in log.rows:
        step = row.values.get("step", row.step if log.kind != "W&B" else None)
        if step is None:
            servers |= row.values
            continue
        writer = "orchestrator" if any(name in row.values for name in _ORCHESTRATOR) else "trainer"
        values = {f"{writer}/{name}" if name.startswith("time/") else name: value for name, value in row.values.items()}
        values.pop("step", None)
        yield Row(values | servers | _joined(values), int(step), row.time)
        servers = {}


def _joined(values: Mapping[str, float]) -> dict[str, float]:
    """Return the means over agents, and the share of groups in which all attempts did equally well."""
    found = {name: [values[each] for each in values if pattern.fullmatch(each)] for name, pattern in _AGENTS.items()}
    joined = {name: fmean(each) for name, each in found.items() if each}
    alike = [value for name, value in values.items() if _WITHOUT_SIGNAL.fullmatch(name)]
    agents = sum(name.endswith("/solved_none") for name in values if _WITHOUT_SIGNAL.fullmatch(name))
    return joined | ({"no_signal": sum(alike) / agents} if agents else {})


def _derive(theirs: Mapping[str, float], row: Figures, names: AbstractSet[str]) -> None:
    """Add the phases of the trainer's step, and of the orchestrator's beside it."""
    phases(row, theirs, _PHASES)
    phases(row, theirs, _ROLLOUTS_PHASES, "timeline_rollouts/")
    step = time_of(theirs, "orchestrator/time/step")
    if step is not None:
        known = sum(value for name, value in row.items() if name.startswith("timeline_rollouts/"))
        row["timeline_rollouts/generation_s"] = max(0.0, step - known)
        row.setdefault("run/step_s", step)  # where the trainer's log is not at hand


def _evaluated(theirs: Mapping[str, float]) -> float | None:
    """Return the mean over the environments, and over the agents of each."""
    found = [value for name, value in theirs.items() if _HELD_OUT.fullmatch(name)]
    return fmean(found) if found else None


def _settings(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "run": {"steps": whole(config.get("max_steps")) or 0},
        "model": {"path": str(setting(config, "model.name") or "")},
        "trainer": {"algorithm": ""},
        "rollouts": {"group_size": whole(config.get("group_size") or config.get("rollouts_per_example")) or 0},
        "buffer": {"max_lag": 1},
    }


def _devices(config: Mapping[str, Any]) -> tuple[int, int]:
    trainers, engines = (whole(setting(config, f"deployment.num_{part}_gpus")) for part in ("train", "infer"))
    return trainers or 0, engines or 0


PRIME_RL = Framework(
    "prime-rl",
    "prime_rl",
    METRICS,
    ("time/forward_backward", "time/wait_for_batch", "time/wait_for_policy", "train/agg/", "progress/total_rollouts"),
    _rows,
    _derive,
    _evaluated,
    _settings,
    _devices,
    samples_apart=True,
)
