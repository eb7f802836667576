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
from redline.types import TrajectoryGroup, VersionSpan

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


# ── packing ────────────────────────────────────────────────────────────────────────────────────────────────────────────

advantage_lists = st.lists(st.lists(st.sampled_from([0.0, 1.0, -0.5]), min_size=1, max_size=4), min_size=1, max_size=4)


@given(advantage_lists)
def test_a_batch_holds_the_attempts_with_an_advantage_end_to_end(advantages: list[list[float]]) -> None:
    groups = [group(values, task_id=str(g), prompt_length=g + 1) for g, values in enumerate(advantages)]
    batch = pack(groups, version=0)
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
    batch = pack([group(values) for values in advantages], version=0)
    assert batch.num_sequences_sampled == sum(len(values) for values in advantages)


def test_a_batch_without_any_signal_is_empty_but_well_formed() -> None:
    batch = pack([group([0.0, 0.0], version=3)], version=3)
    assert (batch.num_sequences, batch.num_sequences_sampled, batch.lag) == (0, 2, 0)
    assert batch.cu_seqlens.tolist() == batch.group_offsets.tolist() == [0]
    assert len(batch.tokens) == len(batch.loss_mask) == len(batch.old_logprobs) == len(batch.advantages) == 0


@pytest.mark.parametrize("advantages", [[1.0, -1.0], [0.0, 0.0]], ids=["with signal", "without"])
def test_arrays_have_the_types_that_the_record_promises(advantages: list[float]) -> None:
    batch = pack([group(advantages)], version=0)
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
