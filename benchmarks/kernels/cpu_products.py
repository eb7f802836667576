"""Products of few rows on a CPU, ours beside torch's library, in turn: GFLOP/s, the best of several rounds.

    PYTHONPATH=src python benchmarks/kernels/cpu_products.py [--outputs 3072] [--inputs 576] [--dtype bfloat16]

Weights come in turn out of 60 MB, so that no cache holds them. Also says by how much the results differ at most.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.models.layers.few_rows import products_of

ROWS = (1, 4, 8, 16, 32, 64, 128)
ROUNDS, CALLS = 5, 40
BYTES = 60e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--outputs", type=int, default=3072)
    parser.add_argument("--inputs", type=int, default=576)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    asked = parser.parse_args()
    dtype, size = getattr(torch, asked.dtype), asked.outputs * asked.inputs
    weights = [torch.randn(asked.outputs, asked.inputs).to(dtype) for _ in range(max(1, int(BYTES / size / dtype.itemsize)))]
    own = products_of(weights[0])
    assert own is not None, "no C here"
    for rows in ROWS:
        x, best = torch.randn(rows, asked.inputs).to(dtype), {"torch": 0.0, "ours": 0.0}
        for _ in range(ROUNDS):
            for name, product in {"torch": F.linear, "ours": own.product}.items():
                best[name] = max(best[name], 2e-9 * rows * size / seconds(product, x, weights))
        off = float((own.product(x, weights[0]) - F.linear(x, weights[0])).abs().max())
        print(f"{rows:4} rows  torch {best['torch']:6.1f}  ours {best['ours']:6.1f} GFLOP/s, {off:.0e} apart")


def seconds(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> float:
    began = time.perf_counter()
    for weight in itertools.islice(itertools.cycle(weights), CALLS):
        product(x, weight)
    return (time.perf_counter() - began) / CALLS


if __name__ == "__main__":
    main()
