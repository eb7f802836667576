"""TRL's side of `redline bench e2e --against trl`: GRPOTrainer, one step for every line on stdin. Needs trl, and no redline:

    python trl_process.py '{"model": FOLDER, "tasks": FILE, "reward": "letters", "steps": 20, "group_size": 8, ...}'
    →  {"ready": VERSION}
    step  →  {"step_s": ..., "rollouts_s": ..., "reward": ..., "mean_tokens": ...}

bfloat16 autocast over float32 weights and micro-batches of 16 are what was fastest for TRL on small models."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MICRO_BATCH = 16


def main() -> None:
    # Whatever is printed on the way belongs to stderr; answers have the pipe to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    threading.Thread(target=end_with_parent, args=(os.getppid(),), daemon=True).start()
    work = json.loads(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        train(work, folder, lambda answer: print(json.dumps(answer), file=answers, flush=True))


def end_with_parent(parent: int) -> None:
    """A benchmark that was killed closes stdin, which is read between two steps, and a step may take minutes."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def train(work: dict[str, Any], folder: str, say: Callable[[dict[str, Any]], None]) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, __version__

    class StepOnDemand(TrainerCallback):  # type: ignore[misc, unused-ignore]
        """Holds the trainer before every step until it is told to go on."""

        step_s = started = 0.0
        rollouts_s = 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            if not sys.stdin.readline():
                sys.exit(0)
            self.rollouts_s, self.started = 0.0, time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.step_s = time.perf_counter() - self.started

        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
            if logs and "reward" in logs:
                reward, tokens = float(logs["reward"]), float(logs["completions/mean_length"])
                say({"step_s": self.step_s, "rollouts_s": self.rollouts_s, "reward": reward, "mean_tokens": tokens})

    tasks = json.loads(Path(work["tasks"]).read_text())
    rows, group = work["groups_per_step"] * work["group_size"], work["group_size"]
    micro_batch = math.gcd(rows, MICRO_BATCH)
    clock = StepOnDemand()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(work["model"], dtype=torch.float32),
        reward_funcs=REWARDS[work["reward"]],
        args=GRPOConfig(
            output_dir=folder,
            use_cpu=work["device"] == "cpu",
            bf16=work["dtype"] == "bfloat16",
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=rows // micro_batch,
            num_generations=group,
            max_completion_length=work["max_new_tokens"],
            temperature=1.0,
            beta=0.0,
            learning_rate=work["learning_rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_steps=work["steps"],
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=work["seed"],
            shuffle_dataset=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(tasks),
        processing_class=AutoTokenizer.from_pretrained(work["model"]),
        callbacks=[clock],
    )
    sample = trainer._generate_and_score_completions

    def timed_sample(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = sample(*args, **kwargs)
        clock.rollouts_s += time.perf_counter() - started
        return result

    trainer._generate_and_score_completions = timed_sample
    say({"ready": __version__})
    trainer.train()


def _texts(completions: list[Any]) -> list[str]:
    return [completion[0]["content"] for completion in completions]


def reward_letters(completions: list[Any], **kwargs: Any) -> list[float]:
    """The share of letters in an answer."""
    return [sum(c.isascii() and c.isalpha() for c in text) / max(1, len(text)) for text in _texts(completions)]


def reward_sums(completions: list[Any], answer: list[str], **kwargs: Any) -> list[float]:
    """Whether the last number of an answer is the sum."""
    numbers = [re.findall(r"-?\d+", text.replace(",", "")) for text in _texts(completions)]
    return [float(bool(found) and found[-1] == wanted) for found, wanted in zip(numbers, answer, strict=True)]


REWARDS = {"letters": reward_letters, "sums": reward_sums}

if __name__ == "__main__":
    main()
