"""Only what changed since the version that every engine has moves; where that version is not certain, everything does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.linked_engines import LinkedEngine

from redline.types import WeightSet
from redline.weight_sync import Broadcast, CudaIpc, Sending
from redline.weight_sync.changes import BLOCK_BYTES, GAP_BLOCKS, MAX_RANGES, changed_ranges, sum_of
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.sender import BucketTransport

MIB = 2**20


# ── which bytes ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_changed_blocks_are_put_together_where_little_lies_between() -> None:
    before = np.zeros(40, np.int64)
    now = before.copy()
    assert changed_ranges(now, None, 40 * BLOCK_BYTES - 16) == [(0, 40 * BLOCK_BYTES - 16)]
    assert changed_ranges(now, before, 40 * BLOCK_BYTES) == []
    now[[2, 2 + GAP_BLOCKS, 20, 39]] = 1
    ranges = changed_ranges(now, before, 40 * BLOCK_BYTES - 16)
    assert ranges == [
        (2 * BLOCK_BYTES, (3 + GAP_BLOCKS) * BLOCK_BYTES),
        (20 * BLOCK_BYTES, 21 * BLOCK_BYTES),
        (39 * BLOCK_BYTES, 40 * BLOCK_BYTES - 16),
    ]
    assert sum_of(now, ranges) == 4


def test_changes_in_very_many_places_travel_in_one_piece() -> None:
    before = np.zeros(2000, np.int64)
    now = before.copy()
    now[10 : 10 + 6 * (MAX_RANGES + 1) : 6] = 1
    assert changed_ranges(now, before, 2000 * BLOCK_BYTES) == [(10 * BLOCK_BYTES, (11 + 6 * MAX_RANGES) * BLOCK_BYTES)]


# ── two ends ───────────────────────────────────────────────────────────────────────────────────────────────────────────


class Run:
    """A trainer of which little changes, and engines."""

    def __init__(self, kind: Any, engines: int = 2) -> None:
        self.trainer = {"embed": torch.zeros(MIB), "layer": torch.zeros(MIB), "head": torch.zeros(MIB // 2 + 3)}
        self.engines = [LinkedEngine(self.trainer, f"engine-{index}") for index in range(engines)]
        sending = Sending(timeout_s=60, bucket_bytes=3 * MIB)
        self.transport: BucketTransport = kind([engine.channel for engine in self.engines], self.trainer, sending)

    @property
    def size(self) -> int:
        return sum(tensor.nbytes for tensor in self.trainer.values())

    def take(self, version: int) -> int:
        """Returns the bytes that each engine was sent."""
        weights = WeightSet(version, self.trainer)
        moved = self.transport.move(TransferPlan(version, tuple(self.trainer)), weights)
        self.transport.verify(weights)
        self.transport.adopt()
        assert all(engine.has(self.trainer) and engine.receiver.version == version for engine in self.engines)
        return moved // len(self.engines)


@pytest.fixture(params=[CudaIpc, Broadcast])
def make_run(request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(**options: Any) -> Run:
        runs.append(Run(request.param, **options))
        return runs[-1]

    yield make
    for run in runs:
        run.transport.close()
        for engine in run.engines:
            engine.close()


def test_only_blocks_that_changed_move(make_run: Callable[..., Run]) -> None:
    run = make_run()
    assert run.take(1) == run.size
    run.trainer["layer"][7] = 1  # in the second bucket
    assert run.take(2) == BLOCK_BYTES
    run.trainer["embed"][0] = run.trainer["head"][-1] = 1  # in the first and in the last
    assert BLOCK_BYTES < run.take(3) < 2 * BLOCK_BYTES
    assert run.take(4) == 0, "a version whose bytes are those of the one before is a version all the same"
    for tensor in run.trainer.values():
        tensor.fill_(2)
    assert run.take(5) == run.size


def test_after_an_update_was_taken_back_everything_moves(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.take(1)
    run.trainer["layer"][7] = 1
    run.take(2)
    run.transport.revert(2)
    assert run.take(3) == run.size
    run.trainer["layer"][7] = 2
    run.engines[1].engine.refuses = 4
    with pytest.raises(Exception, match="does not take it"):
        run.take(4)
    run.transport.revert(4)
    assert [engine.receiver.version for engine in run.engines] == [3, 3]
    assert run.take(5) == run.size


def test_an_engine_that_joins_gets_everything_and_the_next_update_only_what_changed(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.take(1)
    run.trainer["layer"][7] = 1
    run.take(2)
    run.engines.append(LinkedEngine(run.trainer, "engine-2"))
    run.transport.catch_up(run.engines[2].channel, WeightSet(2, run.trainer))
    assert run.engines[2].has(run.trainer)
    run.trainer["layer"][8] = 1
    assert run.take(3) == BLOCK_BYTES


def test_an_engine_that_says_it_has_another_version_than_we_know_of_gets_everything(make_run: Callable[..., Run]) -> None:
    run = make_run(engines=1)
    run.take(1)
    second = run.engines[0].receiver._second
    second.version = 0  # as if it had been brought elsewhere
    run.trainer["layer"][7] = 1
    assert run.take(2) == run.size


def test_what_was_exchanged_in_part_goes_back_in_part(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.take(1)
    old = {name: tensor.clone() for name, tensor in run.trainer.items()}
    run.trainer["layer"][7] = run.trainer["head"][-1] = 1
    run.take(2)
    run.transport.revert(2)
    for engine in run.engines:
        assert engine.has(old)
        assert engine.engine.versions == [1, 2, 1]
