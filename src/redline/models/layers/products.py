"""The products of a training step on a GPU, each by the algorithm that is fastest for its shape.

cuBLAS chooses among its algorithms by a rule, and for the tall and narrow products of a step another one of its own is up to a
sixth faster. So the first product of a kind tries those that cuBLASLt names, and the ones after it take the best. Only
algorithms that give the same bits as torch's product count, so that nothing but time hangs on which of them wins.

    forward       x_TK @ weightᵀ            [T, N]             T tokens; a weight [N, K]
    backward      grad_TN @ weight          [T, K]
    gradient      grad_TNᵀ @ x_TK           float32 [N, K], set or added

Numbers of tokens that are close to each other are one kind: an octave has `PER_OCTAVE` of them. Autograd knows nothing of these
products; the caller has the gradients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.kernels import cublas_lt
from redline.kernels.cublas_lt import Matrix, Product

FEWEST_TOKENS = 1024
"""Below, a product takes the host longer than the device."""
PER_OCTAVE = 8
LEAST_GAIN = 0.01
"""The least share of the time gained; less is not told from chance."""
ROUNDS = 5
ROUND_MS = 0.5
"""Milliseconds for each algorithm in each round, however many runs that takes."""
COMPARED_ROWS = 64
FEWEST_VALUES = 100
"""Different numbers in a result, without which equal bits say nothing: all algorithms agree on zeros."""

Name = Literal["forward", "backward", "gradient"]
Kind = tuple[Name, int, int, int, torch.dtype, int]
"""Which product, the columns of its first factor and of the result, the kind of T, dtype, and device."""

_chosen: dict[Kind, Any] = {}
"""An algorithm for each kind, None where torch's is best."""


def forward(x_TK: Tensor, weight_NK: Tensor) -> Tensor:
    """x @ weightᵀ."""
    (T, _), (N, _) = x_TK.shape, weight_NK.shape
    if not _takes(x_TK, weight_NK, N):
        return F.linear(x_TK, weight_NK)
    out_TN = x_TK.new_empty(T, N)
    _run("forward", x_TK, weight_NK, out_TN, lambda: torch.mm(x_TK, weight_NK.T, out=out_TN))
    return out_TN


def backward(grad_TN: Tensor, weight_NK: Tensor, out: Tensor | None = None) -> Tensor:
    """grad @ weight, into `out` if there is one."""
    (T, _), (_, K) = grad_TN.shape, weight_NK.shape
    out_TK = grad_TN.new_empty(T, K) if out is None else out
    if _takes(grad_TN, weight_NK, K):
        _run("backward", grad_TN, weight_NK, out_TK, lambda: torch.mm(grad_TN, weight_NK, out=out_TK))
    else:
        torch.mm(grad_TN, weight_NK, out=out_TK)
    return out_TK


def gradient_(total_NK: Tensor, grad_TN: Tensor, x_TK: Tensor, *, is_first: bool) -> None:
    """gradᵀ @ x, which the float32 total becomes, or is added to it."""

    def by_torch() -> None:
        torch.addmm(total_NK, grad_TN.T, x_TK, beta=0 if is_first else 1, out_dtype=torch.float32, out=total_NK)

    if _takes(grad_TN, x_TK, total_NK.shape[1]):
        _run("gradient", grad_TN, x_TK, total_NK, by_torch, add=not is_first)
    else:
        by_torch()


def _takes(left: Tensor, right: Tensor, columns: int) -> bool:
    """Whether there is a choice: a large product of float16 or bfloat16 whose rows begin where cuBLASLt wants them."""
    dtype, (T, inner) = left.dtype, left.shape
    if not left.is_cuda or T < FEWEST_TOKENS or (dtype is not torch.bfloat16 and dtype is not torch.float16):
        return False
    width = dtype.itemsize * (inner | right.shape[1] | columns)
    aligned = (width | left.data_ptr() | right.data_ptr()) % cublas_lt.ALIGNMENT == 0
    return aligned and left.is_contiguous() and right.is_contiguous() and cublas_lt.is_there()


def _run(name: Name, left: Tensor, right: Tensor, out: Tensor, by_torch: Callable[[], object], *, add: bool = False) -> None:
    T, inner = left.shape
    kind = (name, inner, out.shape[1], kind_of(T), left.dtype, left.get_device())
    if kind not in _chosen:
        if add or torch.cuda.is_current_stream_capturing():  # nothing is added more than once, and a capture cannot wait
            by_torch()
            return
        _choose(kind, _product(name, left, right, out), left, right, out, by_torch)
    algorithm = _chosen.get(kind)
    if algorithm is None or not _product(name, left, right, out).run(algorithm, left, right, out, add=add):
        by_torch()


def kind_of(num_tokens: int) -> int:
    """Numbers of tokens with the same kind have the same algorithm."""
    step = max(1, 2 ** (num_tokens.bit_length() - 1) // PER_OCTAVE)
    return -(-num_tokens // step) * step


def _product(name: Name, left: Tensor, right: Tensor, out: Tensor) -> Product:
    return _made(name, left.shape, right.shape, left.dtype, out.dtype, out.get_device())


@lru_cache(maxsize=1024)
def _made(name: Name, left: torch.Size, right: torch.Size, dtype: torch.dtype, out: torch.dtype, device: int) -> Product:
    return Product(
        Matrix(left[0], left[1], dtype, transposed=name == "gradient"),
        Matrix(right[0], right[1], dtype, transposed=name == "forward"),
        out,
        device,
    )


# ── which is fastest ───────────────────────────────────────────────────────────────────────────────────────────────────


def _choose(kind: Kind, product: Product, left: Tensor, right: Tensor, out: Tensor, by_torch: Callable[[], object]) -> None:
    """Note the fastest algorithm that gives torch's bits, None where that is torch's; nothing where the result does not tell
    algorithms apart. Waits for the device."""
    by_torch()
    some = slice(None, None, max(1, len(out) // COMPARED_ROWS))
    expected = out[some].clone()
    if not _tells_apart(expected):
        return
    algorithms = [None]
    for algorithm in product.algorithms():
        if product.run(algorithm, left, right, out) and torch.equal(out[some], expected):
            algorithms.append(algorithm)
    runs = [by_torch, *(_runner(product, algorithm, left, right, out) for algorithm in algorithms[1:])]
    times = race(runs)
    best = min(range(len(runs)), key=lambda number: times[number])
    _chosen[kind] = algorithms[best] if times[best] < (1 - LEAST_GAIN) * times[0] else None


def _tells_apart(result: Tensor) -> bool:
    """Whether a sum in another order would show in it."""
    values = result.flatten()
    return len(values[:: max(1, len(values) // 4096)].unique()) >= FEWEST_VALUES


def _runner(product: Product, algorithm: Any, left: Tensor, right: Tensor, out: Tensor) -> Callable[[], object]:
    return lambda: product.run(algorithm, left, right, out)


def race(runs: list[Callable[[], object]]) -> list[float]:
    """Milliseconds of each on the current stream: medians over rounds in which they take turns."""
    repeats = max(1, min(10, round(ROUND_MS / _milliseconds(runs[0], 2))))
    rounds = [[_milliseconds(run, repeats) for run in runs] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _milliseconds(run: Callable[[], object], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats
