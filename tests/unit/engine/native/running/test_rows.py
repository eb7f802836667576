"""What the host notes of sampled tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from redline.engine.native.running.rows import Rows
from redline.engine.native.sequence import Sequence, Wants
from redline.types import GenerateRequest, SamplingParams

NUM_ROWS, STOP = 6, 3


def make_rows() -> Rows:
    rows = Rows(NUM_ROWS, 64, 4)
    rows.sampled_R[:] = [0, 5, 2, 7, 1, 4]
    rows.limit_R[:] = [64, 64, 64, 9, 64, 64]
    rows.stops_RS[:, 0] = STOP
    rows.alive_R[:] = [True, True, True, True, True, False]
    rows.epoch_R[4] = 1
    return rows


def test_tokens_of_several_steps_are_noted_as_they_are_one_by_one() -> None:
    rows_B, epochs_B = np.arange(NUM_ROWS), np.zeros(NUM_ROWS, np.int64)
    counts = [4, 1, 3, 2, 5, 5]
    """The second stops, the third fails, the fourth is at its limit, the fifth is another's by now, and the last has ended."""
    tokens_SB = np.random.default_rng(0).integers(10, 20, (6, NUM_ROWS))
    logprobs_SB = np.random.default_rng(1).random((6, NUM_ROWS), np.float32)
    counting_SB = np.zeros((6, NUM_ROWS), bool)
    for row, count in enumerate(counts):
        counting_SB[np.random.default_rng(row).permutation(6)[:count], row] = True
    tokens_SB[np.flatnonzero(counting_SB[:, 1])[-1], 1] = STOP
    logprobs_SB[np.flatnonzero(counting_SB[:, 2])[-1], 2] = np.nan
    one_by_one, at_once = make_rows(), make_rows()
    taken = 0
    for step in range(6):
        taken += int(one_by_one.append(rows_B, epochs_B, tokens_SB[step], logprobs_SB[step], counting_SB[step]).sum())
    assert at_once.append_counting(rows_B, epochs_B, tokens_SB, logprobs_SB, counting_SB) == taken == 10
    assert at_once.sampled_R.tolist() == one_by_one.sampled_R.tolist() == [4, 6, 5, 9, 1, 4]
    assert at_once.alive_R.tolist() == one_by_one.alive_R.tolist() == [True, False, False, False, True, False]
    for row, before in enumerate(make_rows().sampled_R.tolist()):
        new = slice(before, at_once.sampled_R[row])
        np.testing.assert_array_equal(at_once.tokens_RN[row, new], one_by_one.tokens_RN[row, new])
        np.testing.assert_array_equal(at_once.logprobs_RN[row, new], one_by_one.logprobs_RN[row, new])


def test_nothing_is_noted_where_nothing_counts() -> None:
    rows, nothing = make_rows(), np.zeros((2, NUM_ROWS), bool)
    parts = (np.zeros((2, NUM_ROWS), np.int64), np.zeros((2, NUM_ROWS), np.float32), nothing)
    assert rows.append_counting(np.arange(NUM_ROWS), rows.epoch_R.copy(), *parts) == 0
    assert rows.sampled_R.tolist() == make_rows().sampled_R.tolist()


def test_rows_together_ask_for_what_any_of_them_does_and_not_for_what_others_did_before_them() -> None:
    rows = Rows(4, 64, 4)

    def enter(row: int, **sampling: Any) -> None:
        params = SamplingParams(max_tokens=8, **sampling)
        sequence = Sequence(row, 0, GenerateRequest(np.arange(3, dtype=np.int32), params), 0.0, Wants.of(params))
        sequence.begin(row)
        rows.enter(sequence)

    enter(0)
    enter(1, top_k=3)
    enter(2, raw_logprobs=True, top_logprobs=2)
    assert rows.wants(np.array([0])) == rows.wants(np.empty(0, np.int64)) == Wants()
    assert rows.wants(np.array([0, 1])) == Wants(top_k=True)
    assert rows.wants(np.array([2, 1])) == Wants(top_k=True, raw=True, top=2)
    enter(1, min_p=0.1)
    assert rows.wants(np.array([0, 1])) == Wants(min_p=True)
