"""C2: a GRPO step of redline against one of TRL, on the CPU, interleaved.

    python benchmarks/c2/compare.py --trl-python .venv-trl/bin/python --pairs 10 --save benchmarks/results/cpu/c2.json

Same model (SmolLM2-135M-Instruct), task (`chain_sum`, 2 terms, 1 digit), sizes (8 prompts x 8 completions, at most 64 new
tokens) and learning rate on both sides. Each side is a process of its own that keeps its model loaded and takes one step when
told to, while the other one sleeps. Which side goes first is decided by lot in every pair, so drift of the machine hits both.

TRL lives in an environment of its own: `pip install torch==2.13.0 trl==1.16.0 reasoning-gym datasets accelerate`.
The speed-up is the ratio of TRL's seconds to redline's; its interval is Hodges-Lehmann over the log ratios. The last line
of stdout is one JSON document. The physical bound of the step (its products at the rate of a large bfloat16 product on this
machine) is computed from redline's own tokens and stated beside the result.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

from redline.models.sources import model_folder
from redline.telemetry import describe_environment

HERE = Path(__file__).parent
PARAMETERS, EMBEDDING = 134.5e6, 28.3e6
"""Of SmolLM2-135M; the embedding is tied, so it takes part in products only where logits are needed."""


class Side:
    """One framework in its own process."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        self._read()  # ready

    def step(self) -> dict[str, float]:
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, float]:
        """The next JSON line; frameworks print other things too."""
        for line in self.process.stdout:
            if line.startswith('{"c2"'):
                return json.loads(line)["c2"]
        raise SystemExit(f"{self.name} ended early with exit code {self.process.wait()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="python of an environment with trl")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    model = str(model_folder("builtin:smollm2-135m-instruct"))
    peak = matmul_rate()
    sides = [
        Side("redline", [sys.executable, str(HERE / "redline_side.py"), str(args.pairs), str(args.seed)]),
        Side("trl", [args.trl_python, str(HERE / "trl_side.py"), model, str(args.pairs), str(args.seed)]),
    ]
    rows = []
    order = random.Random(args.seed)
    for pair in range(args.pairs):
        order.shuffle(sides)
        row = {side.name: side.step() for side in sides}
        rows.append(row)
        ours, theirs = row["redline"], row["trl"]
        print(
            f"pair {pair + 1}: redline {ours['step_s']:.1f} s ({ours['mean_tokens']:.0f} tokens), "
            f"trl {theirs['step_s']:.1f} s ({theirs['mean_tokens']:.0f} tokens), {theirs['step_s'] / ours['step_s']:.1f}x",
            file=sys.stderr,
        )
    for side in sides:
        side.process.stdin.close()
        side.process.wait()
    document = report(rows, peak)
    if args.save:
        args.save.parent.mkdir(parents=True, exist_ok=True)
        args.save.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


def report(rows: list[dict], peak: float) -> dict:
    log_ratios = [math.log(row["trl"]["step_s"] / row["redline"]["step_s"]) for row in rows]
    ratio, low, high = (math.exp(value) for value in hodges_lehmann(log_ratios))
    ours, theirs = (statistics.median(row[side]["step_s"] for row in rows) for side in ("redline", "trl"))
    # Six operations per parameter and trained-through token, two per sampled or prefilled one, logits only where needed.
    floor = statistics.median(bound_s(row["redline"], peak) for row in rows)
    return {
        "case": "c2",
        "identity": describe_environment(),
        "results": [
            {
                "name": "GRPO step, 8 x 8 completions of at most 64 tokens",
                "value": ours,
                "unit": "s",
                "samples": rows,
                "bound": {"value": floor, "why": f"products at the {peak / 1e12:.2f} TFLOP/s of a 2048³ bfloat16 product here"},
                "fraction_of_bound": floor / ours,
                "peer": {"name": "TRL", "value": theirs, "ratio": ratio, "interval_95": [low, high], "pairs": len(rows)},
            }
        ],
    }


def bound_s(row: dict[str, float], peak: float) -> float:
    body = PARAMETERS - EMBEDDING
    trained = 6 * body * row["trainer_tokens"] + 6 * EMBEDDING * row["trained_tokens"]
    sampled = 2 * PARAMETERS * row["new_tokens"] + 2 * body * row["prompt_tokens"]
    return (trained + sampled) / peak


def matmul_rate() -> float:
    """FLOP/s of a large bfloat16 product, the best of several."""
    a, b = (torch.randn(2048, 2048, dtype=torch.bfloat16) for _ in range(2))
    best = math.inf
    for _ in range(20):
        started = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - started)
    return 2 * 2048**3 / best


def hodges_lehmann(values: list[float], level: float = 0.95) -> tuple[float, float, float]:
    """The median of all pairwise means, and the interval that inverts the signed-rank test."""
    n = len(values)
    walsh = sorted((a + b) / 2 for a, b in itertools.combinations_with_replacement(values, 2))
    middle = (walsh[(len(walsh) - 1) // 2] + walsh[len(walsh) // 2]) / 2
    counts = [1]  # of sign assignments by their rank sum, exactly
    for rank in range(1, n + 1):
        padded = [0] * (len(counts) + rank)
        for total, count in enumerate(counts):
            padded[total] += count
            padded[total + rank] += count
        counts = padded
    tail, cut = 0.0, -1
    while (tail := tail + counts[cut + 1] / 2**n) <= (1 - level) / 2:
        cut += 1
    if cut < 0:
        raise SystemExit(f"{n} pairs are too few for a {level:.0%} interval; take at least 6")
    return middle, walsh[cut], walsh[-1 - cut]


if __name__ == "__main__":
    main()
