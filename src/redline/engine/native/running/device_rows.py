"""The device's side of the state rows: everything a decode step reads and writes, so that it needs nothing from the host.

One row more than sequences: the last is never alive and fills batches up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from redline.engine.native.running.replay import Replay
from redline.engine.native.running.rows import NO_TOKEN
from redline.engine.native.running.sampler import Sampled, SamplingRows, sample, stream
from redline.engine.native.sequence import NO_SLOT, Wants
from redline.engine.native.sequence import Sequence as Sequence_

MAX_STOPS = 8
"""Stop tokens a sequence may have."""
RECENT = 8
"""Last tokens of a row that the device keeps."""


class DeviceRows:
    """Tensors over the rows."""

    def __init__(self, num_rows: int, max_blocks: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self.dead_row = num_rows

        def rows(fill: float, dtype: torch.dtype) -> Tensor:
            return torch.full((num_rows + 1,), fill, dtype=dtype, device=device)

        self.alive_R = rows(False, torch.bool)
        self.next_token_R = rows(0, torch.int64)
        """The newest token, whose keys and values are not computed yet."""
        # What a new tenant brings lies together, so that it takes two copies to the device and not ten.
        self._integers = torch.zeros((7, num_rows + 1), dtype=torch.int64, device=device)
        self.position_R, self.sampled_R, self.limit_R, self.streams_R, self.min_tokens_R, self.top_k_R, self.adapter_slot_R = (
            self._integers
        )
        self.adapter_slot_R.fill_(NO_SLOT)
        self._floats = torch.ones((3, num_rows + 1), dtype=torch.float32, device=device)
        self.temperature_R, self.top_p_R, self.min_p_R = self._floats
        self.min_p_R.zero_()
        self.stops_RS = torch.full((num_rows + 1, MAX_STOPS), NO_TOKEN, dtype=torch.int64, device=device)
        self.tables_RN = torch.zeros((num_rows + 1, max_blocks), dtype=torch.int32, device=device)
        self.recent_RO = torch.full((num_rows + 1, RECENT), NO_TOKEN, dtype=torch.int32, device=device)
        """The last tokens, each in the column of its number modulo `RECENT`."""
        self.share_samples: Callable[[Tensor, Tensor], None] | None = None
        """Where several processes sample the same rows: makes their tokens and logprobs one."""
        self.replay: Replay | None = None
        """Draws given tokens in the place of those that were sampled."""
        self.bias_RV: Tensor | None = None
        """Made when the first request asks for a bias or a mask."""

    def enter(self, sequences: Sequence[Sequence_]) -> None:
        """New tenants; each comes alive with its first token."""
        if not sequences:
            return
        rows = self.upload([s.row for s in sequences], torch.int64)
        params = [s.request.sampling for s in sequences]
        integers = [
            (len(s.tokens), s.num_sampled_before, p.max_tokens, stream(p.seed, s.index), p.min_tokens, p.top_k, s.adapter_slot)
            for s, p in zip(sequences, params, strict=True)
        ]
        stops = [[*p.stop_token_ids, *[NO_TOKEN] * (MAX_STOPS - len(p.stop_token_ids))] for p in params]
        floats = [(p.temperature, p.top_p, p.min_p) for p in params]
        self._integers.index_copy_(1, rows, self.upload(integers, torch.int64).T)
        self._floats.index_copy_(1, rows, self.upload(floats, torch.float32).T)
        self.stops_RS.index_copy_(0, rows, self.upload(stops, torch.int64))
        if self.replay is not None:
            self.replay.enter(sequences)

    def set_biases(self, sequences: Sequence[Sequence_]) -> None:
        """What new tenants ask for, before their first token is sampled. For the table of the first there may be no memory."""
        for sequence in sequences:
            self._set_bias(sequence)

    def _set_bias(self, sequence: Sequence_) -> None:
        sampling = sequence.request.sampling
        if not sequence.wants.bias:
            if self.bias_RV is not None:
                self.bias_RV[sequence.row] = 0
            return
        if self.bias_RV is None:
            self.bias_RV = torch.zeros((self.dead_row + 1, self._vocab_size), device=self._device)
        bias = np.zeros(self._vocab_size, np.float32)
        if sampling.allowed_token_ids is not None:
            bias[:] = -np.inf
            bias[list(sampling.allowed_token_ids)] = 0
        for token, value in sampling.logit_bias.items():
            bias[token] += value
        self.bias_RV[sequence.row] = torch.from_numpy(bias).to(self._device)

    def adapter_slots(self, rows_B: Tensor, wants: Wants) -> Tensor | None:
        """int64[B]; None where no row of the batch has an adapter."""
        return self.adapter_slot_R[rows_B] if wants.lora else None

    def set_blocks(self, entries: Sequence[tuple[int, int, int]]) -> None:
        """(row, place, block)."""
        if entries:
            rows, places, blocks = self.upload(np.array(entries).T.copy(), torch.int64)
            self.tables_RN[rows, places] = blocks.to(torch.int32)

    def wake(self, rows_B: Tensor) -> None:
        """The rows' prompts are computed; they sample from now on."""
        self.alive_R.index_fill_(0, rows_B, True)

    def kill(self, rows: Sequence[int]) -> None:
        """The rows sample no more."""
        if rows:
            self.alive_R.index_fill_(0, self.upload(list(rows), torch.int64), False)

    def sample(self, rows_B: Tensor, logits_BV: Tensor, wants: Wants) -> Sampled:
        """The next token of every row, and what follows from it: rows die of stop tokens, of their limit, or of NaN."""
        counters_B = self.sampled_R[rows_B]
        sampled = sample(logits_BV, self._sampling_rows(rows_B, counters_B, wants), raw=wants.raw, top=wants.top)
        self.replace(rows_B, counters_B, sampled.tokens_B, sampled.logprobs_B)
        alive_B, counters_B = self.alive_R[rows_B], counters_B + 1
        stopped_B = (sampled.tokens_B[:, None] == self.stops_RS[rows_B]).any(dim=1) | (counters_B >= self.limit_R[rows_B])
        self.next_token_R.index_copy_(0, rows_B, sampled.tokens_B)
        self.recent_RO[rows_B, (counters_B - 1) % RECENT] = sampled.tokens_B.int()
        self.sampled_R.index_copy_(0, rows_B, counters_B)
        self.alive_R.index_copy_(0, rows_B, alive_B & ~stopped_B & ~sampled.logprobs_B.isnan())
        return sampled

    def sample_ahead(self, rows_T: Tensor, ahead_T: Tensor, logits_TV: Tensor, wants: Wants) -> Sampled:
        """The token that each row samples so many tokens after its next one, were the tokens in between those that the logits
        were computed with. Changes nothing."""
        counters_T = self.sampled_R[rows_T] + ahead_T
        sampled = sample(logits_TV, self._sampling_rows(rows_T, counters_T, wants), raw=wants.raw, top=wants.top)
        self.replace(rows_T, counters_T, sampled.tokens_B, sampled.logprobs_B)
        return sampled

    @property
    def are_replaced(self) -> bool:
        """Whether others say what is sampled."""
        return self.share_samples is not None or self.replay is not None

    def replace(self, rows_B: Tensor, counters_B: Tensor, tokens_B: Tensor, logprobs_B: Tensor) -> None:
        """Put what others say in the place of what was sampled here: another rank, or a text that is replayed."""
        if self.share_samples is not None:
            self.share_samples(tokens_B, logprobs_B)
        if self.replay is not None:
            self.replay.draw(rows_B, counters_B, tokens_B)

    def advance(self, rows_T: Tensor, ahead_T: Tensor, drafts_T: Tensor, sampled: Sampled) -> None:
        """Rows take the tokens that count of those sampled ahead, and die of the last one as in `sample`. Those of a row lie
        together, each with how many are in front of it and the draft that it follows on; `Drafts.num_counting` says which
        count."""
        is_first_T, tokens_T, nan_T = ahead_T == 0, sampled.tokens_B, sampled.logprobs_B.isnan()
        wrong_T = ~is_first_T & ((tokens_T.roll(1) != drafts_T) | nan_T.roll(1))
        run_T = is_first_T.cumsum(0)
        in_front_TT = (run_T[:, None] == run_T) & (ahead_T[:, None] >= ahead_T)
        counts_T = ~(in_front_TT & wrong_T).any(dim=1)
        goes_on_T = (counts_T & ~is_first_T).roll(-1)  # what comes back to the end is the first of its row
        alive_T = self.alive_R[rows_T] & counts_T & ~goes_on_T
        count_T, position_T = self.sampled_R[rows_T] + ahead_T + 1, self.position_R[rows_T] + ahead_T + 1
        stopped_T = (tokens_T[:, None] == self.stops_RS[rows_T]).any(dim=1) | (count_T >= self.limit_R[rows_T])
        # A row is written once, by its last token; the others write to the row that nobody has.
        targets_T = torch.where(alive_T, rows_T, self.dead_row)
        self.next_token_R.index_copy_(0, targets_T, tokens_T)
        self.sampled_R.index_copy_(0, targets_T, count_T)
        self.position_R.index_copy_(0, targets_T, position_T)
        self.alive_R.index_copy_(0, targets_T, alive_T & ~stopped_T & ~nan_T)

    def _sampling_rows(self, rows_B: Tensor, counters_B: Tensor, wants: Wants) -> SamplingRows:
        return SamplingRows(
            temperature_B=self.temperature_R[rows_B],
            streams_B=self.streams_R[rows_B],
            counters_B=counters_B,
            top_k_B=self.top_k_R[rows_B] if wants.top_k else None,
            top_p_B=self.top_p_R[rows_B] if wants.top_p else None,
            min_p_B=self.min_p_R[rows_B] if wants.min_p else None,
            bias_BV=self._bias(rows_B) if wants.bias else None,
            stops_BS=self.stops_RS[rows_B] if wants.min_tokens else None,
            min_tokens_B=self.min_tokens_R[rows_B] if wants.min_tokens else None,
        )

    def _bias(self, rows_B: Tensor) -> Tensor:
        assert self.bias_RV is not None, "a batch wants a bias that no sequence brought"
        return self.bias_RV[rows_B]

    def upload(self, values: object, dtype: torch.dtype) -> Tensor:
        """A tensor on the device, without waiting for it to get there."""
        tensor = torch.as_tensor(values, dtype=dtype)
        if self._device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self._device, non_blocking=True)
