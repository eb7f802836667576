"""Runs what the scheduler decided: prompts, then decode steps, then what comes back from the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from redline.engine.native.cache.attention import GatherAttention, Runs
from redline.engine.native.cache.kv_cache import KVCache
from redline.engine.native.cache.paged_attention import PagedAttention
from redline.engine.native.cache.prefixes import Prefixes
from redline.engine.native.cache.routing import RecordedRoutes
from redline.engine.native.running.device_rows import DeviceRows
from redline.engine.native.running.sampler import Sampled
from redline.engine.native.running.verification import MAX_TOKENS, NEWEST, NO_GUESS, Drafts, Guesses
from redline.engine.native.scheduler import Chunk, Plan
from redline.engine.native.sequence import Wants
from redline.models.decoder import AnyAttend, Decoder
from redline.models.files.hf import AnyDecoder
from redline.models.lora.per_token import LoraBank

PROMPT_LOGPROBS_CHUNK = 512
"""Prompt positions whose logits are held at once."""
SCRUBBED_BYTES = 2**24
"""Of blocks that are looked at at once: that takes some four times as many, and is asked for when there may be none."""


@dataclass(slots=True)
class Samples:
    """Sampled tokens of S steps for B rows, where they were sampled."""

    tokens_SB: Tensor
    logprobs_SB: Tensor
    raw_SB: Tensor | None = None
    top_ids_SBK: Tensor | None = None
    top_logprobs_SBK: Tensor | None = None

    @classmethod
    def of(cls, sampled: Sampled) -> Samples:
        """One step."""
        parts = (sampled.tokens_B, sampled.logprobs_B, sampled.raw_logprobs_B, sampled.top_ids_BK, sampled.top_logprobs_BK)
        return cls(*(None if part is None else part[None] for part in parts))  # type: ignore[arg-type]

    @property
    def parts(self) -> tuple[Tensor | None, ...]:
        return self.tokens_SB, self.logprobs_SB, self.raw_SB, self.top_ids_SBK, self.top_logprobs_SBK

    def part(self, num_steps: int, num_rows: int) -> Samples:
        """The first steps of the first rows."""
        return Samples(*(None if part is None else part[:num_steps, :num_rows] for part in self.parts))  # type: ignore[arg-type]

    def of_rows(self, begin: int, end: int | None) -> Samples:
        """All steps of some rows."""
        return Samples(*(None if part is None else part[:, begin:end] for part in self.parts))  # type: ignore[arg-type]

    def spread(self, drafts: Drafts, num_steps: int) -> Samples:
        """[S, B] of the tokens [1, T] of a verifying step: the first S of each row. What none takes is zero."""
        inside_T = drafts.ahead_T < num_steps
        places = torch.from_numpy(drafts.ahead_T[inside_T]), torch.from_numpy(drafts.which_T[inside_T])

        def spread(part: Tensor) -> Tensor:
            whole = part.new_zeros((num_steps, len(drafts.lengths_B), *part.shape[2:]))
            whole[places] = part[0, torch.from_numpy(inside_T)]
            return whole

        return Samples(*(None if part is None else spread(part) for part in self.parts))  # type: ignore[arg-type]

    def by_row(self, guesses: Guesses) -> Samples:
        """[S · A, B] of the tokens [S, T] of steps that guess, where a row has A entries at most: its own one after the other,
        those that do not count included. What is no entry is `NO_GUESS`."""
        most, places = int(guesses.lengths_B.max()), (torch.from_numpy(guesses.ahead_T), torch.from_numpy(guesses.which_T))

        def spread(part: Tensor) -> Tensor:
            whole = part.new_full((len(part), most, len(guesses.counts_B), *part.shape[2:]), NO_GUESS)
            whole[:, places[0], places[1]] = part
            return whole.flatten(0, 1)

        return Samples(*(None if part is None else spread(part) for part in self.parts))  # type: ignore[arg-type]

    def put_extras(self, step: Tensor, sampled: Sampled) -> None:
        """`put` without tokens and logprobs."""
        for part, fresh in zip(self.parts[2:], Samples.of(sampled).parts[2:], strict=True):
            if part is not None and fresh is not None:
                part.index_copy_(0, step, fresh)

    def put(self, step: Tensor, sampled: Sampled) -> None:
        """Store one step's samples at the number that `step` [1] holds on the device."""
        for part, fresh in zip(self.parts, Samples.of(sampled).parts, strict=True):
            if part is not None and fresh is not None:
                part.index_copy_(0, step, fresh)


@dataclass(slots=True)
class Results:
    """Samples on their way to the host."""

    rows_B: np.ndarray
    epochs_B: np.ndarray
    version: int
    is_first: bool
    """They follow prompts."""
    samples: Samples
    arrived: torch.cuda.Event | None = None
    counting_SB: np.ndarray | None = None
    """bool, of verifying steps: which of the tokens count; None where all do."""
    guesses: Guesses | None = None
    """What a step guesses with; `wait` turns its entries into tokens of each row. None where it does not guess."""
    most_B: np.ndarray | None = None
    """int64: tokens that it brings each row at most; None where a row that is alive gets one for each step."""

    def wait(self) -> Samples:
        if self.arrived is not None:
            self.arrived.synchronize()
            self.arrived = None
        if self.guesses is not None and self.counting_SB is None:
            self.samples = self.samples.by_row(self.guesses)
            self.counting_SB = self.samples.tokens_SB.numpy() >= 0
        return self.samples


@dataclass(slots=True, frozen=True)
class Decoding:
    """Rows that decode one token each."""

    rows_B: np.ndarray
    positions_B: np.ndarray
    """Those of their newest tokens."""
    tables_BN: np.ndarray
    """int: the blocks of each."""
    uses_lora: bool


class Runner:
    """The network, its cache and its rows on one device. Every call only launches; `Results.wait` waits."""

    max_steps = 1
    """Decode steps that can be launched at once."""
    runs_ahead = False
    """Whether launching returns before the work is done."""
    reads_prefixes_once = False
    """Whether `decode` makes use of what rows have in common."""
    guesses_itself = False
    """Whether `guess` is to be used in place of `verify`."""
    most_verified = MAX_TOKENS
    """Tokens that one step of `verify` or `guess` takes, the rows' newest ones included."""

    def __init__(self, decoder: AnyDecoder, cache: KVCache, rows: DeviceRows) -> None:
        self._decoder = decoder
        self.cache = cache
        self.rows = rows
        self.lora: LoraBank | None = None
        """The adapters; the engine brings them."""

    @property
    def num_captured(self) -> int:
        """How often a step was recorded to be replayed, which takes many times as long as the step."""
        return 0

    @property
    def _dtype(self) -> torch.dtype:
        return self._decoder.output_weight.dtype

    def prepare(self, plan: Plan) -> None:
        """Tell the device who holds which row and which blocks."""
        self.rows.kill(plan.preempted_rows)
        self.rows.enter(plan.admitted)
        self.rows.set_blocks(plan.new_blocks)

    def _forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        attend: AnyAttend,
        adapter_slots_T: Tensor | None,
        only_M: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [T, E], or [M, E] of some tokens; a batch without adapters runs as if there were none."""
        if only_M is not None:
            assert isinstance(self._decoder, Decoder)
            return self._decoder(tokens_T, positions_T, attend, only_M=only_M)
        if self.cache.routing is not None:
            assert isinstance(self._decoder, Decoder)
            assert adapter_slots_T is None, "no adapter stands beside an expert"
            assert self._decoder.spec.experts is not None
            routes = RecordedRoutes(self.cache, self._slots(attend), self._decoder.spec.experts.layers)
            return self._decoder(tokens_T, positions_T, attend, routes=routes)
        if adapter_slots_T is None:
            return self._decoder(tokens_T, positions_T, attend)
        assert self.lora is not None
        assert isinstance(self._decoder, Decoder)
        return self._decoder(tokens_T, positions_T, attend, self.lora.active(adapter_slots_T))

    def _slots(self, attend: AnyAttend) -> Tensor:
        """int64[T]: where in the cache the tokens of a pass are."""
        assert isinstance(attend, GatherAttention | PagedAttention)
        return attend.slots_T

    # ── decode ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def decode(
        self, rows_B: np.ndarray, positions_B: np.ndarray, num_steps: int, wants: Wants, prefixes: Prefixes | None = None
    ) -> Samples:
        """`positions_B` are those of the rows' newest tokens."""
        assert num_steps == 1
        assert prefixes is None
        rows = self.rows.upload(rows_B, torch.int64)
        tables = self.rows.tables_RN[rows].cpu().numpy()
        attend = self._attention(Runs(positions_B, np.ones_like(positions_B), tables))
        return Samples.of(self._decode_once(rows, attend.positions_T, attend, wants))

    def _attention(self, runs: Runs) -> GatherAttention | PagedAttention:
        """That of rows that decode, or whose drafts are verified."""
        return GatherAttention(self.cache, runs, self._dtype)

    def _decode_once(self, rows_B: Tensor, positions_B: Tensor, attend: AnyAttend, wants: Wants) -> Sampled:
        slots_B = self.rows.adapter_slots(rows_B, wants)
        hidden_BE = self._forward(self.rows.next_token_R[rows_B], positions_B, attend, slots_B)
        self.rows.position_R.index_add_(0, rows_B, self.rows.alive_R[rows_B].long())
        return self.rows.sample(rows_B, self._decoder.logits(hidden_BE), wants)

    # ── verify ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def verify(self, rows_B: np.ndarray, positions_B: np.ndarray, drafts: Drafts, wants: Wants) -> tuple[Samples, np.ndarray]:
        """Put the newest token of every row through the network, and its drafts behind it. Returns what was sampled after each
        row's tokens, on the host, and how many of those count; the rows stand after those. Waits for the device."""
        samples, arrived = self.fetch(self._verify(rows_B, positions_B, drafts, wants))
        if arrived is not None:
            arrived.synchronize()
        if samples.tokens_SB.shape[1] < len(drafts.tokens_T):
            drafts = drafts.without_any()
        counts_B = drafts.num_counting(samples.tokens_SB[0].numpy(), samples.logprobs_SB[0].numpy())
        return samples.spread(drafts, int(counts_B.max())), counts_B

    def guess(self, rows_B: np.ndarray, guesses: Guesses, num_steps: int, wants: Wants) -> Samples:
        """Steps that put the newest token of every row through the network, and what the device guesses behind it. Returns
        [S, T]: below 0 is what does not count. Does not wait."""
        raise NotImplementedError

    def _verify(self, rows_B: np.ndarray, positions_B: np.ndarray, drafts: Drafts, wants: Wants) -> Samples:
        """[1, T]."""
        rows, rows_T, ahead_T, drafts_T = (
            self.rows.upload(part, torch.int64) for part in (rows_B, rows_B[drafts.which_T], drafts.ahead_T, drafts.tokens_T)
        )
        tokens_T = torch.where(drafts_T == NEWEST, self.rows.next_token_R[rows_T], drafts_T)
        runs = Runs(positions_B, drafts.lengths_B, self.rows.tables_RN[rows].cpu().numpy())
        attend = self._attention(runs)
        hidden_TE = self._forward(tokens_T, attend.positions_T, attend, self.rows.adapter_slots(rows_T, wants))
        if self._drop_spoilt(runs, drafts):
            return self._verify(rows_B, positions_B, drafts.without_any(), wants)
        sampled = self.rows.sample_ahead(rows_T, ahead_T, self._decoder.logits(hidden_TE), wants)
        self.rows.advance(rows_T, ahead_T, drafts_T, sampled)
        return Samples.of(sampled)

    def _drop_spoilt(self, runs: Runs, drafts: Drafts) -> bool:
        """Whether drafts have left NaN or infinity in the cache, which would reach even those that must not see them. They are
        zeroed."""
        slots = torch.from_numpy(runs.slots(self.cache.block_size)[drafts.ahead_T > 0]).to(self.cache.blocks.device)
        if not len(slots) or self.cache.is_finite(slots):
            return False
        self.cache.clear(slots)
        return True

    # ── prefill ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def prefill(
        self, chunks: Sequence[Chunk], copies: Sequence[tuple[int, int]], wants: Wants, decoding: Decoding | None = None
    ) -> Samples | None:
        """Put the chunks through the network, and rows that decode beside them; a sample for each of the chunks' `samplers`, in
        order, and then for each of those rows. In a pass of their own those would wait for all its small calls, as many as
        this one has, whenever a prompt comes in."""
        runs = _runs(chunks, decoding)
        ends = _ends(chunks, runs)
        logits_PV = self._end_logits(chunks, decoding, runs, ends.tokens_P)
        if decoding is not None:
            decoding_B = self.rows.upload(decoding.rows_B, torch.int64)
            self.rows.position_R.index_add_(0, decoding_B, self.rows.alive_R[decoding_B].long())
        if copies:
            sources, targets = self.rows.upload(np.array(copies).T.copy(), torch.int64)
            self.cache.copy(sources, targets)
        return None if logits_PV is None else self._sample_ends(chunks, decoding, ends, logits_PV, wants)

    def _end_logits(self, chunks: Sequence[Chunk], decoding: Decoding | None, runs: Runs, ends_P: np.ndarray) -> Tensor | None:
        """[P, V] after the tokens `ends_P` of the pass; None where there are none. Scores prompts on the way."""
        slots_T = self._slots_of(chunks, decoding)
        only_ends = slots_T is None and len(ends_P) > 0 and self._needs_only_ends(chunks)
        attend, positions_T = self._prefill_attention(chunks, runs, ends_P if only_ends else None)
        tokens_T = self.rows.upload(np.concatenate([c.sequence.tokens[c.start : c.end] for c in chunks]), torch.int64)
        if decoding is not None:
            tokens_T = torch.cat([tokens_T, self.rows.next_token_R[self.rows.upload(decoding.rows_B, torch.int64)]])
        last_P = self.rows.upload(ends_P, torch.int64)
        hidden = self._forward(tokens_T, positions_T, attend, slots_T, last_P if only_ends else None)
        self._score_prompts(chunks, runs, hidden)
        if not len(last_P):
            return None
        return self._decoder.logits(hidden if only_ends else hidden[last_P])

    def _slots_of(self, chunks: Sequence[Chunk], decoding: Decoding | None) -> Tensor | None:
        """int64[T]: the adapter slot of every token; None where none has an adapter."""
        if not any(c.sequence.wants.lora for c in chunks) and not (decoding and decoding.uses_lora):
            return None
        slots = np.repeat([c.sequence.adapter_slot for c in chunks], [c.end - c.start for c in chunks])
        slots_T = self.rows.upload(slots, torch.int64)
        if decoding is None:
            return slots_T
        return torch.cat([slots_T, self.rows.adapter_slot_R[self.rows.upload(decoding.rows_B, torch.int64)]])

    def _prefill_attention(self, chunks: Sequence[Chunk], runs: Runs, only_P: np.ndarray | None) -> tuple[AnyAttend, Tensor]:
        """And positions. With `only_P`, the last layer goes on with these tokens alone."""
        attend = GatherAttention(self.cache, runs, self._dtype)
        return attend, attend.positions_T

    def _needs_only_ends(self, chunks: Sequence[Chunk]) -> bool:
        """Whether the last layer may leave out the tokens after which nothing is sampled."""
        needs_all = self.cache.routing is not None or any(c.sequence.request.sampling.prompt_logprobs for c in chunks)
        return isinstance(self._decoder, Decoder) and not needs_all

    def _sample_ends(
        self, chunks: Sequence[Chunk], decoding: Decoding | None, ends: _Ends, logits_PV: Tensor, wants: Wants
    ) -> Samples:
        """The samplers of a prompt share its last logits."""
        which_B = self.rows.upload(np.repeat(np.arange(len(ends.counts_P)), ends.counts_P), torch.int64)
        rows_B = self.rows.upload([s.row for c in chunks for s in c.samplers], torch.int64)
        self.rows.wake(rows_B)
        if decoding is not None:
            rows_B = torch.cat([rows_B, self.rows.upload(decoding.rows_B, torch.int64)])
        logits_BV = logits_PV if len(which_B) == len(logits_PV) else logits_PV[which_B]
        return Samples.of(self.rows.sample(rows_B, logits_BV, wants))

    def _score_prompts(self, chunks: Sequence[Chunk], runs: Runs, hidden_TE: Tensor) -> None:
        """Logprobs of the prompt tokens that follow each position, for requests that want them."""
        for begin, chunk in zip(runs.offsets, chunks, strict=False):
            sequence = chunk.sequence
            last = min(chunk.end, sequence.num_prompt - 1)
            if not sequence.request.sampling.prompt_logprobs or last <= chunk.start:
                continue
            targets = torch.from_numpy(sequence.tokens[chunk.start + 1 : last + 1].astype(np.int64))
            hidden = hidden_TE[begin : begin + last - chunk.start]
            logprobs = [
                torch.log_softmax(self._decoder.logits(part).float(), dim=-1).gather(1, ids[:, None]).squeeze(1)
                for part, ids in zip(
                    hidden.split(PROMPT_LOGPROBS_CHUNK), targets.to(hidden.device).split(PROMPT_LOGPROBS_CHUNK), strict=True
                )
            ]
            sequence.prompt_logprobs[chunk.start + 1 : last + 1] = torch.cat(logprobs).cpu().numpy()

    # ── results ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def fetch(self, samples: Samples) -> tuple[Samples, torch.cuda.Event | None]:
        """Send samples to the host; they are there once the event, if any, has happened."""
        return Samples(*(None if part is None else part.cpu() for part in samples.parts)), None  # type: ignore[arg-type]

    def scrub(self, blocks: Sequence[int]) -> list[int]:
        """Zero those of the blocks that hold NaN or infinity, which would reach their next holder; returns which."""
        if not blocks:
            return []
        candidates, cache = self.rows.upload(list(blocks), torch.int64), self.cache.blocks
        at_once = max(1, SCRUBBED_BYTES * cache.shape[2] // cache.nbytes)
        parts = (cache[:, :, part].isfinite().transpose(0, 2).flatten(1).all(dim=1) for part in candidates.split(at_once))
        spoilt = candidates[~torch.cat(list(parts))]
        cache[:, :, spoilt] = 0
        return spoilt.tolist()


def _runs(chunks: Sequence[Chunk], decoding: Decoding | None) -> Runs:
    """The chunks, and after them the rows that decode. The device has their blocks too, but asking it would mean waiting."""
    starts, ends = np.array([c.start for c in chunks]), np.array([c.end for c in chunks])
    tables = [np.array(c.sequence.blocks) for c in chunks]
    if decoding is not None:
        starts, ends = np.concatenate([starts, decoding.positions_B]), np.concatenate([ends, decoding.positions_B + 1])
        tables += list(decoding.tables_BN)
    tables_SN = np.zeros((len(tables), max(map(len, tables))), np.int64)
    for row, table in zip(tables_SN, tables, strict=True):
        row[: len(table)] = table
    return Runs(starts, ends - starts, tables_SN)


@dataclass(slots=True, frozen=True)
class _Ends:
    """The tokens of a pass after which something is sampled."""

    tokens_P: np.ndarray
    """int64: their places in the packed batch."""
    counts_P: np.ndarray
    """Sequences that sample after each."""


def _ends(chunks: Sequence[Chunk], runs: Runs) -> _Ends:
    counts_S = np.array([len(c.samplers) for c in chunks] + [1] * (len(runs.lengths_S) - len(chunks)))
    return _Ends((runs.offsets[1:] - 1)[counts_S > 0], counts_S[counts_S > 0])
