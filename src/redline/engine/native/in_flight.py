"""Launches whose samples are on their way to the host, oldest first.

Launcher ──► plain, verified or guessed ──► in flight ──collect──► speculation learns ──► UnderWay
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from redline.engine.native.running.rows import Rows
from redline.engine.native.running.runner import Results, Runner, Samples
from redline.engine.native.running.verification import NO_GUESS, Guesses
from redline.engine.native.speculation.speculation import Speculation
from redline.engine.native.under_way import UnderWay
from redline.telemetry import span


class InFlight:
    """What was launched and has not been looked at. Each launch knows its rows' tenants and the version it sampled with."""

    def __init__(self, rows: Rows, under_way: UnderWay, speculation: Speculation, runner: Callable[[], Runner]) -> None:
        """`runner` returns what runs on the device now."""
        self._rows, self._under_way, self._speculation, self._runner = rows, under_way, speculation, runner
        self._launches: deque[Results] = deque()

    def __len__(self) -> int:
        return len(self._launches)

    # ── what was launched ──────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, rows_B: np.ndarray, samples: Samples, version: int, *, is_first: bool) -> None:
        """A token of each row in every step; `is_first` where they follow prompts."""
        fetched, arrived = self._runner().fetch(samples)
        self._launches.append(Results(rows_B, self._rows.epoch_R[rows_B], version, is_first, fetched, arrived))

    def add_verified(self, rows_B: np.ndarray, samples: Samples, counts_B: np.ndarray, version: int) -> None:
        """Samples that are on the host already; the first `counts_B` of each row count. The scheduler has counted one."""
        rows, accepted_B = self._rows, counts_B - 1
        rows.launched_position_R[rows_B] += accepted_B
        rows.launched_R[rows_B] += accepted_B
        counting_SB = np.arange(counts_B.max())[:, None] < counts_B
        self._launches.append(Results(rows_B, rows.epoch_R[rows_B], version, False, samples, counting_SB=counting_SB))

    def add_guessed(self, rows_B: np.ndarray, samples: Samples, guesses: Guesses, num_steps: int, version: int) -> None:
        """Samples after the newest tokens and after what the device guessed; it says which of them count."""
        fetched, arrived = self._runner().fetch(samples)
        most_B = num_steps * guesses.lengths_B
        epochs_B = self._rows.epoch_R[rows_B]
        self._launches.append(Results(rows_B, epochs_B, version, False, fetched, arrived, guesses=guesses, most_B=most_B))

    # ── what has come back ─────────────────────────────────────────────────────────────────────────────────────────────

    def collect(self, keep: int, version: int) -> None:
        """Take in launches, oldest first, until `keep` of them are left. Waits for those that are not there yet. `version` is
        that of the weights now."""
        while len(self._launches) > keep:
            with span("engine.collect", version=version):
                results = self._launches.popleft()
                if results.guesses is not None:
                    results.wait()
                    self._learn(results, results.guesses)
                self._under_way.take_in(results)
                if results.most_B is not None:
                    self._count_launched(results)

    def _learn(self, results: Results, guesses: Guesses) -> None:
        """Before they are taken in, and some of their sequences leave."""
        tokens_SAB = results.samples.tokens_SB.numpy().reshape(-1, int(guesses.lengths_B.max()), len(results.rows_B))
        accepted_SB, drafted_SB = (tokens_SAB[:, 1:] >= 0).sum(axis=1), (tokens_SAB[:, 1:] != NO_GUESS).sum(axis=1)
        # Where nothing was found to guess, that is a try too.
        tried_SB = np.minimum(accepted_SB + 1, np.maximum(drafted_SB, 1)) * ((tokens_SAB[:, 0] >= 0) & (guesses.counts_B > 0))
        sequences = self._under_way.at_rows(results.rows_B, results.epochs_B)
        drafted = int(drafted_SB.sum())
        self._speculation.learn_guesses(sequences, accepted_SB.sum(axis=0), tried_SB.sum(axis=0), drafted)

    def _count_launched(self, results: Results) -> None:
        """Some rows have got fewer tokens than they could have."""
        rows = self._rows
        under_way_R = np.zeros_like(rows.sampled_R)
        for later in self._launches:
            is_same_B = rows.epoch_R[later.rows_B] == later.epochs_B
            most_B = later.most_B if later.most_B is not None else np.full(len(later.rows_B), len(later.samples.tokens_SB))
            under_way_R[later.rows_B[is_same_B]] += most_B[is_same_B]
        alive_B = results.rows_B[(rows.epoch_R[results.rows_B] == results.epochs_B) & rows.alive_R[results.rows_B]]
        rows.launched_at_most(alive_B, under_way_R[alive_B])
