"""Run folders as a run of any length leaves them, written in a moment: for tests of whoever reads them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from support.fakes import trajectory
from support.paths import ROOT
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from redline.buffer.store.trajectory_store import TrajectoryStore
from redline.config import load_recipe, resolve
from redline.telemetry import RunFolder
from redline.types import Failure, TrajectoryGroup

SMOKE = ROOT / "recipes" / "smoke.yaml"
BEGIN = 1_767_225_600.0


def write_run(path: Path, steps: int, *, total: int | None = None, max_lag: int = 2, closed: bool = True) -> RunFolder:
    """`steps` of `total` steps with samples, evaluations and a ledger; one that is not `closed` was killed."""
    path.mkdir(parents=True)
    folder = RunFolder(path)
    total = total or steps
    config = resolve(load_recipe(SMOKE, [f"run.steps={total}", f"buffer.max_lag={max_lag}", "run.device=cpu"])).config
    folder.config.write_text(json.dumps(config.model_dump(mode="json")))
    folder.environment.write_text(
        json.dumps({"started": "2026-01-01T00:00:00+00:00", "cpu": {"model": "a CPU", "usable_cores": 2}})
    )
    append(folder.metrics, (step_row(step, total) for step in range(1, steps + 1)))
    append(path / "samples.jsonl", (sample_row(second) for second in range(min(steps, 2000))))
    append(
        folder.evaluations,
        (
            {"step": step, "evaluation/reward_mean": learnt(step, total), "evaluation/num_answers": 200}
            for step in range(0, steps + 1, max(1, steps // 8))
        ),
    )
    if closed:
        folder.ledger.write_text(json.dumps({"lanes": {"main": lane("trainer.backward"), "rollouts": lane("engine.decode")}}))
    return folder


def append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def learnt(step: int, total: int) -> float:
    return 1 / (1 + math.exp(6 - 18 * step / total))


def step_row(step: int, total: int) -> dict[str, Any]:
    """Learning that levels off, speeds that vary, a trainer that waits a third of its time."""
    noise = random.Random(step)
    generation, training, wait = 0.02, noise.uniform(0.5, 0.7), noise.expovariate(3.0)
    return {
        "step": step,
        "rollouts/reward_mean": min(1.0, max(0.0, learnt(step, total) + noise.gauss(0, 0.06))),
        "rollouts/failures": int(noise.random() < 0.05),
        "rollouts/completion_tokens_mean": 200 + 80 * learnt(step, total) + noise.gauss(0, 9),
        "rollouts/groups": 8,
        "rollouts/groups_with_signal": noise.randint(2, 8),
        "engine/tokens_per_s": noise.gauss(9000, 400),
        "engine/kv_use_peak": noise.uniform(0.3, 0.5),
        "buffer/policy_lag_steps": noise.randint(0, 2),
        "trainer/loss": noise.gauss(0, 0.01),
        "trainer/entropy": None if step % 97 == 0 else 2 * math.exp(-3 * step / total) + noise.gauss(0, 0.02),
        "trainer/grad_norm": abs(noise.gauss(1, 0.2)),
        "trainer/mismatch_kl": abs(noise.gauss(0, 1e-3)),
        "trainer/tokens_per_s": noise.gauss(15000, 700),
        "trainer/skipped": False,
        "weight_sync/bytes_moved": 0,
        "run/step_s": generation + training + wait + 0.01,
        "timeline/generation_s": generation,
        "timeline/training_s": training,
        "timeline/wait_for_rollouts_s": wait,
        "timeline/unaccounted_s": 0.01,
        **{f"custom/value_{k}": noise.random() for k in range(20)},
    }


def sample_row(second: int) -> dict[str, Any]:
    noise = random.Random(second)
    return {
        "time": BEGIN + second,
        "host/cpu_percent": noise.uniform(150, 200),
        "host/children_rss_bytes": 0,
        "host/total_bytes": 2**34,
        "host/rss_bytes": 2**30 + noise.randint(0, 2**26),
        "memory/weights_bytes": 2**28,
        "memory/kv_cache_bytes": 2**29,
        "memory/other_bytes": noise.randint(2**27, 2**28),
        "memory/peak_bytes": 2**31,
    }


def lane(work: str) -> dict[str, Any]:
    rows = {work: 60_000_000_000, "wait.for_rollouts" if work.startswith("trainer") else "wait.for_budget": 30_000_000_000}
    return {"wall_ns": 91_000_000_000, "rows": rows, "unaccounted_ns": 1_000_000_000}


def write_trajectories(folder: RunFolder, texts: Iterable[str], *, step: int) -> None:
    """A group per text, trained at `step`: one attempt said it, another failed with it."""
    texts = list(texts)
    folder.model.mkdir(exist_ok=True)
    Tokenizer(WordLevel({"what": 1, "now?": 2, "this": 3, "that": 4, "no": 5}, unk_token="what")).save(
        str(folder.model / "tokenizer.json")
    )
    store = TrajectoryStore(folder.trajectories)
    store.begin(range(len(texts)), step - 1)
    for number, text in enumerate(texts):
        said = trajectory([1, 2], [3, 4], version=step - 1, text=text, reward=1.0, reward_parts={text: 1.0})
        failed = trajectory([1, 2], [5], version=step - 1, text="no", failure=Failure("reward", text))
        store.add(TrajectoryGroup(text, [said, failed], np.array([0.5, -0.5], dtype=np.float32), number))
    store.lease(range(len(texts)), step - 1)
    store.trained(range(len(texts)), step - 1)
    store.close()
