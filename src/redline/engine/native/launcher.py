"""Has the runner do what the scheduler planned: decode steps, then chunks of prompts. What finds no memory waits or fails."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass

import numpy as np
import torch

from redline.engine.native.in_flight import InFlight
from redline.engine.native.running.rows import Rows
from redline.engine.native.running.runner import Decoding, Runner
from redline.engine.native.running.verification import Drafts, Guesses
from redline.engine.native.scheduler import Plan, Scheduler
from redline.engine.native.sequence import Sequence
from redline.engine.native.speculation.speculation import Speculation
from redline.engine.native.under_way import UnderWay
from redline.errors import EngineMemoryError
from redline.telemetry import span


@dataclass(slots=True)
class LaunchCounts:
    """Since the engine was made."""

    batch_size: int = 0
    """Sequences that decoded in the last plan."""
    prompt_tokens: int = 0
    decode_steps: int = 0
    decoded_rows: int = 0
    """The sum of those steps' batch sizes."""


class Launcher:
    """Launches plans, one after the other."""

    def __init__(
        self,
        rows: Rows,
        scheduler: Scheduler,
        under_way: UnderWay,
        speculation: Speculation,
        in_flight: InFlight,
        runner: Callable[[], Runner],
        *,
        is_one_of_several: bool,
    ) -> None:
        """`runner` returns what runs on the device now. `is_one_of_several`: other ranks launch the same plans, and nothing
        that they have computed can be undone here alone."""
        self._rows, self._scheduler, self._under_way = rows, scheduler, under_way
        self._speculation, self._in_flight, self._runner = speculation, in_flight, runner
        self._is_one_of_several = is_one_of_several
        self._alone_left = 0
        """Prompts to compute by themselves, after several at once had no memory."""
        self.counts = LaunchCounts()

    def launch(self, plan: Plan, version: int) -> None:
        """`version` is that of the weights. Does not wait, where the runner runs ahead."""
        runner = self._runner()
        runner.prepare(plan)
        self._under_way.enter(plan.admitted)
        self._speculation.begin(plan.admitted)
        self.counts.batch_size = len(plan.decode)
        # A pass with prompts decodes one token of each row: where steps are launched ahead, some may have ended by then.
        is_one_pass = not runner.runs_ahead and bool(plan.decode and plan.chunks) and not plan.drafts
        if not is_one_pass and not self._try_decode(plan, version):
            return
        try:
            self._prefill(plan, version, plan.rows_B if is_one_pass else plan.rows_B[:0])
        except torch.OutOfMemoryError as error:
            if is_one_pass and not self._try_decode(plan, version):
                return
            self._undo_prefills(plan, error)
            if len(plan.chunks) > 1:  # one of them may be too much, and the others not
                self._alone_left, self._scheduler.prompts_at_once = len(plan.chunks), 1
            else:
                self._fail_for_memory([plan.chunks[0].sequence], error)

    # ── decode ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _try_decode(self, plan: Plan, version: int) -> bool:
        """Decode, and return whether there was memory for it. Where there was none, the sequences fail, and the prompts of the
        plan wait again."""
        try:
            self._decode(plan, version)
        except torch.OutOfMemoryError as error:
            self._undo_prefills(plan, error)
            self._fail_for_memory(plan.decode, error)
            return False
        return True

    def _decode(self, plan: Plan, version: int) -> None:
        if not plan.decode:
            return
        self.counts.decode_steps += plan.num_steps
        self.counts.decoded_rows += plan.num_steps * len(plan.decode)
        with span("engine.decode", device=True, version=version):
            if plan.drafts:
                self._verify(plan, version)
            elif plan.guesses:
                self._guess(plan, version)
            else:
                self._decode_plainly(plan, version)

    def _decode_plainly(self, plan: Plan, version: int) -> None:
        self._speculation.leave_places()
        runner, rows_B, prefixes = self._runner(), plan.rows_B, None
        if runner.reads_prefixes_once:
            rows_B, prefixes = self._rows.table.side_by_side(rows_B)
        positions_B = self._rows.launched_position_R[rows_B] - 1
        samples = runner.decode(rows_B, positions_B, plan.num_steps, self._rows.wants(plan.rows_B), prefixes)
        self._in_flight.add(rows_B, samples, version, is_first=False)

    def _verify(self, plan: Plan, version: int) -> None:
        """Waits for the device."""
        rows_B, drafts = plan.rows_B, Drafts.of([plan.drafts.get(s, ()) for s in plan.decode])
        positions_B = self._rows.launched_position_R[rows_B] - 1
        samples, counts_B = self._runner().verify(rows_B, positions_B, drafts, self._rows.wants(rows_B))
        self._in_flight.add_verified(rows_B, samples, counts_B, version)
        self._speculation.learn(plan.drafts, dict(zip(plan.decode, (counts_B - 1).tolist(), strict=True)))

    def _guess(self, plan: Plan, version: int) -> None:
        rows_B, counts_B = plan.rows_B, np.array([plan.guesses.get(s, 0) for s in plan.decode])
        guesses = Guesses.of(counts_B, self._speculation.writes(plan.decode))
        samples = self._runner().guess(rows_B, guesses, plan.num_steps, self._rows.wants(rows_B))
        self._in_flight.add_guessed(rows_B, samples, guesses, plan.num_steps, version)

    # ── prompts ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _prefill(self, plan: Plan, version: int, decode_B: np.ndarray) -> None:
        """Compute the chunks of a plan, and in the same pass a token of each of the rows `decode_B`."""
        self._runner().rows.set_biases(plan.admitted)
        if not plan.chunks:
            return
        with span("engine.prefill", device=True, version=version):
            samplers_B = np.array([s.row for c in plan.chunks for s in c.samplers], np.int64)
            wants, count = self._rows.wants(np.concatenate([samplers_B, decode_B])), len(samplers_B)
            samples = self._runner().prefill(plan.chunks, plan.copies, wants, self._decoding(decode_B))
            self.counts.prompt_tokens += sum(c.end - c.start for c in plan.chunks)
            if len(decode_B) and samples is not None:
                self.counts.decode_steps += 1
                self.counts.decoded_rows += len(decode_B)
                self._in_flight.add(decode_B, samples.of_rows(count, None), version, is_first=False)
            if count and samples is not None:
                self._in_flight.add(samplers_B, samples.of_rows(0, count), version, is_first=True)
        self._alone_left = max(0, self._alone_left - 1)
        self._scheduler.prompts_at_once = 1 if self._alone_left else None

    def _decoding(self, rows_B: np.ndarray) -> Decoding | None:
        if not len(rows_B):
            return None
        rows = self._rows
        return Decoding(rows_B, rows.launched_position_R[rows_B] - 1, rows.table.of(rows_B), rows.wants(rows_B).lora)

    # ── no memory ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _undo_prefills(self, plan: Plan, error: torch.OutOfMemoryError) -> None:
        """The prompts of a plan wait again, as if they had not been admitted. Raises where other ranks have computed them."""
        if self._is_one_of_several:
            raise error
        runner, rows = self._runner(), self._scheduler.undo_prefills(plan)
        runner.rows.kill(rows)
        self._under_way.leave(rows)
        if runner.cache.blocks.device.type == "cuda":
            torch.cuda.empty_cache()

    def _fail_for_memory(self, sequences: Sequence_[Sequence], error: torch.OutOfMemoryError) -> None:
        """Cancel the requests of these sequences; the others go on."""
        for sequence in sequences:
            if sequence.request_id in self._under_way:
                n, first_line = sequence.request.sampling.n, str(error).partition("\n")[0]
                message = f"no memory for a prompt of {sequence.num_prompt} tokens with n = {n}: {first_line}"
                hint = "shorten it, lower n, or leave more memory free (engine.gpu_memory_utilization)"
                self._under_way.fail(sequence, EngineMemoryError(message, hint))
