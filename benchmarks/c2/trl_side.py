"""The TRL side of C2: its GRPOTrainer on the same model, task and sizes, one step for every line on stdin. Needs no redline.

bfloat16 autocast and micro-batches of 16 are what was fastest for TRL on this workload."""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time

import reasoning_gym
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

MICRO_BATCH = 16


class StepOnDemand(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        sys.stdin.readline()
        self.started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.step_s = time.perf_counter() - self.started

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "reward" in logs:
            say({"step_s": self.step_s, "reward": float(logs["reward"]), "mean_tokens": float(logs["completions/mean_length"])})


def say(document: dict) -> None:
    print(json.dumps({"c2": document}), flush=True)


def main() -> None:
    model, steps, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    sums = reasoning_gym.create_dataset("chain_sum", size=2000, seed=1, min_terms=2, max_terms=2, min_digits=1, max_digits=1)

    def reward(completions, index, **kwargs):
        texts = [completion[0]["content"] for completion in completions]
        numbers = [re.findall(r"-?\d+", text.replace(",", "")) for text in texts]
        return [float(bool(n) and sums.score_answer(n[-1], sums[i]) >= 0.99) for n, i in zip(numbers, index, strict=True)]

    prompts = [[{"role": "user", "content": sums[i]["question"] + "\nGive only the final answer."}] for i in range(2000)]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=True,
            bf16=True,
            per_device_train_batch_size=MICRO_BATCH,
            gradient_accumulation_steps=64 // MICRO_BATCH,
            num_generations=8,
            max_completion_length=64,
            temperature=1.0,
            beta=0.0,
            learning_rate=1e-5,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_steps=steps,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            seed=seed,
            gradient_checkpointing=False,
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
            reward_funcs=reward,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts, "index": list(range(2000))}),
            processing_class=AutoTokenizer.from_pretrained(model),
            callbacks=[StepOnDemand()],
        )
        say({"ready": 1})
        trainer.train()


if __name__ == "__main__":
    main()
