"""The ends of a decode step on the device: what its rows feed the network, and what follows from what they sampled.

Each is one launch over the batch. In torch they are two dozen, each far smaller than the time it takes to start.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.decode.sampling import Summaries, draw, summaries_of

ROWS_PER_PROGRAM = 64


class StepRows(Protocol):
    """What a step reads and writes of the state rows, R of them; the engine's `DeviceRows` has these tensors."""

    alive_R: Tensor
    """bool[R]."""
    next_token_R: Tensor
    """int64[R]: the newest token, whose keys and values are not computed yet."""
    position_R: Tensor
    sampled_R: Tensor
    """int64[R]: tokens sampled so far."""
    limit_R: Tensor
    """int64[R]: the most tokens a row may sample."""
    streams_R: Tensor
    """int64[R]: the seed of each row."""
    temperature_R: Tensor
    """float32[R]."""
    stops_RS: Tensor
    """int64[R, S]: tokens that end a row, -1 where it has fewer; S is a power of two."""
    recent_RO: Tensor
    """int32[R, O]: the last O tokens, each in the column of its number modulo O."""


@dataclass(slots=True, frozen=True)
class StepInputs:
    """What a step needs to know of each entry of its batch."""

    tokens_B: Tensor
    positions_B: Tensor
    """-1 for rows that are not alive."""
    temperature_B: Tensor
    streams_B: Tensor
    counters_B: Tensor


def begin_step(rows: StepRows, rows_B: Tensor) -> StepInputs:
    """Look the batch up in the rows."""
    B = len(rows_B)
    ids = torch.empty((4, B), dtype=torch.int64, device=rows_B.device)
    temperature_B = torch.empty(B, dtype=torch.float32, device=rows_B.device)
    state = (rows.alive_R, rows.next_token_R, rows.position_R, rows.temperature_R, rows.streams_R, rows.sampled_R)
    _begin[(triton.cdiv(B, ROWS_PER_PROGRAM),)](rows_B, *state, *ids, temperature_B, B, N=ROWS_PER_PROGRAM)
    tokens_B, positions_B, streams_B, counters_B = ids
    return StepInputs(tokens_B, positions_B, temperature_B, streams_B, counters_B)


def end_step(
    rows: StepRows, rows_B: Tensor, tokens_B: Tensor, logprobs_B: Tensor, launched_R: Tensor, out: tuple[Tensor, Tensor]
) -> None:
    """Advance the rows that are alive by their sampled tokens, and store those at `out[..][launched_R[row], entry]`.

    Rows die of stop tokens, of their limit, or of NaN. `launched_R` counts a row's steps since the host zeroed it."""
    B, S = len(rows_B), rows.stops_RS.shape[1]
    state = (rows.alive_R, rows.next_token_R, rows.position_R, rows.sampled_R, rows.limit_R, rows.stops_RS, rows.recent_RO)
    _end[(triton.cdiv(B, ROWS_PER_PROGRAM),)](
        rows_B, *state, launched_R, tokens_B, logprobs_B, *out, out[0].stride(0), B,
        S=S, LAST=rows.recent_RO.shape[1], N=ROWS_PER_PROGRAM,
    )  # fmt: skip


def sample_and_end(
    rows: StepRows,
    rows_B: Tensor,
    inputs: StepInputs,
    logits_BV: Tensor,
    launched_R: Tensor,
    out: tuple[Tensor, Tensor],
    summaries: Summaries | None = None,
) -> None:
    """`sample_plain` and `end_step` in one launch, which leaves in `inputs` what the next step of the same rows begins with."""
    summaries = summaries or summaries_of(logits_BV, inputs.temperature_B)
    (B, V), (_, C) = logits_BV.shape, summaries.peaks_BC.shape
    summaries.check(logits_BV)
    state = (rows.alive_R, rows.next_token_R, rows.position_R, rows.sampled_R, rows.limit_R, rows.stops_RS, rows.recent_RO)
    given = (inputs.temperature_B, inputs.streams_B, inputs.counters_B, summaries.peaks_BC, summaries.sums_BC)
    _draw_and_end[(B,)](
        logits_BV, logits_BV.stride(0), V, *given, C, inputs.tokens_B, inputs.positions_B,
        rows_B, *state, launched_R, *out, out[0].stride(0),
        N=summaries.chunk, PADDED_C=triton.next_power_of_2(C), S=rows.stops_RS.shape[1], LAST=rows.recent_RO.shape[1],
        num_warps=summaries.warps,
    )  # fmt: skip


@triton.jit
def _draw_and_end(  # type: ignore[no-untyped-def]
    logits_BV, stride, V, temperature_B, streams_B, counters_B, peaks_BC, sums_BC, C, tokens_B, positions_B,
    rows, alive, next_token, position, sampled, limit, stops, recent, launched, out_tokens, out_logprobs, out_stride,
    N: tl.constexpr, PADDED_C: tl.constexpr, S: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0)
    row = tl.load(rows + entry)
    # Asked for before the logits are: they say what becomes of the token. Entries that are not alive change nothing.
    acts = tl.load(alive + row) != 0
    step, most = tl.load(launched + row), tl.load(limit + row)
    at, count = tl.load(positions_B + entry), tl.load(counters_B + entry) + 1
    stop_S = tl.load(stops + row * S + tl.arange(0, S))
    token, logprob = draw(entry, logits_BV, stride, V, temperature_B, streams_B, counters_B, peaks_BC, sums_BC, C, N, PADDED_C)
    stops_it = tl.max((stop_S == token).to(tl.int32), axis=0) != 0
    ends = (count >= most) | (logprob != logprob) | stops_it
    tl.store(out_tokens + step * out_stride + entry, token, mask=acts)
    tl.store(out_logprobs + step * out_stride + entry, logprob, mask=acts)
    tl.store(recent + row * LAST + (count - 1) % LAST, token.to(tl.int32), mask=acts)
    tl.store(launched + row, step + 1, mask=acts)
    tl.store(next_token + row, token, mask=acts)
    tl.store(position + row, at + 1, mask=acts)
    tl.store(sampled + row, count, mask=acts)
    tl.store(alive + row, ~ends, mask=acts)
    tl.store(tokens_B + entry, token, mask=acts)
    tl.store(positions_B + entry, tl.where(ends, -1, at + 1), mask=acts)
    tl.store(counters_B + entry, count, mask=acts)


@triton.jit
def _begin(  # type: ignore[no-untyped-def]
    rows, alive, next_token, position, temperature, streams, sampled,
    tokens_B, positions_B, streams_B, counters_B, temperature_B, B, N: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * N + tl.arange(0, N)
    inside = entry < B
    row = tl.load(rows + entry, mask=inside, other=0)
    is_alive = tl.load(alive + row, mask=inside, other=0) != 0
    tl.store(tokens_B + entry, tl.load(next_token + row, mask=inside, other=0), mask=inside)
    tl.store(positions_B + entry, tl.where(is_alive, tl.load(position + row, mask=inside, other=0), -1), mask=inside)
    tl.store(streams_B + entry, tl.load(streams + row, mask=inside, other=0), mask=inside)
    tl.store(counters_B + entry, tl.load(sampled + row, mask=inside, other=0), mask=inside)
    tl.store(temperature_B + entry, tl.load(temperature + row, mask=inside, other=1.0), mask=inside)


@triton.jit
def _end(  # type: ignore[no-untyped-def]
    rows, alive, next_token, position, sampled, limit, stops, recent, launched,
    tokens_B, logprobs_B, out_tokens, out_logprobs, out_stride, B, S: tl.constexpr,
    LAST: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.load(rows + entry, mask=entry < B, other=0)
    # Entries that are not alive change nothing; several of them may stand for the same dead row.
    acts = (entry < B) & (tl.load(alive + row, mask=entry < B, other=0) != 0)
    token = tl.load(tokens_B + entry, mask=acts, other=-2)
    logprob = tl.load(logprobs_B + entry, mask=acts, other=0.0)
    count = tl.load(sampled + row, mask=acts, other=0) + 1
    ends = (count >= tl.load(limit + row, mask=acts, other=0)) | (logprob != logprob)
    for index in tl.static_range(S):
        ends = ends | (tl.load(stops + row * S + index, mask=acts, other=-1) == token)
    step = tl.load(launched + row, mask=acts, other=0)
    tl.store(out_tokens + step * out_stride + entry, token, mask=acts)
    tl.store(out_logprobs + step * out_stride + entry, logprob, mask=acts)
    tl.store(recent + row * LAST + (count - 1) % LAST, token.to(tl.int32), mask=acts)
    tl.store(launched + row, step + 1, mask=acts)
    tl.store(next_token + row, token, mask=acts)
    tl.store(position + row, tl.load(position + row, mask=acts, other=0) + 1, mask=acts)
    tl.store(sampled + row, count, mask=acts)
    tl.store(alive + row, ~ends, mask=acts)
