"""Guessed tokens on the device: found in texts, put into a step behind the newest token of their row, and judged by what is
sampled. Nothing waits for the host, so that many steps can be launched at once.

    find_guesses ──► begin_guessing ──► the network, a sample after every entry ──► end_guessing
    a place for rows     tokens and          of T entries: each row's newest            rows take what counts
    that have none       positions           token and its guesses

A row's place is where, in the text of its slot, the next token is expected. It moves on with what is sampled as long as the
text says the same. A row that has lost it gets another, which follows on most of its last tokens; of several one with most
behind it, as much as some steps can guess: the newest is often the very end of a text that repeats itself. Among equals the lot
decides, anew each time: the newest of them, where it goes on otherwise than most, would be found again after every failure.
Where none follows on enough of the last tokens, a row stays where it would be had it not lost its place: many texts differ in
one token only.

Letters: B rows of the batch, T entries, R state rows, S slots (stop tokens in the kernel), L tokens of a slot's text, A entries
of a row at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from redline.kernels.decode.step import ROWS_PER_PROGRAM, StepInputs, StepRows

LEAST_FOLLOWED = 3
"""Last tokens of a row that a place must follow on."""
CHUNK = 1024
"""Places that one program looks at."""
FURTHER_STEPS = 4
"""After the next one, whose guesses a place should have behind it, too."""
NO_TOKEN = -1
"""Between texts, and behind the last one."""
NO_PLACE = -1


@dataclass(slots=True, frozen=True)
class GuessBook:
    """What the rows guess from."""

    texts_SL: Tensor
    """int32, `NO_TOKEN` where there is none."""
    lengths_S: Tensor
    """int64: how far each text goes."""
    slot_R: Tensor
    """int64: whose text a row has; -1 for a row that guesses nothing."""
    place_R: Tensor
    """int64: where its next token is expected; `NO_PLACE`, or -2 - p for a row that lost it and would be at p."""
    found_R: Tensor
    """int64: what `find_guesses` has found: (tokens followed on · 32 + how much is behind it) · 2³² + lot · 2¹⁶ + place; 0 for
    nothing."""

    @classmethod
    def empty(cls, num_slots: int, num_tokens: int, num_rows: int, device: torch.device) -> GuessBook:
        def rows(fill: int) -> Tensor:
            return torch.full((num_rows,), fill, dtype=torch.int64, device=device)

        texts_SL = torch.full((num_slots, num_tokens), NO_TOKEN, dtype=torch.int32, device=device)
        lengths_S = torch.zeros(num_slots, dtype=torch.int64, device=device)
        return cls(texts_SL, lengths_S, rows(-1), rows(NO_PLACE), rows(0))


@dataclass(slots=True, frozen=True)
class Entries:
    """How the tokens of a batch are laid out."""

    rows_B: Tensor
    """int64: row of each sequence."""
    begins_B: Tensor
    """int64: its first entry."""
    counts_B: Tensor
    """int64: how many it has; 0 for what fills the batch up."""
    rows_T: Tensor
    """int64: row of each entry."""
    ahead_T: Tensor
    """int64: entries of its row in front of it."""
    most: int
    """Entries of a row at most."""


def find_guesses(rows: StepRows, book: GuessBook, entries: Entries) -> None:
    """Look for a place for every row that is alive and has none."""
    state = (rows.alive_R, rows.sampled_R, rows.recent_RO)
    L = book.texts_SL.shape[1]
    assert L <= 1 << 16, "a place has 16 bits"
    _find[(len(entries.rows_B), triton.cdiv(L, CHUNK))](
        entries.rows_B, *state, book.texts_SL, book.lengths_S, book.slot_R, book.place_R, book.found_R,
        L=L, LAST=rows.recent_RO.shape[1], LEAST=LEAST_FOLLOWED, GUESSES=entries.most - 1, FURTHER=FURTHER_STEPS,
        N=CHUNK, num_warps=4,
    )  # fmt: skip


def begin_guessing(rows: StepRows, book: GuessBook, entries: Entries) -> StepInputs:
    """The newest token of each row, and what is guessed behind it; the position of an entry without a guess is -1."""
    T, device = len(entries.rows_T), entries.rows_T.device
    ids = torch.empty((4, T), dtype=torch.int64, device=device)
    temperature_T = torch.empty(T, dtype=torch.float32, device=device)
    state = (rows.alive_R, rows.next_token_R, rows.position_R, rows.sampled_R, rows.limit_R, rows.temperature_R, rows.streams_R)
    _begin[(triton.cdiv(T, ROWS_PER_PROGRAM),)](
        entries.rows_T, entries.ahead_T, *state, book.texts_SL, book.slot_R, book.place_R, book.found_R,
        *ids, temperature_T, T, L=book.texts_SL.shape[1], N=ROWS_PER_PROGRAM,
    )  # fmt: skip
    tokens_T, positions_T, streams_T, counters_T = ids
    return StepInputs(tokens_T, positions_T, temperature_T, streams_T, counters_T)


def end_guessing(
    rows: StepRows,
    book: GuessBook,
    entries: Entries,
    sampled: tuple[Tensor, Tensor],
    launched_R: Tensor,
    out: tuple[Tensor, Tensor],
) -> None:
    """Advance the rows that are alive by the tokens that count: those up to the first that is not what was guessed in its
    place, or that ends its row. They are stored at `out[..][launched_R[row], entry]`; -1 stands for a token after a guess that
    was wrong, -2 for none where nothing was guessed."""
    B, S = len(entries.rows_B), rows.stops_RS.shape[1]
    state = (rows.alive_R, rows.next_token_R, rows.position_R, rows.sampled_R, rows.limit_R, rows.stops_RS, rows.recent_RO)
    _end[(triton.cdiv(B, ROWS_PER_PROGRAM),)](
        entries.rows_B, entries.begins_B, entries.counts_B, *state, launched_R,
        book.texts_SL, book.slot_R, book.place_R, book.found_R, *sampled, *out, out[0].stride(0), B,
        L=book.texts_SL.shape[1], S=S, LAST=rows.recent_RO.shape[1], A=entries.most, N=ROWS_PER_PROGRAM,
    )  # fmt: skip


@triton.jit
def _place(place, found):  # type: ignore[no-untyped-def]
    """Where the next token is expected: as it goes on, as it was found just now, or as if it had not been lost; -1: nowhere."""
    other = tl.where(found > 0, found & 0xFFFF, tl.where(place < -1, -2 - place, -1))
    return tl.where(place >= 0, place, other)


@triton.jit
def _find(  # type: ignore[no-untyped-def]
    rows, alive, sampled, recent, texts, lengths, slots, places, found,
    L: tl.constexpr, LAST: tl.constexpr, LEAST: tl.constexpr, GUESSES: tl.constexpr, FURTHER: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    row = tl.load(rows + tl.program_id(0))
    slot = tl.load(slots + row)
    first = tl.program_id(1) * N
    if slot >= 0:  # noqa: SIM102, the length of no slot is not to be read
        if (tl.load(alive + row) != 0) & (tl.load(places + row) < 0) & (first < tl.load(lengths + slot)):
            count = tl.load(sampled + row)
            place_N = first + tl.arange(0, N)
            text = texts + slot * L
            has_more_N = tl.load(text + place_N, mask=place_N < L, other=-1) >= 0
            goes_on_N = has_more_N
            followed_N = tl.zeros([N], tl.int64)
            for back in tl.static_range(1, LAST + 1):
                token = tl.load(recent + row * LAST + (count - back + LAST) % LAST)
                there_N = tl.load(text + place_N - back, mask=(place_N >= back) & (place_N < L), other=-1)
                goes_on_N = goes_on_N & (there_N == token) & (count >= back)
                followed_N += goes_on_N.to(tl.int64)
            if tl.max(followed_N, axis=0) >= LEAST:
                behind_N = tl.zeros([N], tl.int64)
                for nth in tl.static_range(1, GUESSES + FURTHER):
                    ahead = nth if nth < GUESSES else (nth - GUESSES + 2) * GUESSES
                    there_N = tl.load(text + place_N + ahead, mask=place_N + ahead < L, other=-1)
                    has_more_N = has_more_N & (there_N >= 0)
                    behind_N += has_more_N.to(tl.int64)
                lot_N = ((place_N.to(tl.int64) * 2654435761 + count * 1640531527) >> 16) & 0xFFFF
                score_N = ((followed_N * 32 + behind_N) << 32) + (lot_N << 16) + place_N
                tl.atomic_max(found + row, tl.max(tl.where(followed_N >= LEAST, score_N, 0), axis=0))


@triton.jit
def _begin(  # type: ignore[no-untyped-def]
    rows, ahead, alive, next_token, position, sampled, limit, temperature, streams, texts, slots, places, found,
    tokens_T, positions_T, streams_T, counters_T, temperature_T, T, L: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0) * N + tl.arange(0, N)
    inside = entry < T
    row = tl.load(rows + entry, mask=inside, other=0)
    a = tl.load(ahead + entry, mask=inside, other=0)
    slot = tl.load(slots + row, mask=inside, other=-1)
    place = _place(tl.load(places + row, mask=inside, other=-1), tl.load(found + row, mask=inside, other=0))
    count = tl.load(sampled + row, mask=inside, other=0) + a
    at = place + a - 1
    may_guess = inside & (a > 0) & (slot >= 0) & (place >= 0) & (at < L)
    guess = tl.load(texts + tl.maximum(slot, 0) * L + at, mask=may_guess, other=-1).to(tl.int64)
    newest = tl.load(next_token + row, mask=inside, other=0)
    is_alive = tl.load(alive + row, mask=inside, other=0) != 0
    is_live = is_alive & ((a == 0) | ((guess >= 0) & (count < tl.load(limit + row, mask=inside, other=0))))
    tl.store(tokens_T + entry, tl.where(a == 0, newest, tl.maximum(guess, 0)), mask=inside)
    tl.store(positions_T + entry, tl.where(is_live, tl.load(position + row, mask=inside, other=0) + a, -1), mask=inside)
    tl.store(streams_T + entry, tl.load(streams + row, mask=inside, other=0), mask=inside)
    tl.store(counters_T + entry, count, mask=inside)
    tl.store(temperature_T + entry, tl.load(temperature + row, mask=inside, other=1.0), mask=inside)


@triton.jit
def _end(  # type: ignore[no-untyped-def]
    rows, begins, counts, alive, next_token, position, sampled, limit, stops, recent, launched,
    texts, slots, places, found, tokens_T, logprobs_T, out_tokens, out_logprobs, out_stride, B,
    L: tl.constexpr, S: tl.constexpr, LAST: tl.constexpr, A: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.load(rows + b, mask=b < B, other=0)
    num_entries = tl.load(counts + b, mask=b < B, other=0)
    # What fills the batch up, or is not alive, changes nothing; several may stand for the same dead row.
    acts = (b < B) & (num_entries > 0) & (tl.load(alive + row, mask=b < B, other=0) != 0)
    begin = tl.load(begins + b, mask=acts, other=0)
    slot = tl.load(slots + row, mask=acts, other=-1)
    place = _place(tl.load(places + row, mask=acts, other=-1), tl.load(found + row, mask=acts, other=0))
    has_place = acts & (slot >= 0) & (place >= 0)
    text = texts + tl.maximum(slot, 0) * L + place
    old_count = tl.load(sampled + row, mask=acts, other=0)
    most = tl.load(limit + row, mask=acts, other=0)
    step = tl.load(launched + row, mask=acts, other=0)
    out = step * out_stride + begin
    count, newest, dies, hits = old_count, tl.zeros([N], tl.int64), b < 0, b < 0
    counts_too, is_live = acts, acts
    stops_NS = tl.load(stops + row[:, None] * S + tl.arange(0, S)[None, :], mask=acts[:, None], other=-1)
    for a in range(A):  # not unrolled: that would take twenty seconds to compile
        here = acts & (a < num_entries)
        token = tl.load(tokens_T + begin + a, mask=here, other=-3)
        logprob = tl.load(logprobs_T + begin + a, mask=here, other=0.0)
        counts_too = counts_too & here & is_live
        tl.store(out_tokens + out + a, tl.where(counts_too, token, tl.where(is_live, -1, -2)), mask=here)
        tl.store(out_logprobs + out + a, logprob, mask=here)
        tl.store(recent + row * LAST + count % LAST, token.to(tl.int32), mask=counts_too)
        count = tl.where(counts_too, count + 1, count)
        newest = tl.where(counts_too, token, newest)
        stops_here = tl.max((stops_NS == token[:, None]).to(tl.int32), axis=1) > 0
        ends = (count >= most) | (logprob != logprob) | stops_here
        guess = tl.load(text + a, mask=has_place & (place + a < L), other=-1).to(tl.int64)
        dies = tl.where(counts_too, ends, dies)
        hits = tl.where(counts_too, guess == token, hits)
        counts_too = counts_too & (guess == token) & (ends == 0)
        is_live = is_live & (guess >= 0) & (old_count + a + 1 < most)
    num_new = count - old_count
    at = place + num_new
    goes_on = hits & has_place & (tl.load(text + num_new, mask=has_place & (at < L), other=-1) >= 0)
    at = tl.where(goes_on, at, tl.where(has_place & (at < L), -2 - at, -1))
    tl.store(launched + row, step + 1, mask=acts)
    tl.store(next_token + row, newest, mask=acts)
    tl.store(position + row, tl.load(position + row, mask=acts, other=0) + num_new, mask=acts)
    tl.store(sampled + row, count, mask=acts)
    tl.store(alive + row, dies == 0, mask=acts)
    tl.store(places + row, at, mask=acts)
    tl.store(found + row, tl.zeros([N], tl.int64), mask=acts)
