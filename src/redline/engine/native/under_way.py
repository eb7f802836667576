"""Requests under way: what was sampled comes in, sequences that have ended leave, pieces and completions go out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from typing import TYPE_CHECKING

import numpy as np

from redline.engine.native.cache.blocks import BlockPool
from redline.engine.native.cache.routing import routing_of
from redline.engine.native.completions import completion_of, delta_of
from redline.engine.native.lora import Adapters
from redline.engine.native.running.rows import Rows
from redline.engine.native.running.runner import Results, Runner
from redline.engine.native.scheduler import Scheduler
from redline.engine.native.sequence import NO_ROW, Sampled, Sequence, Stage
from redline.engine.native.text.stop_strings import StopSearch
from redline.errors import BrokenModelError, EngineError
from redline.types import UNKNOWN_EXPERT, Completion, Delta, FinishReason

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Event = tuple[int, Delta | EngineError]
"""A request's number, and a piece of one of its completions or why it has none."""


class UnderWay:
    """Every sequence from `add` until its completion, or its request's failure, is among the events."""

    def __init__(
        self,
        rows: Rows,
        scheduler: Scheduler,
        pool: BlockPool,
        adapters: Adapters,
        tokenizer: PreTrainedTokenizerBase | None,
        runner: Callable[[], Runner],
        on_end: Callable[[Sequence], None],
        routing: tuple[int, int] | None = None,
    ) -> None:
        """`tokenizer` finds stop strings. `runner` returns what runs on the device now; `on_end` hears of every sequence that
        leaves the engine. `routing` is that of the cache, where it records any."""
        self._rows, self._scheduler, self._pool, self._adapters = rows, scheduler, pool, adapters
        self._tokenizer = tokenizer
        self._runner, self._on_end = runner, on_end
        self._routing_width = None if routing is None else math.prod(routing)
        self._unfinished: dict[int, list[Sequence]] = {}
        self._at_row: list[Sequence | None] = [None] * len(rows.alive_R)
        self.events: list[Event] = []
        """What callers have not been given yet."""
        self.generated_tokens = self.num_finished = 0

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._unfinished

    def add(self, request_id: int, sequences: list[Sequence]) -> None:
        self._unfinished[request_id] = sequences

    def enter(self, sequences: Sequence_[Sequence]) -> None:
        """Sequences have been given rows."""
        for sequence in sequences:
            self._at_row[sequence.row] = sequence

    def leave(self, rows: Sequence_[int]) -> None:
        """Sequences have lost their rows, and wait again."""
        for row in rows:
            self._at_row[row] = None

    def at_rows(self, rows_B: np.ndarray, epochs_B: np.ndarray) -> list[Sequence | None]:
        """The tenants of rows; None where it is no longer the one that was meant."""
        is_same_B = self._rows.epoch_R[rows_B] == epochs_B
        return [self._at_row[row] if same else None for row, same in zip(rows_B.tolist(), is_same_B.tolist(), strict=True)]

    def leave_all(self) -> None:
        self._at_row = [None] * len(self._at_row)

    def sampled_tokens(self, request_id: int) -> dict[int, int]:
        """Index of each completion of a request that is not finished → tokens it has so far. Any thread may ask; while a step
        runs, a number may be a step old."""
        found = {}
        for sequence in list(self._unfinished.get(request_id, ())):
            if sequence.stage is Stage.DECODE:
                found[sequence.index] = int(self._rows.sampled_R[sequence.row])
            else:
                found[sequence.index] = len(sequence.sampled.token_ids) if sequence.sampled else 0
        return found

    def abort(self, request_id: int, version: int) -> None:
        """End a request; each of its completions so far is among the events. Unknown and finished ones are ignored. `version`
        is that of the weights now, for a completion without a token."""
        for sequence in list(self._unfinished.get(request_id, ())):
            sequence.finish_reason = FinishReason.ABORT
            self._retire(sequence, version)

    def end(self, request_id: int, index: int, version: int) -> None:
        """End one completion of a request, as `abort` ends all of them."""
        for sequence in [one for one in self._unfinished.get(request_id, ()) if one.index == index]:
            sequence.finish_reason = FinishReason.ABORT
            self._retire(sequence, version)

    def fail(self, sequence: Sequence, error: EngineError) -> None:
        """Cancel its request: a part of it is of no use."""
        siblings = list(self._unfinished[sequence.request_id])
        blocks = {block for sibling in siblings for block in sibling.blocks}
        for sibling in siblings:
            sibling.cacheable = False
            self._release(sibling)
            self._forget(sibling)
        self._clean(sorted(blocks))
        self.events.append((sequence.request_id, error))

    # ── what comes back ────────────────────────────────────────────────────────────────────────────────────────────────

    def take_in(self, results: Results) -> None:
        """Append what was sampled to the rows that it was sampled for, and hand out what is due."""
        samples, now = results.wait(), time.perf_counter()
        tokens_SB, logprobs_SB = samples.tokens_SB.numpy(), samples.logprobs_SB.numpy()
        places = np.flatnonzero(self._rows.epoch_R[results.rows_B] == results.epochs_B)
        rows = results.rows_B[places]
        sampled_before = self._rows.sampled_R[rows]
        self._append(results, tokens_SB, logprobs_SB)
        self._note(rows, sampled_before, results, now)
        # Of the rows of a step, often thousands, most are left alone.
        is_due_B = ~self._rows.alive_R[rows] | self._rows.has_stop_R[rows]
        looked_at = np.flatnonzero(is_due_B | (self._rows.streaming_R[rows] > 0))
        tokens_BS, logprobs_BS = (
            _by_row(values_SB, places[looked_at], dtype)
            for values_SB, dtype in ((tokens_SB, np.int32), (logprobs_SB, np.float32))
        )
        counts = zip(sampled_before[looked_at].tolist(), self._rows.sampled_R[rows[looked_at]].tolist(), strict=True)
        parts = zip(rows[looked_at].tolist(), is_due_B[looked_at].tolist(), counts, tokens_BS, logprobs_BS, strict=True)
        at_row, events, all_count = self._at_row, self.events, results.counting_SB is None
        for row, is_due, (before, count), tokens_S, logprobs_S in parts:
            sequence = at_row[row]
            if sequence is None:  # it went down with one of its siblings, just now
                continue
            if is_due:
                self._look_at(sequence)
            elif sequence.streamed == before and all_count and not sequence.wants.top:
                new = count - before
                if new >= sequence.streaming:  # views of what was sampled just now
                    sequence.streamed = count
                    own = (tokens_S, logprobs_S) if new == len(tokens_S) else (tokens_S[:new], logprobs_S[:new])
                    events.append((sequence.request_id, Delta(sequence.index, *own)))
            elif self._has_piece(sequence):
                self._hand_out(sequence, None)
        is_longer_B = self._rows.sampled_R[rows] // self._pool.block_size > sampled_before // self._pool.block_size
        self._scheduler.hash_blocks(sequence for row in rows[is_longer_B].tolist() if (sequence := at_row[row]) is not None)

    def _note(self, rows: np.ndarray, sampled_before: np.ndarray, results: Results, now: float) -> None:
        """When their tokens came, and from which version of the weights."""
        book, version = self._rows, results.version
        others = np.flatnonzero(book.newest_version_R[rows] != version)
        for row, before in zip(rows[others].tolist(), sampled_before[others].tolist(), strict=True):
            sequence = self._at_row[row]
            assert sequence is not None
            if results.is_first and not sequence.first_token:
                sequence.first_token, sequence.oldest_version = now, version
            else:
                sequence.switches.append((before, version))
        book.last_token_R[rows], book.newest_version_R[rows] = now, version

    def _append(self, results: Results, tokens_SB: np.ndarray, logprobs_SB: np.ndarray) -> None:
        """Note what was sampled: step by step, or at once where many steps bring few tokens."""
        rows_B, epochs_B, counting_SB, samples = results.rows_B, results.epochs_B, results.counting_SB, results.samples
        if counting_SB is not None and samples.raw_SB is None and samples.top_ids_SBK is None:
            self.generated_tokens += self._rows.append_counting(rows_B, epochs_B, tokens_SB, logprobs_SB, counting_SB)
            return
        for step in range(len(tokens_SB)):
            counting_B = None if counting_SB is None else counting_SB[step]
            if counting_B is not None and not counting_B.any():
                continue
            live_B = self._rows.append(rows_B, epochs_B, tokens_SB[step], logprobs_SB[step], counting_B)
            self.generated_tokens += int(live_B.sum())
            self._take_in_extras(results, step, live_B)

    def _take_in_extras(self, results: Results, step: int, live_B: np.ndarray) -> None:
        """Raw and top logprobs, for the few requests that want them."""
        samples = results.samples
        if samples.raw_SB is None and samples.top_ids_SBK is None:
            return
        for b in np.flatnonzero(live_B).tolist():
            sequence = self._at_row[results.rows_B[b]]
            assert sequence is not None
            if samples.raw_SB is not None and sequence.wants.raw:
                sequence.raw.append(float(samples.raw_SB[step, b]))
            if samples.top_ids_SBK is not None and samples.top_logprobs_SBK is not None and sequence.wants.top:
                k = sequence.wants.top
                sequence.top.append((samples.top_ids_SBK[step, b, :k].numpy(), samples.top_logprobs_SBK[step, b, :k].numpy()))

    def _look_at(self, sequence: Sequence) -> None:
        """Has it ended, and is there a piece to hand out?"""
        row, sampling = sequence.row, sequence.request.sampling
        if sampling.stop:
            self._look_for_stop(sequence)  # first: what was sampled behind it is nobody's
        if math.isnan(self._rows.logprobs_RN[row, self._rows.sampled_R[row] - 1]):
            adapter = sequence.request.adapter
            message = f"the model gave NaN for request {sequence.request_id}" + (
                f" with adapter {adapter!r}" if adapter else ""
            )
            self.fail(sequence, BrokenModelError(message, "look for NaN in the weights; lower trainer.learning_rate"))
            return
        if not self._rows.alive_R[row] and sequence.finish_reason is None:
            stopped = self._rows.tokens_RN[row, self._rows.sampled_R[row] - 1] in sampling.stop_token_ids
            sequence.finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        if sequence.finish_reason is not None:
            self._retire(sequence, int(self._rows.newest_version_R[row]))
        elif self._has_piece(sequence):
            self._hand_out(sequence, None)

    def _has_piece(self, sequence: Sequence) -> bool:
        """Whether as many tokens have come since the last piece as the next one is to have."""
        return 0 < sequence.streaming <= self._rows.sampled_R[sequence.row] - sequence.streamed

    def _look_for_stop(self, sequence: Sequence) -> None:
        assert self._tokenizer is not None
        sampling, count = sequence.request.sampling, int(self._rows.sampled_R[sequence.row])
        tokens = self._rows.tokens_RN[sequence.row, :count]
        if sequence.stop_search is None:
            sequence.stop_search = StopSearch(self._tokenizer, sampling.stop, sampling.min_tokens - 1)
        found = sequence.stop_search.look(tokens)
        if found is not None:
            self._rows.sampled_R[sequence.row], sequence.stop = found
            self.generated_tokens -= count - found[0]
            sequence.finish_reason = FinishReason.STOP

    # ── what goes out ──────────────────────────────────────────────────────────────────────────────────────────────────

    def _retire(self, sequence: Sequence, version: int) -> None:
        """Out of the engine, its completion to the caller."""
        routing = self._routing(sequence)  # which goes with its blocks
        self._release(sequence)
        self._hand_out(sequence, completion_of(sequence, version, routing))
        self._forget(sequence)

    def _routing(self, sequence: Sequence) -> np.ndarray | None:
        """Where its tokens went, as `Completion.routing`. Waits for the device where that is recorded."""
        if self._routing_width is None:
            return None
        if sequence.stage is not Stage.DECODE:
            return np.full((len(sequence.tokens), self._routing_width), UNKNOWN_EXPERT, np.uint8)
        num_tokens = sequence.num_prompt + int(self._rows.sampled_R[sequence.row])
        return routing_of(self._runner().cache, sequence.blocks, num_tokens)

    def _release(self, sequence: Sequence) -> None:
        blocks = sequence.blocks
        if sequence.stage is Stage.DECODE:
            if self._rows.alive_R[sequence.row]:  # a stop string or an abort ended it, of which the device knows nothing
                self._runner().rows.kill([sequence.row])
            self._at_row[sequence.row] = None
            self._scheduler.finish(sequence)
        else:
            self._scheduler.withdraw(sequence)
            self._clean(blocks)  # what they hold was not looked at

    def _clean(self, blocks: Sequence_[int]) -> None:
        """Blocks were given back that may hold NaN. Where others still hold them, it is theirs to notice."""
        idle = [block for block in blocks if self._pool.num_idle([block])]
        if idle:
            self._pool.forget(self._runner().scrub(idle))

    def _forget(self, sequence: Sequence) -> None:
        self._on_end(sequence)
        siblings = self._unfinished[sequence.request_id]
        siblings.remove(sequence)
        if not siblings:
            del self._unfinished[sequence.request_id]
            self._adapters.release(sequence.request.adapter)
            self.num_finished += 1

    def _hand_out(self, sequence: Sequence, completion: Completion | None) -> None:
        if sequence.row != NO_ROW:
            sampled = self._rows.take(sequence.row)
        else:
            sampled = sequence.sampled or Sampled.nothing()
        self.events.append((sequence.request_id, delta_of(sequence, sampled, completion)))


def _by_row(values_SB: np.ndarray, places: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """A copy of what was sampled at some places, [B, S]."""
    return np.array(values_SB[:, places].T, dtype, order="C")
