from __future__ import annotations

from typing import Any

import pytest

from redline.errors import ConfigError
from redline.models.attention.ulysses import check_heads
from redline.trainer.parallel.place import TRAINERS, Division, Place, find_place


def test_neighbours_share_a_micro_batch() -> None:
    places = [find_place(rank, 6, Division(sequence_parallel_size=2)) for rank in range(6)]
    assert [(place.data_rank, place.sequence_rank) for place in places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert {(place.data_ranks, place.sequence_ranks, place.world) for place in places} == {(3, 2, 6)}


def test_neighbours_have_stages_that_follow_each_other() -> None:
    places = [find_place(rank, 6, Division(pipeline_parallel_size=3)) for rank in range(6)]
    assert [(place.data_rank, place.stage) for place in places] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert {(place.data_ranks, place.stages, place.world) for place in places} == {(2, 3, 6)}


def test_one_process_is_a_place_too() -> None:
    assert find_place(0, 1, Division()) == Place()


@pytest.mark.parametrize(
    ("world", "config", "message"),
    [
        (3, {"sequence_parallel_size": 2}, "does not divide the trainer's 3 processes"),
        (1, {"sequence_parallel_size": 2}, "does not divide the trainer's one process"),
        (3, {"pipeline_parallel_size": 2}, "does not divide the trainer's 3 processes"),
        (1, {"pipeline_parallel_size": 2}, "does not divide the trainer's one process"),
        (4, {"pipeline_parallel_size": 2, "sequence_parallel_size": 2}, "stages pass whole micro-batches on"),
        (4, {"pipeline_parallel_size": 2, "sharding": "full"}, "stages divide the weights already"),
        (4, {"replicate": 2}, "every process holds all weights already"),
        (4, {"replicate": 3, "sharding": "full"}, "no groups of several out of the trainer's 4 processes"),
        (2, {"replicate": 2, "sharding": "full"}, "no groups of several out of the trainer's 2 processes"),
        (1, {"sharding": "full"}, "there is one process"),
    ],
)
def test_an_impossible_arrangement_is_refused_with_the_fix(world: int, config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        find_place(0, world, Division(**config))
    assert "torchrun" in caught.value.hint
    with pytest.raises(ConfigError, match=message) as caught:
        find_place(0, world, Division(**config), TRAINERS)
    assert "placement.trainers" in caught.value.hint
    assert "torchrun" not in caught.value.hint, "which is refused on a cluster"


def test_heads_that_cannot_be_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match="4 attention heads cannot be divided") as caught:
        check_heads(4, 3)
    assert caught.value.hint == "set it to one of 1, 2, 4"
