"""Plain sampling (temperature only, greedy rows included) as two Triton kernels; `sampler.sample` is the same in torch.

    logits [B, V] ──► _summarise: a program per chunk ──► peaks, sums [B, C] ──► _pick: a program per row ──► token, logprob

The first kernel is the only one to read all logits, and reads them once: V · 2 bytes per row in bfloat16 are the bound. Of a
chunk it keeps the largest logit and the sum of the weights relative to it. From these the second kernel has the row's logsumexp
and the chunk that the row's uniform number falls into (or, for a greedy row, the chunk of the largest logit), and reads that
chunk again to find the token. Whoever makes the logits may have summed chunks up, of any size (`head.py`): then there is no
first kernel.

A row with a NaN has a NaN among its sums, and a row that allows nothing has a peak of -inf: both give a token of the vocabulary
and a NaN for its logprob.

Further letters: C chunks of N vocabulary entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Vocabulary entries per program of the first kernel, and scanned per row by the second. A power of two."""
SUMMARISE_WARPS = 4
"""Warps of 32 threads: at 4096 entries, each thread then has 64 bytes of bfloat16 in flight."""
PICK_WARPS, NARROW = 8, 1024
"""Half as many warps for chunks up to so narrow."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_GAMMA = tl.constexpr(0x9E3779B97F4A7C15)  # the constants of splitmix64, as in sampler.py
_MIX_1 = tl.constexpr(0xBF58476D1CE4E5B9)
_MIX_2 = tl.constexpr(0x94D049BB133111EB)


class Summaries(NamedTuple):
    """Of the chunks of rows of logits, float32 [B, C]."""

    peaks_BC: Tensor
    """The largest logit."""
    sums_BC: Tensor
    """The weights relative to it, at the row's temperature."""
    chunk: int
    """Vocabulary entries of each, a power of two."""

    @property
    def warps(self) -> int:
        """Of a program that picks from one of them."""
        return PICK_WARPS if self.chunk > NARROW else PICK_WARPS // 2

    def check(self, logits_BV: Tensor) -> None:
        B, V = logits_BV.shape
        assert logits_BV.stride(1) == 1, "a row of logits is contiguous"
        assert self.peaks_BC.shape == self.sums_BC.shape == (B, triton.cdiv(V, self.chunk))
        assert self.peaks_BC.is_contiguous()
        assert self.sums_BC.is_contiguous()


def sample_plain(
    logits_BV: Tensor,
    temperature_B: Tensor,
    streams_B: Tensor,
    counters_B: Tensor,
    out_tokens_B: Tensor,
    out_logprobs_B: Tensor,
    summaries: Summaries | None = None,
) -> None:
    """Fill `out_tokens_B` (int64) and `out_logprobs_B` (float32). Neither waits for the device nor looks at a value, so a CUDA
    graph can hold it; a row's result does not depend on the others."""
    summaries = summaries or summaries_of(logits_BV, temperature_B)
    (B, V), (_, C) = logits_BV.shape, summaries.peaks_BC.shape
    summaries.check(logits_BV)
    _pick[(B,)](
        logits_BV, logits_BV.stride(0), V, temperature_B, streams_B, counters_B, summaries.peaks_BC, summaries.sums_BC,
        out_tokens_B, out_logprobs_B, C, N=summaries.chunk, PADDED_C=triton.next_power_of_2(C), num_warps=summaries.warps,
    )  # fmt: skip


def summaries_of(logits_BV: Tensor, temperature_B: Tensor) -> Summaries:
    B, V = logits_BV.shape
    peaks_BC, sums_BC = torch.empty((2, B, triton.cdiv(V, CHUNK)), dtype=torch.float32, device=logits_BV.device)
    _summarise[(peaks_BC.shape[1], B)](
        logits_BV, logits_BV.stride(0), V, temperature_B, peaks_BC, sums_BC, N=CHUNK, num_warps=SUMMARISE_WARPS
    )
    return Summaries(peaks_BC, sums_BC, CHUNK)


@triton.jit
def _summarise(logits_BV, stride, V, temperature_B, peaks_BC, sums_BC, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest logit of one chunk, and the sum of its weights relative to that."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    logits_N = _load_chunk(logits_BV + row.to(tl.int64) * stride, chunk, V, N)
    peak = tl.max(logits_N, axis=0)
    slot = row * tl.num_programs(0) + chunk
    tl.store(peaks_BC + slot, peak)
    tl.store(sums_BC + slot, tl.sum(_weights(logits_N, peak, _divisor(temperature_B, row)), axis=0))


@triton.jit
def _pick(  # type: ignore[no-untyped-def]
    logits_BV, stride, V, temperature_B, streams_B, counters_B, peaks_BC, sums_BC, tokens_B, logprobs_B,
    C, N: tl.constexpr, PADDED_C: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    token, logprob = draw(row, logits_BV, stride, V, temperature_B, streams_B, counters_B, peaks_BC, sums_BC, C, N, PADDED_C)
    tl.store(tokens_B + row, token)
    tl.store(logprobs_B + row, logprob)


@triton.jit
def draw(  # type: ignore[no-untyped-def]
    row, logits_BV, stride, V, temperature_B, streams_B, counters_B, peaks_BC, sums_BC,
    C, N: tl.constexpr, PADDED_C: tl.constexpr,
):  # fmt: skip
    """The token of one row, int64, and its logprob."""
    logits_V = logits_BV + row.to(tl.int64) * stride
    index_C = tl.arange(0, PADDED_C)
    peaks_C = tl.load(peaks_BC + row * C + index_C, mask=index_C < C, other=float("-inf"))
    sums_C = tl.load(sums_BC + row * C + index_C, mask=index_C < C, other=0.0)
    uniform = _uniform(tl.load(streams_B + row), tl.load(counters_B + row))
    greedy = tl.load(temperature_B + row) == 0
    divisor = _divisor(temperature_B, row)

    peak = tl.max(peaks_C, axis=0)
    masses_C = _weights(peaks_C, peak, divisor).to(tl.float64) * sums_C
    total = tl.sum(masses_C, axis=0)
    target = uniform * total
    drawn_chunk = _first_beyond(masses_C, target, PADDED_C)
    chunk = tl.where(greedy, tl.min(tl.where(peaks_C == peak, index_C, C - 1), axis=0), drawn_chunk)
    target -= tl.sum(tl.where(index_C < chunk, masses_C, 0.0), axis=0)

    logits_N = _load_chunk(logits_V, chunk, V, N)
    drawn = _first_beyond(_weights(logits_N, peak, divisor).to(tl.float64), target, N)
    likeliest = tl.min(tl.where(logits_N == peak, tl.arange(0, N), N - 1), axis=0)
    # The minimum is for rows of NaN, where no comparison means anything.
    token = tl.minimum(chunk * N + tl.where(greedy, likeliest, drawn), V - 1)
    chosen = tl.load(logits_V + token).to(tl.float32)
    return token.to(tl.int64), ((chosen - peak).to(tl.float64) / divisor - tl.log(total)).to(tl.float32)


@triton.jit
def _load_chunk(logits_V, chunk, V, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32[N]; impossible beyond the vocabulary."""
    index_N = chunk * N + tl.arange(0, N)
    return tl.load(logits_V + index_N, mask=index_N < V, other=float("-inf")).to(tl.float32)


@triton.jit
def _divisor(temperature_B, row):  # type: ignore[no-untyped-def]
    """What divides the logits: a greedy row keeps temperature 1."""
    temperature = tl.load(temperature_B + row)
    return tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def _weights(logits_N, peak, divisor):  # type: ignore[no-untyped-def]
    """exp((logits - peak) / divisor), and 0 where all is impossible."""
    return tl.exp2((logits_N - tl.where(peak == float("-inf"), 0.0, peak)) * (_LOG2_E / divisor))


@triton.jit
def _first_beyond(weights_N, target, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first index with weight whose cumulative weight exceeds the target, or the last one with weight: sums in different
    orders round differently, so a target just below the total may be beyond all."""
    index_N = tl.arange(0, N)
    last = tl.max(tl.where(weights_N > 0, index_N, 0), axis=0)
    beyond_N = (tl.cumsum(weights_N, axis=0) > target) & (weights_N > 0)
    return tl.min(tl.where(beyond_N, index_N, last), axis=0)


@triton.jit
def _uniform(stream, counter):  # type: ignore[no-untyped-def]
    """Number `counter` of the stream, in [0, 1) as float64: `sampler.uniform`."""
    z = stream.to(tl.uint64, bitcast=True) + (counter.to(tl.uint64, bitcast=True) + 1) * _GAMMA
    z = (z ^ (z >> 30)) * _MIX_1
    z = (z ^ (z >> 27)) * _MIX_2
    return ((z ^ (z >> 31)) >> 11).to(tl.float64) * (2.0**-53)
