"""The products of a training step and of a decode step on a GPU, each by the algorithm that is fastest for its shape.

cuBLAS chooses among its algorithms by a rule, and for the tall and narrow products of a step another one of its own is up to a
sixth faster. So the first product of a kind tries those that cuBLASLt names, and the ones after it take the best. Only
algorithms that give the same bits as torch's product count, so that nothing but time hangs on which of them wins.

    forward       x_TK @ weightᵀ            [T, N]             T tokens; a weight [N, K]
    backward      grad_TN @ weight          [T, K]
    gradient      grad_TNᵀ @ x_TK           float32 [N, K], set or added

Numbers of tokens that are close to each other are one kind: an octave has `PER_OCTAVE` of them. Autograd knows nothing of these
products; the caller has the gradients.

A decode step (`decode`) is recorded as a graph, and nothing can be tried within it: `choose` does so before, for its number of
rows.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import cycle
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
LEAST_DECODE_GAIN, DECODE_ROUNDS = 0.02, 3
"""The same for decode steps, whose sizes are many."""
QUEUE_CYCLES = 30_000
"""Of the device's clock, for each launch that it waits for: a host needs about ten microseconds for one."""
ROOM_BYTES = 32 * 2**20
"""Memory that algorithms of decode steps may use, as much as torch gives its own."""

Name = Literal["forward", "backward", "gradient", "decode", "decode, bias"]
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

    def by_torch() -> Tensor:
        return torch.addmm(total_NK, grad_TN.T, x_TK, beta=0 if is_first else 1, out_dtype=torch.float32, out=total_NK)

    if _takes(grad_TN, x_TK, total_NK.shape[1]):
        _run("gradient", grad_TN, x_TK, total_NK, by_torch, add=not is_first)
    else:
        by_torch()


def decode(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, room: Tensor) -> Tensor:
    """`F.linear` by the algorithm that `choose` has found, by torch where it has found none: the same bits. Products that share
    the room, uint8[ROOM_BYTES], run one after the other."""
    algorithm = _chosen.get(_decode_kind(len(x_BK), weight_NK, bias_N))
    if algorithm is not None and _takes(x_BK, weight_NK, len(weight_NK), bias_N, fewest=1):
        out_BN = x_BK.new_empty(len(x_BK), len(weight_NK))
        if _decode_product(x_BK, weight_NK, bias_N, out_BN).run(algorithm, x_BK, weight_NK, out_BN, workspace=room):
            return out_BN
    return F.linear(x_BK, weight_NK, bias_N)


def choose(rows: int, weights: Sequence[Tensor], bias_N: Tensor | None, room: Tensor) -> None:
    """Find the algorithm for so many rows and weights [N, K] of one shape, once in a process, by products with random rows.
    Several weights take turns, so that they come from memory as they do in a step. Without memory to try, nothing is chosen.
    Waits for the device; nothing may be captured meanwhile."""
    weight_NK = weights[0]
    kind = _decode_kind(rows, weight_NK, bias_N)
    if kind in _chosen or not weight_NK.is_cuda:
        return
    try:
        # Not torch's own generator, from which a trainer in this process may draw.
        random: dict[str, Any] = {"generator": torch.Generator(weight_NK.device).manual_seed(0), "dtype": weight_NK.dtype}
        x_BK = torch.randn(rows, weight_NK.shape[1], device=weight_NK.device, **random)
        some_N = None if bias_N is None else torch.randn(bias_N.shape, device=weight_NK.device, **random)
        if _takes(x_BK, weight_NK, len(weight_NK), bias_N, fewest=1):
            _choose_for_decode(kind, x_BK, weights, some_N, room)
    except torch.OutOfMemoryError:
        return


def _choose_for_decode(kind: Kind, x_BK: Tensor, weights: Sequence[Tensor], bias_N: Tensor | None, room: Tensor) -> None:
    out_BN = x_BK.new_empty(len(x_BK), len(weights[0]))
    product = _decode_product(x_BK, weights[0], bias_N, out_BN)

    def by_torch(weight_NK: Tensor) -> Tensor:
        return F.linear(x_BK, weight_NK, bias_N) if bias_N is not None else torch.mm(x_BK, weight_NK.T, out=out_BN)

    def attempt(algorithm: Any, weight_NK: Tensor) -> bool:
        return product.run(algorithm, x_BK, weight_NK, out_BN, workspace=room)

    found = product.algorithms(room.nbytes)
    _decide(kind, found, weights, out_BN, by_torch, attempt, least_gain=LEAST_DECODE_GAIN, rounds=DECODE_ROUNDS, queued=True)


def _decode_kind(rows: int, weight_NK: Tensor, bias_N: Tensor | None) -> Kind:
    N, K = weight_NK.shape
    return ("decode" if bias_N is None else "decode, bias", K, N, rows, weight_NK.dtype, weight_NK.get_device())


def _decode_product(x_BK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_BN: Tensor) -> Product:
    return _product("decode", x_BK, weight_NK, out_BN, 0 if bias_N is None else bias_N.data_ptr())


def _takes(left: Tensor, right: Tensor, columns: int, bias: Tensor | None = None, *, fewest: int = FEWEST_TOKENS) -> bool:
    """Whether there is a choice: a large product of float16 or bfloat16 whose rows begin where cuBLASLt wants them."""
    dtype, (T, inner) = left.dtype, left.shape
    if not left.is_cuda or fewest > T or (dtype is not torch.bfloat16 and dtype is not torch.float16):
        return False
    width = dtype.itemsize * (inner | right.shape[1] | columns)
    begin = left.data_ptr() | right.data_ptr() | (0 if bias is None else bias.data_ptr())
    aligned = (width | begin) % cublas_lt.ALIGNMENT == 0
    return aligned and left.is_contiguous() and right.is_contiguous() and cublas_lt.is_there()


def _run(name: Name, left: Tensor, right: Tensor, out: Tensor, by_torch: Callable[[], Tensor], *, add: bool = False) -> None:
    T, inner = left.shape
    kind = (name, inner, out.shape[1], kind_of(T), left.dtype, left.get_device())
    if kind not in _chosen:
        if add or torch.cuda.is_current_stream_capturing():  # nothing is added more than once, and a capture cannot wait
            by_torch()
            return
        product = _product(name, left, right, out)

        def attempt(algorithm: Any, right: Tensor) -> bool:
            return product.run(algorithm, left, right, out)

        _decide(kind, product.algorithms(), [right], out, lambda _: by_torch(), attempt)
    algorithm = _chosen.get(kind)
    if algorithm is None or not _product(name, left, right, out).run(algorithm, left, right, out, add=add):
        by_torch()


def kind_of(num_tokens: int) -> int:
    """Numbers of tokens with the same kind have the same algorithm."""
    step = max(1, 2 ** (num_tokens.bit_length() - 1) // PER_OCTAVE)
    return -(-num_tokens // step) * step


def _product(name: Name, left: Tensor, right: Tensor, out: Tensor, bias: int = 0) -> Product:
    return _made(name, left.shape, right.shape, left.dtype, out.dtype, out.get_device(), bias)


@lru_cache(maxsize=4096)
def _made(
    name: Name, left: torch.Size, right: torch.Size, dtype: torch.dtype, out: torch.dtype, device: int, bias: int
) -> Product:
    return Product(
        Matrix(left[0], left[1], dtype, transposed=name == "gradient"),
        Matrix(right[0], right[1], dtype, transposed=name in ("forward", "decode")),
        out,
        device,
        bias,
    )


# ── which is fastest ───────────────────────────────────────────────────────────────────────────────────────────────────


def _decide(
    kind: Kind,
    algorithms: Sequence[Any],
    rights: Sequence[Tensor],
    out: Tensor,
    by_torch: Callable[[Tensor], Tensor],
    attempt: Callable[[Any, Tensor], bool],
    *,
    least_gain: float = LEAST_GAIN,
    rounds: int = ROUNDS,
    queued: bool = False,
) -> None:
    """Note the fastest algorithm that gives torch's bits, None where that is torch's. `by_torch` returns the product by one of
    `rights`, `attempt` has it in `out`. Nothing is noted where the result does not tell algorithms apart. Waits for the
    device."""
    some = slice(None, None, max(1, len(out) // COMPARED_ROWS))
    expected = by_torch(rights[0])[some].clone()
    if not _tells_apart(expected):
        return
    same = [each for each in algorithms if attempt(each, rights[0]) and torch.equal(out[some], expected)]
    turns = cycle(rights)
    runs: list[Callable[[], object]] = [lambda: by_torch(next(turns))]
    runs += [lambda each=each: attempt(each, next(turns)) for each in same]  # type: ignore[misc]
    times = race(runs, rounds=rounds, queued=queued)
    best = min(range(len(runs)), key=lambda number: times[number])
    _chosen[kind] = same[best - 1] if times[best] < (1 - least_gain) * times[0] else None


def _tells_apart(result: Tensor) -> bool:
    """Whether a sum in another order would show in it."""
    values = result.flatten()
    return len(values[:: max(1, len(values) // 4096)].unique()) >= FEWEST_VALUES


def race(runs: Sequence[Callable[[], object]], *, rounds: int = ROUNDS, queued: bool = False) -> list[float]:
    """Milliseconds of each on the current stream: medians over rounds in which they take turns. With `queued` the device begins
    when all launches of a turn are there: they may take the host longer than the device."""
    repeats = max(1, min(10, round(ROUND_MS / _milliseconds(runs[0], 2, queued))))
    measured = [[_milliseconds(run, repeats, queued) for run in runs] for _ in range(rounds)]
    return [statistics.median(times) for times in zip(*measured, strict=True)]


def _milliseconds(run: Callable[[], object], repeats: int, queued: bool) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if queued:
        torch.cuda._sleep(repeats * QUEUE_CYCLES)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats
