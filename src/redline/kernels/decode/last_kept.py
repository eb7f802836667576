"""Where top-k and top-p end in a row of logits, found without putting the vocabulary in order; `sampler._last_kept` is the same
by sorting.

A float32 has a 32-bit key that rises with it, -0 being 0. The last value that top-k keeps has the largest key T that k tokens
reach; that of top-p the largest T such that the tokens that reach it weigh at least p of what top-k left. Both are found from
their highest digit, of four bits, to the lowest:

    _digit × 8    a program per chunk: how many tokens, or what weight, reach each of the 16 keys that the next digit allows
    _tally        a program per chunk: what lies above the last value, and how many tokens are equal to it
    _end_top_k    a program per row: how many of the equals stay, and the weight that top-p takes its share of
    _last         a program per row: how many of the equals stay, and the id of the last of them; of equals the lower ids stay

Programs of a row take the sums of the launch before in one order, so that all decide alike; a row does not depend on others. A
chunk of which no token lies between the key that was decided and the next one has nothing left to tell, and is not read
again: after two or three digits that is most of them.

Weights are exp(value - peak) in float32, summed in float32 within a chunk and in float64 beyond; a token that lies within
that rounding of the share may fall on either side of it. A row with a NaN, or that allows nothing, keeps everything.

Further letters: C chunks of N vocabulary entries; D digits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CHUNK = 4096
"""Vocabulary entries per program. A power of two."""
WARPS = 4
DIGITS = 16
PASSES = 8
"""Digits of a key."""
_BITS = tl.constexpr(4)
_D = tl.constexpr(DIGITS)
_P = tl.constexpr(PASSES)


def last_kept(values_BV: Tensor, top_k_B: Tensor | None, top_p_B: Tensor | None) -> tuple[Tensor, Tensor]:
    """float32[B, 1] and int64[B, 1]: value and id of the last token that is kept, likeliest first and of equals the lower id
    first; -inf and V where a row has no limit. `values_BV` is float32; 0 and more than V are no limit of top-k, 1 is none of
    top-p. Does not wait for the device."""
    assert values_BV.stride(1) == 1, "a row is contiguous"
    assert values_BV.dtype == torch.float32
    (B, V), device = values_BV.shape, values_BV.device
    C = triton.cdiv(V, CHUNK)
    peaks_B = values_BV.amax(dim=-1)
    counted_B, weighed_B = torch.zeros((2, B), dtype=torch.float64, device=device)
    if top_k_B is not None:
        counted_B = torch.where((top_k_B > 0) & (top_k_B < V), top_k_B, 0).double()
    p_B = torch.ones_like(peaks_B) if top_p_B is None else top_p_B
    search = _Search(values_BV, peaks_B, C)
    if top_k_B is not None:
        search.find(counted_B, weighed=False)
    search.tally(counted_B)
    one_per_row = {"PADDED_C": triton.next_power_of_2(C), "num_warps": WARPS}
    _end_top_k[(B,)](
        peaks_B, counted_B, p_B, search.keys_B, search.tallies_BC3, weighed_B, search.kept_B, search.floor_B, C, **one_per_row
    )
    if top_p_B is not None:
        search.find(weighed_B, weighed=True)
        search.tally(weighed_B)
    out_values_B, out_ids_B = torch.empty_like(peaks_B), torch.empty(B, dtype=torch.int64, device=device)
    _last[(B,)](
        *search.rows, peaks_B, weighed_B, search.keys_B, search.tallies_BC3, search.kept_B, search.floor_B,
        counted_B, out_values_B, out_ids_B, C, N=CHUNK, **one_per_row,
    )  # fmt: skip
    return out_values_B[:, None], out_ids_B[:, None]


class _Search:
    """What the launches hand on to each other."""

    def __init__(self, values_BV: Tensor, peaks_B: Tensor, num_chunks: int) -> None:
        (B, V), C, device = values_BV.shape, num_chunks, values_BV.device
        self.rows = (values_BV, values_BV.stride(0), V)
        self._peaks_B, self._grid = peaks_B, (C, B)
        self._reach_2BCD = torch.empty((2, B, C, DIGITS), dtype=torch.float32, device=device)
        """How many tokens of a chunk, or what weight, reach the key of each digit; launches take turns."""
        self._above_2BC = torch.empty((2, B, C), dtype=torch.float32, device=device)
        """The same for the key above all of them."""
        self._prefixes_PB = torch.zeros((PASSES, B), dtype=torch.int64, device=device)
        """The digits that were decided before each launch."""
        self.keys_B = torch.zeros(B, dtype=torch.int64, device=device)
        """Of the last value; 0 where there is no limit."""
        self.tallies_BC3 = torch.empty((B, C, 3), dtype=torch.float32, device=device)
        """Tokens above the last value, their weight, tokens equal to it."""
        self.kept_B = torch.zeros(B, dtype=torch.float64, device=device)
        """Equals of top-k's last value that it keeps."""
        self.floor_B = torch.zeros(B, dtype=torch.int64, device=device)
        """The key of top-k's last value; 0 where it has no limit."""

    def find(self, targets_B: Tensor, *, weighed: bool) -> None:
        """The digits of the largest key that as many tokens, or as much weight, reach; nothing where the target is 0."""
        buffers = (self._reach_2BCD, self._above_2BC, self._prefixes_PB)
        for index in range(PASSES):
            _digit[self._grid](
                *self.rows, self._peaks_B, targets_B, *buffers,
                PASS=index, WEIGHED=weighed, N=CHUNK, PADDED_C=triton.next_power_of_2(self._grid[0]), num_warps=WARPS,
            )  # fmt: skip

    def tally(self, targets_B: Tensor) -> None:
        """The last value, not below `floor_B`, and what lies above it."""
        _tally[self._grid](
            *self.rows, self._peaks_B, targets_B, self._reach_2BCD, self._prefixes_PB,
            self.floor_B, self.keys_B, self.tallies_BC3,
            N=CHUNK, PADDED_C=triton.next_power_of_2(self._grid[0]), num_warps=WARPS,
        )  # fmt: skip


@triton.jit
def _digit(  # type: ignore[no-untyped-def]
    values_BV, stride, V, peaks_B, targets_B, reach_2BCD, above_2BC, prefixes_PB,
    PASS: tl.constexpr, WEIGHED: tl.constexpr, N: tl.constexpr, PADDED_C: tl.constexpr,
):  # fmt: skip
    """What of one chunk reaches the keys that the next digit allows."""
    chunk, row, C, B = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    target = tl.load(targets_B + row)
    if target > 0:
        shift: tl.constexpr = (_P - 1 - PASS) * _BITS
        new, index_D = PASS % 2, tl.arange(0, _D)
        prefix, lower, upper = tl.cast(0, tl.int64), tl.cast(1.0, tl.float32), tl.cast(0.0, tl.float32)
        if PASS > 0:
            old = 1 - new
            digit = _decided(reach_2BCD + (old * B + row) * C * _D, target, C, PADDED_C)
            prefix = tl.load(prefixes_PB + (PASS - 1) * B + row) | (digit.to(tl.int64) << (shift + _BITS))
            reach_D = tl.load(reach_2BCD + ((old * B + row) * C + chunk) * _D + index_D)
            lower = tl.sum(tl.where(index_D == digit, reach_D, 0.0), axis=0)
            upper = tl.sum(tl.where(index_D == digit + 1, reach_D, 0.0), axis=0)
            if digit == _D - 1:
                upper = tl.load(above_2BC + (old * B + row) * C + chunk)
        if chunk == 0:
            tl.store(prefixes_PB + PASS * B + row, prefix)
        tl.store(above_2BC + (new * B + row) * C + chunk, upper)
        out_D = tl.zeros([_D], tl.float32) + lower
        if lower != upper:  # some of its tokens lie in between, or it holds a NaN
            keys_N, weights_N = _load(values_BV + row.to(tl.int64) * stride, chunk, V, tl.load(peaks_B + row), WEIGHED, N)
            threshold, step = prefix, tl.cast(1, tl.int64) << shift
            for place in tl.static_range(_D):
                reached = tl.sum(tl.where(keys_N >= threshold.to(tl.uint32), weights_N, 0.0), axis=0)
                out_D = tl.where(index_D == place, reached, out_D)
                threshold += step
        tl.store(reach_2BCD + ((new * B + row) * C + chunk) * _D + index_D, out_D)


@triton.jit
def _tally(  # type: ignore[no-untyped-def]
    values_BV, stride, V, peaks_B, targets_B, reach_2BCD, prefixes_PB, floor_B, keys_B, tallies_BC3,
    N: tl.constexpr, PADDED_C: tl.constexpr,
):  # fmt: skip
    """What of one chunk lies above the last value, and how many tokens are equal to it."""
    chunk, row, C, B = tl.program_id(0), tl.program_id(1), tl.num_programs(0), tl.num_programs(1)
    target = tl.load(targets_B + row)
    key = tl.load(floor_B + row)
    if target > 0:
        digit = _decided(reach_2BCD + (B + row) * C * _D, target, C, PADDED_C)  # the last launch wrote the second half
        key = tl.maximum(key, tl.load(prefixes_PB + (_P - 1) * B + row) | digit.to(tl.int64))
    if chunk == 0:
        tl.store(keys_B + row, key)
    keys_N, weights_N = _load(values_BV + row.to(tl.int64) * stride, chunk, V, tl.load(peaks_B + row), True, N)
    is_token_N = chunk * N + tl.arange(0, N) < V
    out = tallies_BC3 + (row * C + chunk) * 3
    last = key.to(tl.uint32)
    tl.store(out, tl.sum(tl.where(is_token_N & (keys_N > last), 1.0, 0.0), axis=0))
    tl.store(out + 1, tl.sum(tl.where(keys_N > last, weights_N, 0.0), axis=0))
    tl.store(out + 2, tl.sum(tl.where(is_token_N & (keys_N == last), 1.0, 0.0), axis=0))


@triton.jit
def _end_top_k(  # type: ignore[no-untyped-def]
    peaks_B, counted_B, p_B, keys_B, tallies_BC3, weighed_B, kept_B, floor_B, C, PADDED_C: tl.constexpr
):
    """How many equals of its last value top-k keeps, and the weight that top-p must reach; 0 where p is no limit."""
    row = tl.program_id(0)
    index_C = tl.arange(0, PADDED_C)
    above = tl.sum(_tallied(tallies_BC3, row, 0, C, index_C), axis=0)
    mass = tl.sum(_tallied(tallies_BC3, row, 1, C, index_C), axis=0)
    count, key, p = tl.load(counted_B + row), tl.load(keys_B + row), tl.load(p_B + row)
    if count > 0:
        tl.store(floor_B + row, key)
        tl.store(kept_B + row, count - above)
        mass += (count - above) * _weight(key, tl.load(peaks_B + row))
    tl.store(weighed_B + row, tl.where(p < 1, p.to(tl.float64) * mass, 0.0))


@triton.jit
def _last(  # type: ignore[no-untyped-def]
    values_BV, stride, V, peaks_B, weighed_B, keys_B, tallies_BC3, kept_B, floor_B, counted_B, out_values_B, out_ids_B,
    C, N: tl.constexpr, PADDED_C: tl.constexpr,
):  # fmt: skip
    """Value and id of the last token of one row that is kept."""
    row = tl.program_id(0)
    index_C = tl.arange(0, PADDED_C)
    key, floor, target = tl.load(keys_B + row), tl.load(floor_B + row), tl.load(weighed_B + row)
    peak = tl.load(peaks_B + row)
    equals_C = _tallied(tallies_BC3, row, 2, C, index_C)
    kept = tl.cast(V, tl.float64)
    if target > 0:
        missing = target - tl.sum(_tallied(tallies_BC3, row, 1, C, index_C), axis=0)
        # A token stays while what lies before it is less than the share; that which crosses it does.
        kept = tl.maximum(tl.ceil(missing / _weight(key, peak)), 1.0)
    if (tl.load(counted_B + row) > 0) & (key == floor):
        kept = tl.minimum(kept, tl.load(kept_B + row))
    reached_C = tl.cumsum(equals_C, axis=0)
    chunk = tl.min(tl.where((reached_C >= kept) & (index_C < C), index_C, C), axis=0)
    token = tl.cast(V, tl.int64)
    if chunk < C:
        rank = kept - tl.sum(tl.where(index_C < chunk, equals_C, 0.0), axis=0)
        keys_N, _ = _load(values_BV + row.to(tl.int64) * stride, chunk, V, peak, False, N)
        index_N = chunk * N + tl.arange(0, N)
        is_equal_N = (keys_N == key.to(tl.uint32)) & (index_N < V)
        ranks_N = tl.cumsum(is_equal_N.to(tl.int32), axis=0)
        token = tl.min(tl.where(is_equal_N & (ranks_N == rank.to(tl.int32)), index_N, V), axis=0).to(tl.int64)
    is_limited = (key > 0) & (peak == peak) & (peak > float("-inf"))
    tl.store(out_values_B + row, tl.where(is_limited, _value(key), float("-inf")))
    tl.store(out_ids_B + row, tl.where(is_limited, token, V))


@triton.jit
def _decided(reach_CD, target, C, PADDED_C: tl.constexpr):  # type: ignore[no-untyped-def]
    """The largest digit that the target reaches; the first always does."""
    index_C, index_D = tl.arange(0, PADDED_C), tl.arange(0, _D)
    places_CD = index_C[:, None] * _D + index_D[None, :]
    found_CD = tl.load(reach_CD + places_CD, mask=index_C[:, None] < C, other=0.0)
    reach_D = tl.sum(found_CD.to(tl.float64), axis=0)
    return tl.max(tl.where(reach_D >= target, index_D, 0), axis=0)


@triton.jit
def _load(values_V, chunk, V, peak, WEIGHED: tl.constexpr, N: tl.constexpr):  # type: ignore[no-untyped-def]
    """Keys and weights of a chunk, uint32[N] and float32[N]; without WEIGHED a token weighs 1, and what is none nothing."""
    index_N = chunk * N + tl.arange(0, N)
    values_N = tl.load(values_V + index_N, mask=index_N < V, other=float("-inf")) + 0.0  # -0 becomes 0
    bits_N = values_N.to(tl.int32, bitcast=True)
    keys_N = tl.where(bits_N < 0, ~bits_N, bits_N | -2147483648).to(tl.uint32, bitcast=True)
    weights_N = tl.exp(values_N - peak) if WEIGHED else tl.where(index_N < V, 1.0, 0.0)
    return keys_N, weights_N


@triton.jit
def _value(key):  # type: ignore[no-untyped-def]
    """The float32 whose key it is."""
    bits = tl.where(key >= 2147483648, key - 2147483648, 4294967295 - key)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def _weight(key, peak):  # type: ignore[no-untyped-def]
    """float64."""
    return tl.exp(_value(key) - peak).to(tl.float64)


@triton.jit
def _tallied(tallies_BC3, row, which: tl.constexpr, C, index_C):  # type: ignore[no-untyped-def]
    """float64[C]: one of the three numbers of each chunk."""
    return tl.load(tallies_BC3 + (row * C + index_C) * 3 + which, mask=index_C < C, other=0.0).to(tl.float64)
