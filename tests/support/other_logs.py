"""Logs as verl and prime-rl leave them, written in a moment: names and forms are those of their sources, figures are ours."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parents[1] / "unit" / "runs" / "others" / "recorded"
"""Logs of TRL, recorded by `record.py` beside them."""
GEN, REWARD, OLD_LOG_PROB, UPDATE, SYNC, STEP = 30.0, 6.0, 12.0, 40.0, 8.0, 100.0
"""Seconds of verl's steps below."""


def verl_row(step: int) -> dict[str, float]:
    """What verl 0.8 logs of a step of GRPO on two GPUs."""
    return {
        "global_seqlen/mean": 5000,
        "global_seqlen/balanced_max": 5500,
        "actor/entropy": 0.4 - step / 1000,
        "actor/pg_loss": 0.01,
        "actor/kl_loss": 0.001,
        "actor/pg_clipfrac": 0.002,
        "actor/grad_norm": 0.2,
        "actor/lr": 1e-6,
        "perf/mfu/actor": 0.35,
        "perf/max_memory_allocated_gb": 60.0,
        "training/global_step": step,
        "critic/score/mean": 0.2 + 0.02 * step,
        "critic/rewards/mean": 0.1 + 0.02 * step,
        "response_length/mean": 250.0,
        "response_length/max": 1000.0,
        "response_length/clip_ratio": 0.05,
        "timing_s/start_profile": 0.1,
        "timing_s/generate_sequences": 29.0,
        "timing_s/gen": GEN,
        "timing_s/reward": REWARD,
        "timing_s/old_log_prob": OLD_LOG_PROB,
        "timing_s/adv": 1.0,
        "timing_s/update_actor": UPDATE,
        "timing_s/update_weights": SYNC,
        "timing_s/step": STEP,
        "timing_per_token_ms/gen": 0.25,
        "perf/total_num_tokens": 10000,
        "perf/throughput": 50.0,
    }


def verl_rows(steps: int) -> Iterator[tuple[int, dict[str, float]]]:
    """The steps, and an evaluation before the first."""
    yield 0, {"val-core/openai/gsm8k/acc/mean@1": 0.25}
    for step in range(1, steps + 1):
        yield step, verl_row(step)


def write_verl(path: Path, steps: int = 10) -> Path:
    """What its file logger writes."""
    path.write_text("".join(json.dumps({"step": step, "data": row}) + "\n" for step, row in verl_rows(steps)))
    return path


def write_verl_console(path: Path, steps: int = 10) -> Path:
    """What its console logger prints, with what Ray puts before it and lines of others between."""
    with path.open("w") as file:
        for step, row in verl_rows(steps):
            pairs = " - ".join(f"{name}:{_printed(name, value)}" for name, value in row.items())
            file.write(f"\x1b[36m(TaskRunner pid=71)\x1b[0m step:{step} - {pairs}\n")
            file.write(f"Training Progress:  {step}%|█| {step}/100 [00:10<00:10, 1.00s/it]\n")
    return path


def _printed(name: str, value: float) -> str:
    return f"np.float64({value!r})" if name.startswith("critic/") else repr(value)


def prime_rows(steps: int) -> Iterator[dict[str, Any]]:
    """Rows of trainer and orchestrator of prime-rl 0.8, as both append them to one file."""
    for step in range(1, steps + 1):
        at = {"step": step, "time": 1000.0 + 20 * step}
        yield at | {
            "train/agg/effective/solver/reward/mean": 0.1 * step,
            "train/agg/effective/judge/reward/mean": 0.3,
            "train/agg/effective/num_output_tokens/mean": 500.0,
            "train/agg/effective/num_output_tokens/max": 800.0,
            "train/agg/all/has_error/mean": 0.1,
            "train/agg/all/solver/solved_none": 0.2,
            "train/agg/all/solver/solved_all": 0.1,
            "progress/rollouts": 64,
            "progress/tasks": 8,
            "off_policy/mean": 1.5,
            "off_policy/max": 3.0,
            "time/step": 18.0,
            "time/pack": 0.5,
            "time/save_ckpt": 0.0,
            "time/wait_for_policy": 6.0,
        }
        yield at | {"perf/throughput": 4000.0, "perf/mfu": 35.0, "perf/peak_memory": 40.0}
        yield at | {"optim/lr": 1e-6, "optim/grad_norm": 0.1}
        yield at | {"loss/mean": 0.01, "entropy/all/mean": 0.5, "mismatch_kl/all/mean": 0.001}
        yield at | {
            "time/step": 20.0,
            "time/wait_for_batch": 8.0,
            "time/load_data": 0.5,
            "time/broadcast_weights": 1.5,
            "time/save_ckpt": 1.0,
            "time/forward_backward": 9.0,
        }
    yield {"step": steps, "time": 2000.0, "eval/gsm8k/effective/solver/avg@4": 0.5}


def write_prime(path: Path, steps: int = 10) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in prime_rows(steps)))
    return path
