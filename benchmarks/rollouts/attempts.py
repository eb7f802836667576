"""Record attempts for `redline bench generate replay=…`: the last two epochs of a run of `redline train` on word
problems.

    PYTHONPATH=src python benchmarks/rollouts/attempts.py benchmarks/rollouts/attempts.npz [--tasks 17] [--tokens 64]

SmolLM2-135M-Instruct reasons about sums, differences and products in words; 4 attempts a task, 8 tasks a step, two epochs take
about ten minutes of two CPU cores: attempts.npz is what this wrote. attempts-trained.npz is what a policy says that has been
trained for a while: `--group 8 --epochs 16 --learning-rate 3e-5 --largest 10 --tokens 80`, twenty minutes. What the policy said
is kept as token ids.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from redline.lab.material.attempts import Attempts, read_attempts, save_attempts

QUESTIONS = (
    ("Ann has {a} apples and buys {b} more. How many apples does she have?", lambda a, b: a + b),
    ("A bus carries {a} people. {b} get off. How many are left on it?", lambda a, b: a - b),
    ("A box holds {b} pencils. How many pencils are in {a} boxes?", lambda a, b: a * b),
    ("Tom walks {a} km on Monday and {b} km on Tuesday. How far does he walk in all?", lambda a, b: a + b),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", type=int, default=17)
    parser.add_argument("--tokens", type=int, default=64, help="of an attempt at most")
    parser.add_argument("--group", type=int, default=4, help="attempts at a task")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--largest", type=int, default=30, help="number in a question, and one more")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--threads", type=int, default=None, help="of the CPU; by default all")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = train(Path(folder), asked)
        attempts = Attempts([visits[-2:] for visits in read_attempts(run).visits])
    save_attempts(attempts, asked.out)
    lengths = [len(tokens) for visits in attempts.visits for visit in visits for tokens in visit]
    print(f"{len(attempts.visits)} tasks, {len(lengths)} attempts, {sum(lengths):,} tokens, {asked.out.stat().st_size:,} bytes")


def train(folder: Path, asked: argparse.Namespace) -> Path:
    """The run's folder."""
    drawn, per_step = np.random.default_rng(0), 8
    rows = []
    for number in range(asked.tasks):
        (question, answer), (a, b) = (
            QUESTIONS[number % len(QUESTIONS)],
            sorted(drawn.integers(2, asked.largest, 2).tolist(), reverse=True),
        )
        rows.append({"question": question.format(a=a, b=b), "answer": str(answer(a, b))})
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = {
        "run": {
            "name": "attempts",
            "steps": asked.epochs * asked.tasks // per_step,
            "folder": str(folder),
            "num_threads": asked.threads,
        },
        "model": {"path": "builtin:smollm2-135m-instruct"},
        "rollouts": {
            "task": {
                "kind": "file",
                "path": str(folder / "questions.jsonl"),
                "prompt_field": "question",
                "answer_field": "answer",
                "extract": "last_number",
                "held_out_fraction": 0.05,
            },
            "system_prompt": "Think step by step, then say the number.",
            "groups_per_step": per_step,
            "group_size": asked.group,
            "max_new_tokens": asked.tokens,
            "evaluation": {"num_tasks": 0},
        },
        "trainer": {"learning_rate": asked.learning_rate, "max_tokens_per_micro_batch": 4096},
    }
    (folder / "recipe.json").write_text(json.dumps(recipe))
    subprocess.run([sys.executable, "-m", "redline", "train", str(folder / "recipe.json")], check=True)
    return next(path.parent for path in folder.rglob("metrics.jsonl"))


if __name__ == "__main__":
    main()
