from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from fakes import group, trajectory
from hypothesis import given
from hypothesis import strategies as st

from redline.buffer import GroupBuffer, TrajectoryStore
from redline.buffer.packing import pack
from redline.types import Failure, TrainBatch, TrajectoryGroup, VersionSpan

SIGNAL = [1.0, -1.0]


# ── asking, offering, taking ───────────────────────────────────────────────────────────────────────────────────────────


def test_the_demand_is_what_is_missing_for_a_step() -> None:
    buffer = GroupBuffer(3, max_lag=0)
    assert buffer.demand(0) == 3
    buffer.offer(group(SIGNAL))
    assert buffer.demand(0) == 2
    for _ in range(3):
        buffer.offer(group(SIGNAL))
    assert buffer.demand(0) == 0


def test_a_batch_before_the_demand_is_met_is_our_own_mistake() -> None:
    buffer = GroupBuffer(2, max_lag=0)
    buffer.offer(group(SIGNAL))
    with pytest.raises(AssertionError, match="before the demand was met"):
        buffer.next_batch(0)


def test_a_batch_takes_the_groups_in_the_order_they_came() -> None:
    buffer = GroupBuffer(2, max_lag=1)
    for length in (1, 2, 3, 4):
        buffer.offer(group(SIGNAL, prompt_length=length))
    first, second = buffer.next_batch(0), buffer.next_batch(1)
    prompt_lengths = [int(np.argmax(b.loss_mask[start:])) for b in (first, second) for start in b.cu_seqlens[[0, 2]]]
    assert prompt_lengths == [1, 2, 3, 4]


def test_a_batch_uses_its_groups_up() -> None:
    buffer = GroupBuffer(1, max_lag=0)
    buffer.offer(group(SIGNAL))
    buffer.next_batch(0)
    assert buffer.demand(0) == 1


# ── the lag budget ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("max_lag", [0, 1, 3])
def test_a_group_older_than_the_lag_budget_is_dropped(max_lag: int) -> None:
    buffer = GroupBuffer(1, max_lag)
    buffer.offer(group(SIGNAL, version=5))
    assert buffer.demand(5 + max_lag) == 0
    assert buffer.num_dropped == 0
    assert buffer.demand(5 + max_lag + 1) == 1
    assert buffer.num_dropped == 1


def test_the_oldest_token_of_a_group_decides_its_age() -> None:
    attempts = [trajectory([1], [2], version=5), trajectory([1], [3], version=4)]
    buffer = GroupBuffer(1, max_lag=0)
    buffer.offer(TrajectoryGroup("task", attempts, np.array([1, -1], dtype=np.float32)))
    assert buffer.demand(5) == 1


def test_a_stale_group_never_reaches_a_batch() -> None:
    buffer = GroupBuffer(1, max_lag=0)
    buffer.offer(group(SIGNAL, version=0))
    buffer.offer(group(SIGNAL, version=1))
    batch = buffer.next_batch(1)
    assert batch.versions == VersionSpan(1, 1)
    assert batch.lag == 0
    assert buffer.num_dropped == 1


def test_the_lag_of_a_batch_is_that_of_its_oldest_group() -> None:
    buffer = GroupBuffer(2, max_lag=2)
    buffer.offer(group(SIGNAL, version=3))
    buffer.offer(group(SIGNAL, version=4))
    batch = buffer.next_batch(5)
    assert batch.versions == VersionSpan(3, 4)
    assert batch.version == 5
    assert batch.lag == 2


# ── dynamic sampling ───────────────────────────────────────────────────────────────────────────────────────────────────

SILENT = [0.0, 0.0]


def filled(*groups: TrajectoryGroup, store: TrajectoryStore | None = None) -> GroupBuffer:
    buffer = GroupBuffer(2, max_lag=0, store=store, replace_silent=True)
    for each in groups:
        buffer.offer(each)
    return buffer


def prompt_lengths_of(batch: TrainBatch) -> list[int]:
    return [int(np.argmax(batch.loss_mask[batch.cu_seqlens[s] :])) for s in batch.group_offsets[:-1]]


def test_groups_with_signal_take_the_place_of_those_without() -> None:
    buffer = filled(*(group(values, prompt_length=i + 1) for i, values in enumerate([SILENT, SIGNAL, SILENT, SIGNAL])))
    batch = buffer.next_batch(0)
    assert prompt_lengths_of(batch) == [2, 4]
    assert batch.num_sequences_sampled == 4, "what was replaced is not part of the mean"
    assert buffer.num_replaced == 2
    assert buffer.demand(0) == 2


def test_where_signal_stays_rare_a_batch_is_filled_with_groups_without() -> None:
    buffer = filled(group(SILENT), group(SIGNAL, prompt_length=2), group(SILENT), group(SILENT))
    batch = buffer.next_batch(0)
    assert prompt_lengths_of(batch) == [2]
    assert batch.num_sequences_sampled == 4
    assert buffer.num_replaced == 2


def test_what_was_replaced_is_stored_after_what_was_trained_on(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    filled(group(SILENT, task_id="easy"), group(SIGNAL, task_id="a"), group(SIGNAL, task_id="b"), store=store).next_batch(0)
    assert pa.ipc.open_file(store.path(0)).read_all()["task_id"].to_pylist() == ["a", "a", "b", "b", "easy", "easy"]


def test_without_dynamic_sampling_groups_are_taken_as_they_come() -> None:
    buffer = GroupBuffer(2, max_lag=0)
    for each in (group(SILENT), group(SIGNAL), group(SIGNAL)):
        buffer.offer(each)
    assert buffer.next_batch(0).num_sequences == 2
    assert buffer.num_replaced == 0
    assert buffer.demand(0) == 1


# ── packing ────────────────────────────────────────────────────────────────────────────────────────────────────────────

advantage_lists = st.lists(st.lists(st.sampled_from([0.0, 1.0, -0.5]), min_size=1, max_size=4), min_size=1, max_size=4)


@given(advantage_lists)
def test_a_batch_holds_the_attempts_with_an_advantage_end_to_end(advantages: list[list[float]]) -> None:
    groups = [group(values, task_id=str(g), prompt_length=g + 1) for g, values in enumerate(advantages)]
    batch = pack(groups, version=0, keep_silent=False)
    kept = [[(t, a) for t, a in zip(g.trajectories, g.advantages, strict=True) if a != 0] for g in groups]
    flat = [pair for pairs in kept for pair in pairs]
    assert batch.num_sequences == len(flat)
    for sequence, (attempt, advantage) in enumerate(flat):
        span = slice(batch.cu_seqlens[sequence], batch.cu_seqlens[sequence + 1])
        np.testing.assert_array_equal(batch.tokens[span], attempt.token_ids)
        np.testing.assert_array_equal(batch.loss_mask[span], attempt.loss_mask)
        np.testing.assert_array_equal(batch.old_logprobs[span], attempt.logprobs)
        assert batch.advantages[sequence] == advantage
    assert batch.cu_seqlens[-1] == len(batch.tokens) == len(batch.loss_mask) == len(batch.old_logprobs)
    assert np.diff(batch.group_offsets).tolist() == [len(pairs) for pairs in kept if pairs]


@given(advantage_lists)
def test_attempts_that_are_left_out_still_count_in_the_mean(advantages: list[list[float]]) -> None:
    groups = [group(values) for values in advantages]
    batch = pack(groups, version=0, keep_silent=False)
    assert batch.num_sequences_sampled == sum(len(values) for values in advantages)
    assert batch.num_tokens_sampled == sum(t.num_completion_tokens for g in groups for t in g.trajectories)


@given(advantage_lists)
def test_attempts_without_an_advantage_are_kept_where_something_else_moves_them(advantages: list[list[float]]) -> None:
    batch = pack([group(values) for values in advantages], version=0, keep_silent=True)
    assert batch.advantages.tolist() == [value for values in advantages for value in values]
    assert batch.num_sequences == batch.num_sequences_sampled
    assert np.diff(batch.group_offsets).tolist() == [len(values) for values in advantages]
    assert batch.num_tokens_left_out == 0


@pytest.mark.parametrize("keep_silent", [True, False])
def test_a_failed_attempt_is_never_trained_on_and_counts_all_the_same(keep_silent: bool) -> None:
    attempts = [trajectory([1], [2, 3]), trajectory([1], [4, 5, 6], failure=Failure("reward", "broken"))]
    made = TrajectoryGroup("task", attempts, np.array([1, 0], dtype=np.float32))
    batch = pack([made], version=0, keep_silent=keep_silent)
    assert batch.tokens.tolist() == [1, 2, 3]
    assert (batch.num_sequences_sampled, batch.num_tokens_sampled, batch.num_tokens_left_out) == (2, 5, 3)


def test_a_batch_without_any_signal_is_empty_but_well_formed() -> None:
    batch = pack([group([0.0, 0.0], version=3)], version=3, keep_silent=False)
    assert (batch.num_sequences, batch.num_sequences_sampled, batch.lag) == (0, 2, 0)
    assert batch.cu_seqlens.tolist() == batch.group_offsets.tolist() == [0]
    assert len(batch.tokens) == len(batch.loss_mask) == len(batch.old_logprobs) == len(batch.advantages) == 0


@pytest.mark.parametrize("advantages", [[1.0, -1.0], [0.0, 0.0]], ids=["with signal", "without"])
def test_arrays_have_the_types_that_the_record_promises(advantages: list[float]) -> None:
    batch = pack([group(advantages)], version=0, keep_silent=False)
    promised = {
        "tokens": np.int32,
        "cu_seqlens": np.int64,
        "group_offsets": np.int64,
        "loss_mask": np.bool_,
        "old_logprobs": np.float32,
        "advantages": np.float32,
    }
    assert {name: getattr(batch, name).dtype for name in promised} == promised


# ── on disk ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_a_batch_was_made_of_is_stored_whole(tmp_path: Path) -> None:
    """Attempts without an advantage teach the trainer nothing, and a reader a lot."""
    store = TrajectoryStore(tmp_path)
    buffer = GroupBuffer(2, max_lag=0, store=store)
    buffer.offer(group([0.0, 0.0], task_id="easy", version=7))
    buffer.offer(group([1.0, -1.0, 0.0], task_id="hard", version=7))
    buffer.next_batch(7)
    table = pa.ipc.open_file(store.path(7)).read_all()
    assert table["task_id"].to_pylist() == ["easy"] * 2 + ["hard"] * 3
