"""Sampling: one uniform number per token, drawn from (seed, index, position) alone.

A completion's stream does not depend on what else is in the batch, on the device, or on what was sampled before, so a
request reproduces in any company and a resumed run needs no generator state.

A row's distribution is made of its logits in this order:

    1. bias         added; stop tokens are forbidden while the row has fewer than `min_tokens`
    2. temperature  divides; a greedy row keeps temperature 1 and takes the likeliest token of what the filters leave
    3. top-k        the k likeliest stay; of equals the lower ids, so that exactly k do, and k = 1 is greedy
    4. top-p        of the mass that top-k left, the likeliest tokens up to a share of p stay, the one that crosses it included
    5. min-p        what is at least min_p times as likely as the likeliest stays

This is vLLM's order but for min-p, which it applies before top-k; that only changes the mass of which top-p takes a share.
Nothing here waits for a CUDA device, so a graph can hold it. A row whose logits hold a NaN, or whose mask allows nothing, gets
a token of the vocabulary and a NaN for its logprob; its neighbours notice nothing.

Further letters: C chunks of N vocabulary entries; K likeliest tokens; S here is stop tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.kernels.available import kernels_serve
from redline.kernels.cpu.draws import draws

CHUNK = 128
"""Vocabulary entries per first-level bin of the inverse-CDF search."""
CANDIDATES = 512
"""Likeliest tokens among which a CPU first looks for the end of top-k and top-p; eight times as many while that falls short."""
_UINT64 = 2**64 - 1
_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as int64, the golden-ratio increment of splitmix64


@dataclass(slots=True)
class SamplingRows:
    """How to sample each row of a batch, all on its device. What no row uses is None, and costs nothing."""

    temperature_B: Tensor
    """float32; 0 is greedy."""
    streams_B: Tensor
    """int64, from `stream`."""
    counters_B: Tensor
    """int64: tokens generated so far, which is also the number of the stream that is drawn."""
    top_k_B: Tensor | None = None
    """int32; 0 keeps all."""
    top_p_B: Tensor | None = None
    """float32; 1 keeps all."""
    min_p_B: Tensor | None = None
    """float32; 0 keeps all."""
    bias_BV: Tensor | None = None
    """float32; -inf forbids."""
    stops_BS: Tensor | None = None
    """int64, padded with -1."""
    min_tokens_B: Tensor | None = None
    """int64; goes with `stops_BS`."""

    @property
    def is_plain(self) -> bool:
        """Whether the logits and the temperatures are all there is."""
        changed_by = (self.top_k_B, self.top_p_B, self.min_p_B, self.bias_BV, self.stops_BS)
        return all(each is None for each in changed_by)


@dataclass(slots=True)
class Sampled:
    """One token per row."""

    tokens_B: Tensor
    """int64."""
    logprobs_B: Tensor
    """float32, under the distribution sampled from; for greedy rows, under the one at temperature 1. NaN: it was none."""
    raw_logprobs_B: Tensor | None = None
    """float32, under the model itself: no bias, temperature or filter."""
    top_ids_BK: Tensor | None = None
    """int64, likeliest first."""
    top_logprobs_BK: Tensor | None = None
    """float32, under the distribution sampled from; -inf where it has fewer than K tokens."""


def stream(seed: int, index: int) -> int:
    """The seed of completion `index` of a request, as an int64: `_mix` on plain integers, a thousand times faster for one."""
    z = (seed + (index + 1) * _GAMMA) & _UINT64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _UINT64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _UINT64
    z ^= z >> 31
    return z - 2**64 if z >= 2**63 else z


def uniform(streams_B: Tensor, counters_B: Tensor) -> Tensor:
    """float64[B] in [0, 1): number `counter` of each stream (splitmix64, upper 53 bits)."""
    bits = _mix(streams_B + (counters_B + 1) * _GAMMA)
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


def sample(logits_BV: Tensor, rows: SamplingRows, *, raw: bool = False, top: int = 0) -> Sampled:
    """One token per row. `raw` also gives its logprob under the model, `top` that many of the likeliest tokens."""
    own = draws() if logits_BV.is_cpu else None
    if own is not None and rows.is_plain and not (raw or top):
        return Sampled(*own(logits_BV.float(), rows.temperature_B, rows.streams_B, rows.counters_B))
    greedy_B = rows.temperature_B == 0
    scaled_BV = _filtered(_biased(logits_BV, rows) / torch.where(greedy_B, 1.0, rows.temperature_B)[:, None], rows)
    if kernels_serve(scaled_BV) and not (raw or top):
        return _drawn_by_kernel(scaled_BV, rows)
    if own is not None:
        drawn = own(scaled_BV, (~greedy_B).float(), rows.streams_B, rows.counters_B)  # 0 stays greedy
    else:
        drawn = _draw(scaled_BV, greedy_B, uniform(rows.streams_B, rows.counters_B))
    sampled = Sampled(*drawn)
    tokens_B1, logprobs_B1 = sampled.tokens_B[:, None], sampled.logprobs_B[:, None]
    if raw:
        chosen_B = logits_BV.gather(1, tokens_B1).squeeze(1).float()
        sampled.raw_logprobs_B = chosen_B - logits_BV.float().logsumexp(dim=-1)
    if top:
        top_BK, sampled.top_ids_BK = scaled_BV.topk(top, dim=-1)
        sampled.top_logprobs_BK = top_BK - scaled_BV.gather(1, tokens_B1) + logprobs_B1
    return sampled


def _drawn_by_kernel(scaled_BV: Tensor, rows: SamplingRows) -> Sampled:
    """The same of logits that temperature and filters have made, which are read once."""
    from redline.kernels.decode.sampling import sample_plain

    sampled = Sampled(torch.empty_like(rows.streams_B), torch.empty_like(rows.temperature_B))
    divisors_B = (rows.temperature_B > 0).float()  # 0 stays greedy
    sample_plain(scaled_BV, divisors_B, rows.streams_B, rows.counters_B, sampled.tokens_B, sampled.logprobs_B)
    return sampled


# ── the random numbers ─────────────────────────────────────────────────────────────────────────────────────────────────


def _mix(z: Tensor) -> Tensor:
    """The finalizer of splitmix64; int64 arithmetic wraps as uint64 does."""
    z = (z ^ _shift_right(z, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    z = (z ^ _shift_right(z, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return z ^ _shift_right(z, 31)


def _shift_right(z: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's on int64 is arithmetic."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


# ── the distribution ───────────────────────────────────────────────────────────────────────────────────────────────────


def _biased(logits_BV: Tensor, rows: SamplingRows) -> Tensor:
    """Logits in float32 with the bias added, and -inf for the stop tokens of rows that must not stop yet."""
    biased_BV = logits_BV.float()
    if rows.bias_BV is not None:
        biased_BV = biased_BV + rows.bias_BV
    if rows.stops_BS is not None:
        assert rows.min_tokens_B is not None, "stop tokens are forbidden until `min_tokens`"
        real_BS = (rows.stops_BS >= 0) & (rows.stops_BS < logits_BV.shape[1])
        too_early_BS = real_BS & (rows.counters_B < rows.min_tokens_B)[:, None]
        # Padding is sent to token 0, which it must leave alone even where that is itself a stop token: it adds 0.
        stops_BS = torch.where(real_BS, rows.stops_BS, 0)
        biased_BV = biased_BV.scatter_add(1, stops_BS, torch.where(too_early_BS, -math.inf, 0.0))
    return biased_BV


def _filtered(scaled_BV: Tensor, rows: SamplingRows) -> Tensor:
    """The logits with -inf for what top-k, top-p and min-p drop. Comparisons are such that a NaN is never dropped."""
    if rows.top_k_B is not None or rows.top_p_B is not None:
        value_B1, id_B1 = _last_kept(scaled_BV, rows)
        ids_V = torch.arange(scaled_BV.shape[1], device=scaled_BV.device)
        dropped_BV = (scaled_BV < value_B1) | ((scaled_BV == value_B1) & (ids_V > id_B1))
        scaled_BV = scaled_BV.masked_fill(dropped_BV, -math.inf)
    if rows.min_p_B is not None:
        least_B1 = scaled_BV.amax(dim=-1, keepdim=True) + rows.min_p_B.log()[:, None]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < least_B1, -math.inf)
    return scaled_BV


def _last_kept(scaled_BV: Tensor, rows: SamplingRows) -> tuple[Tensor, Tensor]:
    """Value and id, [B, 1] each, of the last token that top-k and top-p keep: likeliest first, of equals the lower id first."""
    if kernels_serve(scaled_BV):
        from redline.kernels.decode.last_kept import last_kept

        return last_kept(scaled_BV, rows.top_k_B, rows.top_p_B)
    B, V = scaled_BV.shape
    k_B = scaled_BV.new_zeros(B) if rows.top_k_B is None else rows.top_k_B
    p_B = scaled_BV.new_ones(B) if rows.top_p_B is None else rows.top_p_B
    k_B1, p_B1 = torch.where((k_B > 0) & (k_B < V), k_B, V).long()[:, None], p_B[:, None]
    limited_B1 = (k_B1 < V) | (p_B1 < 1)
    mass_B1 = (scaled_BV - scaled_BV.amax(dim=-1, keepdim=True)).exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    N = _num_candidates(k_B1, V)
    while True:
        values_BN, ids_BN = _in_order(scaled_BV, N)
        last_B1 = _num_kept(values_BN, k_B1, p_B1, mass_B1, V) - 1
        value_B1, id_B1 = values_BN.gather(1, last_B1), ids_BN.gather(1, last_B1)
        # Equals of the last candidate may not be candidates themselves; where they are impossible anyway, that is no loss.
        short_B1 = limited_B1 & (value_B1 == values_BN[:, -1:]) & (value_B1 > -math.inf)
        if N == V or not bool(short_B1.any()):
            return torch.where(limited_B1, value_B1, -math.inf), torch.where(limited_B1, id_B1, V)
        N = min(V, 8 * N)


def _num_candidates(k_B1: Tensor, V: int) -> int:
    """How many of the likeliest tokens to put in order at first. All on a device, which cannot be asked whether they suffice; a
    CPU can, and takes ten times as long to sort a vocabulary as to find its few likeliest tokens."""
    if k_B1.device.type == "cpu":
        return min(V, max(CANDIDATES, int((k_B1 % V).max())))
    return V


def _in_order(scaled_BV: Tensor, N: int) -> tuple[Tensor, Tensor]:
    """Values and ids of the N likeliest tokens, likeliest first, of equals the lower id first."""
    if scaled_BV.shape[1] == N:
        values_BV, ids_BV = scaled_BV.sort(dim=-1, descending=True, stable=True)
        return values_BV, ids_BV
    ids_BN = scaled_BV.topk(N, dim=-1, sorted=False).indices.sort(dim=-1).values
    values_BN, order_BN = scaled_BV.gather(1, ids_BN).sort(dim=-1, descending=True, stable=True)
    return values_BN, ids_BN.gather(1, order_BN)


def _num_kept(values_BN: Tensor, k_B1: Tensor, p_B1: Tensor, mass_B1: Tensor, V: int) -> Tensor:
    """int64[B, 1]: how many of the tokens, given in order, top-k and top-p keep; at least one. k = V is no limit, nor is p = 1.
    `mass_B1` is the weight of the whole vocabulary, where the likeliest token weighs 1."""
    N = values_BN.shape[1]
    weights_BN = (values_BN - values_BN[:, :1]).exp().double()
    cumulative_BN = weights_BN.cumsum(dim=-1)
    mass_B1 = torch.where(k_B1 < V, cumulative_BN.gather(1, k_B1.clamp(max=N) - 1), mass_B1)
    in_top_p_BN = (p_B1 >= 1) | (cumulative_BN - weights_BN < p_B1 * mass_B1)
    in_top_k_BN = torch.arange(N, device=values_BN.device) < k_B1
    return (in_top_k_BN & in_top_p_BN).sum(dim=-1, keepdim=True).clamp_(min=1)


# ── the draw ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def _chunked(scaled_BV: Tensor) -> Tensor:
    """[B, C, CHUNK], filled up with impossible tokens."""
    missing = -scaled_BV.shape[1] % CHUNK
    # Checked because torch copies even to add nothing.
    padded = torch.nn.functional.pad(scaled_BV, (0, missing), value=-math.inf) if missing else scaled_BV
    return padded.view(len(scaled_BV), -1, CHUNK)


def _draw(scaled_BV: Tensor, greedy_B: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """A token of each row and its logprob."""
    chunks_BCN, V = _chunked(scaled_BV), scaled_BV.shape[1]
    peaks_BC = chunks_BCN.amax(dim=-1)
    centred_BCN = chunks_BCN - peaks_BC.amax(dim=-1)[:, None, None]
    weights_BCN = centred_BCN.exp()
    # The clamp is for rows of NaN, where no comparison means anything.
    tokens_B = torch.where(greedy_B, _likeliest(peaks_BC, centred_BCN), _search(weights_BCN, uniform_B)).clamp_(max=V - 1)
    centred_BV, weights_BV = (values_BCN.flatten(1)[:, :V] for values_BCN in (centred_BCN, weights_BCN))
    log_total_B1 = weights_BV.sum(dim=-1, keepdim=True).log()
    return tokens_B, (centred_BV.gather(1, tokens_B[:, None]) - log_total_B1).squeeze(1)


def _likeliest(peaks_BC: Tensor, centred_BCN: Tensor) -> Tensor:
    """The lowest id of the largest logits, found from each chunk's largest: one chunk is scanned, not the vocabulary."""
    chunk_B1 = peaks_BC.argmax(dim=-1, keepdim=True)
    return chunk_B1.squeeze(1) * CHUNK + _chunk(centred_BCN, chunk_B1).argmax(dim=-1)


def _search(weights_BCN: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token whose cumulative weight exceeds `uniform · total`: inverse-CDF sampling in two levels, so that only sums
    over `CHUNK` entries and one chunk per row are scanned."""
    cumulative_BC = weights_BCN.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    target_B1 = (uniform_B * cumulative_BC[:, -1])[:, None]
    chunk_B1 = torch.searchsorted(cumulative_BC, target_B1, right=True).clamp_(max=cumulative_BC.shape[1] - 1)
    before_B1 = torch.where(chunk_B1 > 0, cumulative_BC.gather(1, (chunk_B1 - 1).clamp_(min=0)), 0.0)
    inside_BN = _chunk(weights_BCN, chunk_B1).double().cumsum(dim=-1)
    within_B1 = torch.searchsorted(inside_BN, target_B1 - before_B1, right=True)
    # Rounding can place the target at the very end of a chunk; the last entry with weight is then the one meant.
    last_B1 = (inside_BN < inside_BN[:, -1:]).sum(dim=-1, keepdim=True)
    return (chunk_B1 * CHUNK + torch.minimum(within_B1, last_B1)).squeeze(1)


def _chunk(values_BCN: Tensor, chunk_B1: Tensor) -> Tensor:
    """[B, N]: one chunk of each row."""
    return values_BCN.gather(1, chunk_B1[:, :, None].expand(-1, -1, CHUNK)).squeeze(1)
