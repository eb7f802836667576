"""The products of a decode step by every algorithm that cuBLASLt names, beside torch's choice.

    PYTHONPATH=src python benchmarks/kernels/decode_products.py [--rows 64,512] [--model random:qwen2.5-0.5b]

A product of every layer one after the other, each with weights of its own, as a CUDA graph: weights come from memory as in a
step, and the host has no part in it. Algorithms with and without memory of their own (`--workspace`), medians of `--rounds` in
which all take turns. "same bits" is the fastest whose results are torch's to the bit, "any" the fastest of all.

Leaves out: what lies between the products, and the power that a whole step leaves them.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels.cublas_lt import Matrix, Product
from redline.lab.material.networks import make_network

ROWS = (48, 64, 96, 128, 192, 256, 384, 512, 1024, 2048)
REPEATS = 4
"""Runs of a graph in each round."""


@dataclass(slots=True, frozen=True)
class Outcome:
    """Microseconds of one product."""

    name: str
    count: int
    """Products of a step."""
    torch_us: float
    same_us: float
    any_us: float

    def saved_ms(self, us: float) -> float:
        """In a step."""
        return (self.torch_us - us) * self.count / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=lambda text: tuple(map(int, text.split(","))), default=ROWS)
    parser.add_argument("--model", default="random:qwen2.5-0.5b")
    parser.add_argument("--workspace", type=int, default=32 * 2**20)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    weights = weights_of(asked.model)
    room = torch.empty(asked.workspace, dtype=torch.uint8, device="cuda")
    print(
        f"{'rows':>5} {'product':<8} {'torch':>8} {'same bits':>10} {'any':>8} us; saved {'same bits':>20} {'any':>8} ms a step"
    )
    for rows in asked.rows:
        outcomes = [race_of(name, each, rows, room, asked.rounds) for name, each in weights.items()]
        for one in outcomes:
            saved = f"{one.saved_ms(one.same_us):10.3f} {one.saved_ms(one.any_us):8.3f}"
            times = f"{one.torch_us:8.2f} {one.same_us:10.2f} {one.any_us:8.2f}"
            print(f"{rows:5} {one.name:<8} {times} {'':19} {saved}", flush=True)
        same, best = (sum(one.saved_ms(getattr(one, us)) for one in outcomes) for us in ("same_us", "any_us"))
        print(f"{rows:5} {'all':<56} {same:10.3f} {best:8.3f}", flush=True)


def weights_of(model: str) -> dict[str, list[Tensor]]:
    """By name, those of every layer."""
    decoder = make_network(model, torch.device("cuda"), torch.bfloat16, seed=0).decoder
    layers = {name: [getattr(layer, name).weight for layer in decoder.layers] for name in ("qkv", "o", "gate_up", "down")}
    return {**layers, "head": [decoder.output_weight]}


def race_of(name: str, weights: list[Tensor], rows: int, room: Tensor, rounds: int) -> Outcome:
    N, K = weights[0].shape
    x, out = torch.randn(rows, K, device="cuda").bfloat16(), torch.empty(rows, N, device="cuda", dtype=torch.bfloat16)
    product = Product(Matrix(rows, K, x.dtype), Matrix(N, K, x.dtype, transposed=True), out.dtype, 0)
    graphs: dict[int, torch.cuda.CUDAGraph] = {-1: captured(lambda: [F.linear(x, weight) for weight in weights])}
    expected, same = F.linear(x, weights[0]), [-1]
    for number, algorithm in enumerate(product.algorithms(room.nbytes)):
        if not product.run(algorithm, x, weights[0], out, workspace=room):
            continue
        same += [number] if torch.equal(out, expected) else []
        graphs[number] = captured(lambda a=algorithm: [product.run(a, x, weight, out, workspace=room) for weight in weights])
    times: dict[int, list[float]] = {number: [] for number in graphs}
    for _ in range(rounds):
        for number, graph in graphs.items():
            times[number].append(microseconds(graph) / len(weights))
    medians = {number: statistics.median(each) for number, each in times.items()}
    return Outcome(name, len(weights), medians[-1], min(medians[number] for number in same), min(medians.values()))


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def microseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / REPEATS


if __name__ == "__main__":
    main()
