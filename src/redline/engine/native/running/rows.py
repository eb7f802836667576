"""The host's side of the state rows: what each running sequence has sampled, as far as the host has heard.

The device runs ahead of the host. `launched` counts what it will have done once everything it was given has run, or may have
done at most, where it guesses tokens; `sampled` counts what has come back.
"""

from __future__ import annotations

from functools import reduce
from operator import or_

import numpy as np

from redline.engine.native.cache.block_table import BlockTable
from redline.engine.native.sequence import Sampled, Sequence, Wants

NO_TOKEN = -1


class Rows:
    """Arrays over the `max_num_seqs` rows, so that a step costs a few array operations, not a loop over sequences."""

    def __init__(self, num_rows: int, max_len: int, max_blocks: int) -> None:
        self.table = BlockTable(num_rows, max_blocks)
        self.tokens_RN = np.empty((num_rows, max_len), np.int32)
        self.logprobs_RN = np.empty((num_rows, max_len), np.float32)
        self.sampled_R = np.zeros(num_rows, np.int64)
        self.limit_R = np.zeros(num_rows, np.int64)
        """Most tokens the row may sample."""
        self.min_tokens_R = np.zeros(num_rows, np.int64)
        self.stops_RS = np.full((num_rows, 1), NO_TOKEN, np.int64)
        self.alive_R = np.zeros(num_rows, bool)
        self.epoch_R = np.zeros(num_rows, np.int64)
        """Counts the row's tenants: results for an earlier one are dropped."""
        self.launched_position_R = np.zeros(num_rows, np.int64)
        """Tokens with keys and values in the cache, everything launched included."""
        self.launched_R = np.zeros(num_rows, np.int64)
        """Tokens sampled, everything launched included."""
        self.drafted_R = np.zeros(num_rows, np.int64)
        """Drafts that the next step verifies: it needs room for them too."""
        self.last_token_R = np.zeros(num_rows)
        """When the newest token came; a sequence takes this and the next along when it leaves."""
        self.newest_version_R = np.full(num_rows, -1)
        self.streaming_R = np.zeros(num_rows, np.int64)
        """Tokens of a piece at least; 0 where only the whole is wanted."""
        self.has_stop_R = np.zeros(num_rows, bool)
        """Whether it ends with a string, for which every token is looked at."""
        self._wants_R = np.zeros(num_rows, np.int64)
        self._known_wants: dict[Wants, int] = {}
        """Numbers of those in the array before."""

    def enter(self, sequence: Sequence) -> None:
        """A new tenant, with what it sampled before it was preempted."""
        row, sampling, before = sequence.row, sequence.request.sampling, sequence.sampled
        count = 0 if before is None else len(before.token_ids)
        if before is not None:
            self.tokens_RN[row, :count] = before.token_ids
            self.logprobs_RN[row, :count] = before.logprobs
        self.sampled_R[row] = self.launched_R[row] = count
        self.limit_R[row] = sampling.max_tokens
        self.min_tokens_R[row] = sampling.min_tokens
        self._widen_stops(len(sampling.stop_token_ids))
        self.stops_RS[row] = NO_TOKEN
        self.stops_RS[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        self.alive_R[row] = True
        self.epoch_R[row] += 1
        self.launched_position_R[row] = self.drafted_R[row] = 0
        self.last_token_R[row], self.newest_version_R[row] = sequence.last_token, sequence.newest_version
        self.streaming_R[row], self.has_stop_R[row] = sequence.streaming, bool(sampling.stop)
        self._wants_R[row] = self._known_wants.setdefault(sequence.wants, len(self._known_wants))
        self.table.clear(row)

    def _widen_stops(self, width: int) -> None:
        if width > self.stops_RS.shape[1]:
            more = np.full((len(self.stops_RS), width - self.stops_RS.shape[1]), NO_TOKEN, np.int64)
            self.stops_RS = np.concatenate([self.stops_RS, more], axis=1)

    def wants(self, rows_B: np.ndarray) -> Wants:
        """What any of these asks for."""
        known, counts = list(self._known_wants), np.bincount(self._wants_R[rows_B])
        return reduce(or_, (known[number] for number in np.flatnonzero(counts)), Wants())

    def launched_at_most(self, rows_B: np.ndarray, under_way_B: np.ndarray) -> None:
        """What is under way brings these rows at most so many tokens: what was launched before may have brought fewer than it
        could."""
        launched_B = np.minimum(self.limit_R[rows_B], self.sampled_R[rows_B] + under_way_B)
        self.launched_position_R[rows_B] += launched_B - self.launched_R[rows_B]
        self.launched_R[rows_B] = launched_B

    def leave(self, sequence: Sequence) -> None:
        row = sequence.row
        sequence.last_token, sequence.newest_version = float(self.last_token_R[row]), int(self.newest_version_R[row])
        self.alive_R[row] = False
        self.epoch_R[row] += 1

    def take(self, row: int) -> Sampled:
        """What the row has sampled; a copy."""
        count = self.sampled_R[row]
        return Sampled(self.tokens_RN[row, :count].copy(), self.logprobs_RN[row, :count].copy())

    def append(
        self,
        rows_B: np.ndarray,
        epochs_B: np.ndarray,
        tokens_B: np.ndarray,
        logprobs_B: np.ndarray,
        counting_B: np.ndarray | None = None,
    ) -> np.ndarray:
        """One sampled token for each row that still has the tenant it was sampled for, and whose token counts. Returns for
        which ones that is so."""
        live_B = self.alive_R[rows_B] & (self.epoch_R[rows_B] == epochs_B)
        if counting_B is not None:
            live_B &= counting_B
        rows, tokens = rows_B[live_B], tokens_B[live_B]
        self.tokens_RN[rows, self.sampled_R[rows]] = tokens
        self.logprobs_RN[rows, self.sampled_R[rows]] = logprobs_B[live_B]
        self.sampled_R[rows] += 1
        stopped = (self.stops_RS[rows] == tokens[:, None]).any(axis=1)
        failed = np.isnan(logprobs_B[live_B])
        self.alive_R[rows] = ~(stopped | failed | (self.sampled_R[rows] >= self.limit_R[rows]))
        return live_B

    def append_counting(
        self,
        rows_B: np.ndarray,
        epochs_B: np.ndarray,
        tokens_SB: np.ndarray,
        logprobs_SB: np.ndarray,
        counting_SB: np.ndarray,
    ) -> int:
        """`append` of several tokens for each row, of which those that count are in order; behind one that ends its row none
        does. Returns how many it took."""
        live_B = self.alive_R[rows_B] & (self.epoch_R[rows_B] == epochs_B)
        which_T, step_T = np.nonzero((counting_SB & live_B).T)
        if not len(which_T):
            return 0
        row_T, (which, first, counts) = rows_B[which_T], np.unique(which_T, return_index=True, return_counts=True)
        place_T = self.sampled_R[row_T] + np.arange(len(which_T)) - np.repeat(first, counts)
        self.tokens_RN[row_T, place_T] = tokens_SB[step_T, which_T]
        self.logprobs_RN[row_T, place_T] = logprobs_SB[step_T, which_T]
        rows, last = rows_B[which], first + counts - 1
        self.sampled_R[rows] += counts
        tokens, logprobs = self.tokens_RN[rows, place_T[last]], self.logprobs_RN[rows, place_T[last]]
        stopped = (self.stops_RS[rows] == tokens[:, None]).any(axis=1)
        self.alive_R[rows] = ~(stopped | np.isnan(logprobs) | (self.sampled_R[rows] >= self.limit_R[rows]))
        return len(which_T)
