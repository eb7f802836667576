"""What several processes compute together is what one computes alone: gradients, norms, weights, checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.parallel_training import (
    Case,
    Outcome,
    fail_together,
    patience_of_groups,
    talk,
    train,
    train_in_small_buckets,
    train_with,
)
from support.rank_processes import Ranks, started_ranks
from torch import Tensor

from redline.addresses import loopback_interface
from redline.trainer.parallel.processes import Parallel, _stay_on_loopback

STRATEGIES: dict[str, dict[str, Any]] = {
    "data": {},
    "data, grad_op": {"sharding": "grad_op"},
    "data, full": {"sharding": "full"},
    "sequence": {"sequence_parallel_size": 2},
    "sequence, full": {"sequence_parallel_size": 2, "sharding": "full"},
}


def strategies(*quick: str) -> pytest.MarkDecorator:
    """All of them, those that are not named as slow tests."""
    params = [
        pytest.param(config, id=name, marks=() if name in quick else pytest.mark.slow) for name, config in STRATEGIES.items()
    ]
    return pytest.mark.parametrize("config", params)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with started_ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with started_ranks(4) as ranks:
        yield ranks


def alone(case: Case) -> Outcome:
    return train_with(Parallel(), case)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")


def assert_same_training(ranks: Ranks, case: Case) -> None:
    expected = alone(case)
    for outcome in ranks.run(train, case):
        assert_close(outcome.gradients, expected.gradients)
        assert outcome.norms == pytest.approx(expected.norms, rel=1e-5)
        assert_close(outcome.weights, expected.weights)
        assert outcome.totals == pytest.approx(expected.totals, rel=1e-4)


def assert_same_up_to_rounding(ranks: Ranks, case: Case) -> None:
    expected = flat(alone(case).gradients)
    for outcome in ranks.run(train, case):
        error = (flat(outcome.gradients) - expected).norm() / expected.norm()
        assert error <= (2**-7 if "sequence_parallel_size" in case.config else 1e-5)


def flat(tensors: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


@strategies(*STRATEGIES)
def test_three_steps_of_two_processes_are_those_of_one(two: Ranks, config: dict[str, Any]) -> None:
    assert_same_training(two, Case(config, steps=3))


@strategies("data, full")
def test_a_head_of_its_own_is_trained_too(two: Ranks, config: dict[str, Any]) -> None:
    assert_same_training(two, Case(config, tied=False, steps=2))


@strategies("data, grad_op", "sequence, full")
def test_a_process_without_trained_tokens_keeps_up(two: Ranks, config: dict[str, Any]) -> None:
    """The sixth micro-batch is one token that nobody is trained on; divided, one of the processes has no token at all."""
    assert_same_training(two, Case(config, micro_batches=6, tied=False))


@strategies("data, full")
@pytest.mark.parametrize("network", ["adapter", "critic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_adapters_and_critics_too(two: Ranks, config: dict[str, Any], network: Any, dtype: torch.dtype) -> None:
    case = Case(config, dtype, network)
    if dtype == torch.float32:
        assert_same_training(two, case)
    else:
        assert_same_up_to_rounding(two, case)


def test_a_key_head_is_copied_where_there_are_fewer_than_processes(two: Ranks) -> None:
    assert_same_training(two, Case({"sequence_parallel_size": 2}, num_kv_heads=1))


def test_a_loss_may_look_at_sequences_whose_tokens_are_on_several_processes(two: Ranks) -> None:
    assert_same_training(two, Case({"sequence_parallel_size": 2}, sequence_loss=True))


@pytest.mark.parametrize("sharding", ["grad_op", pytest.param("full", marks=pytest.mark.slow)])
def test_weights_that_a_look_left_whole_are_fetched_again_once_they_changed(two: Ranks, sharding: str) -> None:
    assert_same_training(two, Case({"sharding": sharding}, steps=2, look=True))


@pytest.mark.parametrize("layers", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 9))])
def test_fetching_ahead_changes_no_number(two: Ranks, layers: int) -> None:
    assert_same_training(two, Case({"sharding": "full", "prefetch_layers": layers}))


def test_gradients_in_small_buckets_are_the_same(two: Ranks) -> None:
    one, other = two.run(train, Case()), two.run(train_in_small_buckets, Case())
    assert_close(one[0].gradients, other[0].gradients, tolerance=0)


def test_replicas_stay_equal_to_the_bit(two: Ranks) -> None:
    one, other = two.run(train, Case(steps=3))
    assert_close(one.weights, other.weights, tolerance=0)


@strategies("data, full", "sequence")
def test_in_bfloat16_only_the_rounding_differs(two: Ranks, config: dict[str, Any]) -> None:
    """Every sum over processes and micro-batches is in float32. What remains is the sum over tokens inside a product, which
    each of the processes that share a micro-batch rounds to bfloat16 for its own tokens."""
    assert_same_up_to_rounding(two, Case(config, torch.bfloat16))


@strategies("data, full")
def test_a_state_saved_by_two_loads_into_one_and_back(two: Ranks, config: dict[str, Any]) -> None:
    saved = two.run(train, Case(config, steps=2))[0]
    assert_close(saved.state, alone(Case(steps=2)).state)
    expected = alone(Case(start=saved.folder))
    for outcome in two.run(train, Case(config, start=saved.folder)):
        assert_close(outcome.weights, expected.weights)
        assert_close(outcome.gradients, expected.gradients)


@pytest.mark.parametrize("states", ["int8", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_resumed_run_repeats_itself_to_the_bit(two: Ranks, states: str) -> None:
    config = {"sharding": "full", "optimizer_states": states}
    expected = two.run(train, Case(config, steps=3))[0]
    saved = two.run(train, Case(config, steps=2))[0].folder
    for outcome in two.run(train, Case(config, first_step=2, start=saved)):
        assert_close(outcome.weights, expected.weights, tolerance=0)


def test_8_bit_states_of_one_process_continue_in_two_and_back(two: Ranks) -> None:
    """They are rounded once more on the way, by less than the distance of two levels: the next update is nearly the same."""
    states, sharded = {"optimizer_states": "int8"}, {"optimizer_states": "int8", "sharding": "full"}
    begun = alone(Case(states, steps=2))
    expected = flat(alone(Case(states, first_step=2, start=begun.folder)).weights)
    there = two.run(train, Case(sharded, first_step=2, start=begun.folder))
    assert torch.equal(flat(there[0].weights), flat(there[1].weights))
    moved = (expected - flat(begun.weights)).norm()
    assert (flat(there[0].weights) - expected).norm() < 0.1 * moved
    after = alone(Case(states, first_step=3, steps=1, start=there[0].folder))
    assert (flat(after.weights) - flat(alone(Case(states, first_step=2, steps=2, start=begun.folder)).weights)).norm() < moved


def test_numbers_and_messages_reach_every_process(two: Ranks) -> None:
    for sums, largest, order in two.run(talk):
        assert (sums, largest) == ([2.0, 1.0], [0.0, 1.0])
        assert (order.kind, order.fields) == ("hello", {"to": ["all", 2, None]})
        assert {name: (array.dtype, array.tolist()) for name, array in order.arrays.items()} == {
            "a": (np.int64, [0, 1, 2]),
            "b": (bool, [[True], [False]]),
            "c": (np.float64, []),
        }


def test_where_every_rank_fails_the_others_end_once_rank_0_has_written_why(two: Ranks) -> None:
    """A launcher ends all ranks as soon as one has ended."""
    assert two.run(fail_together) == [True, True]


def test_ranks_that_share_a_micro_batch_wait_no_longer_than_the_run_says(two: Ranks) -> None:
    for patience in two.run(patience_of_groups, 50.0, {"sequence_parallel_size": 2}):
        assert patience == {"data_group": 50.0, "sequence_group": 50.0}


@pytest.mark.slow
def test_nor_do_ranks_in_groups_that_each_hold_all_weights(four: Ranks) -> None:
    for patience in four.run(patience_of_groups, 50.0, {"sharding": "full", "replicate": 2}):
        assert patience == {"replicate": 50.0, "shard": 50.0}


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "grad_op", "full"])
@pytest.mark.parametrize("sequence", [1, 2, 4])
def test_four_processes_in_every_arrangement(four: Ranks, sharding: str, sequence: int) -> None:
    """With six rows of a norm over four processes, one of them holds none."""
    config = {"sharding": sharding, "sequence_parallel_size": sequence}
    assert_same_training(four, Case(config, steps=3))
    assert_same_training(four, Case(config, micro_batches=8, tied=False, num_kv_heads=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    "config", [{"sharding": "grad_op"}, {"sharding": "full"}, {"sharding": "full", "sequence_parallel_size": 2}]
)
def test_two_groups_of_two_that_each_hold_all_weights(four: Ranks, config: dict[str, Any]) -> None:
    assert_same_training(four, Case({**config, "replicate": 2}, steps=3))
    saved = four.run(train, Case({**config, "replicate": 2}, steps=2))[0].state
    assert_close(saved, alone(Case(steps=2)).state)


@pytest.mark.slow
def test_a_state_saved_by_four_loads_into_two(two: Ranks, four: Ranks) -> None:
    saved = four.run(train, Case({"sharding": "full"}, steps=2))[0].folder
    expected = alone(Case(start=saved))
    for outcome in two.run(train, Case({"sharding": "full"}, start=saved)):
        assert_close(outcome.weights, expected.weights)


@pytest.mark.parametrize(
    ("here", "given", "expected"), [("2", None, loopback_interface()), ("1", None, None), ("2", "e0", "e0")]
)
def test_ranks_of_one_machine_talk_on_loopback_unless_told_otherwise(
    here: str, given: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")
    if given is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    _stay_on_loopback(2)
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
