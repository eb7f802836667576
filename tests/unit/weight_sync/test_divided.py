"""An engine that two ranks divide takes whole buckets: each rank has its part of every version, or all have the one before."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from support.linked_engines import LinkedEngine
from support.small_models import CONFIGS, write_model
from torch import Tensor

from redline.errors import EngineLostError, RedlineError
from redline.models.decoder import Decoder
from redline.models.files.hf import load_decoder
from redline.models.parallel import Cut, Shard, cuts_of, shard_decoder
from redline.types import WeightSet
from redline.weight_sync import CudaIpc, Sending
from redline.weight_sync.buckets import flat_bytes
from redline.weight_sync.divided import DividedSet, Follower, PartSet, window_of
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.receiver import WeightReceiver
from redline.weight_sync.verify import Probe

WORLD = 2


def decoder_of(folder: Path, name: str = "qwen3, biases") -> Decoder:
    write_model(folder, CONFIGS[name], seed=5)
    found = load_decoder(folder)
    assert isinstance(found, Decoder)
    return found


def shares(whole: Decoder) -> list[Decoder]:
    return [shard_decoder(whole, Shard(rank, WORLD), "cpu", lambda tensor: tensor) for rank in range(WORLD)]


# ── bytes ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", ["llama, all biases", "qwen3, biases", "qwen3_moe, some layers"])
def test_a_part_is_put_together_from_runs_of_the_whole_that_are_cut_anywhere(tmp_path: Path, name: str) -> None:
    whole = decoder_of(tmp_path, name)
    drawn = torch.Generator().manual_seed(0)
    for rank, part in enumerate(shares(whole)):
        cuts = cuts_of(part, WORLD)
        for key, expected in part.named_parameters():
            window = window_of(expected, cuts[key], Shard(rank, WORLD))
            flat, found = flat_bytes(dict(whole.named_parameters())[key]), torch.zeros(expected.nbytes, dtype=torch.uint8)
            places = sorted({0, flat.numel(), *torch.randint(flat.numel(), (9,), generator=drawn).tolist()})
            for begin, end in pairwise(places):
                if window is not None:
                    window.copy(begin, flat[begin:end], found)
            assert torch.equal(found, flat_bytes(expected)), (key, rank)


def test_rows_that_a_run_cuts_are_taken_once() -> None:
    whole = torch.arange(12, dtype=torch.uint8).view(3, 4)
    part = Cut(1).part(whole, Shard(1, 2))
    window = window_of(part, Cut(1), Shard(1, 2))
    assert window is not None
    for begin in range(12):
        for end in range(begin, 13):
            found = torch.full((6,), 99, dtype=torch.uint8)
            window.copy(begin, whole.flatten()[begin:end], found)
            inside = [value if begin <= value < end else 99 for value in part.flatten().tolist()]
            assert found.tolist() == inside, (begin, end)


# ── two ranks, as two threads ──────────────────────────────────────────────────────────────────────────────────────────


class Pair:
    """What two ranks send each other: orders and bytes one way, values both ways."""

    def __init__(self) -> None:
        self.to_follower: queue.Queue[Any] = queue.Queue()
        self.to_leader: queue.Queue[Any] = queue.Queue()
        self.damage: Callable[[Tensor], None] = lambda run: None
        """Done to what the other rank has received."""
        self.is_lost = False


class Leader:
    """Rank 0's side. Implements `divided.OtherRanks`."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def order(self, entry: Mapping[str, Any]) -> None:
        if self._pair.is_lost:
            raise EngineLostError("rank 1 of the engine has ended with code -9")
        self._pair.to_follower.put(dict(entry))

    def send(self, run: Tensor) -> None:
        self._pair.to_follower.put(run.clone())

    def is_same(self, value: int) -> bool:
        return self._pair.to_leader.get(timeout=60) == value


class Other:
    """Rank 1's side. Implements `divided.RankZero`."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def send(self, run: Tensor) -> None:
        run.copy_(self._pair.to_follower.get(timeout=60))
        self._pair.damage(run)

    def is_same(self, value: int) -> bool:
        self._pair.to_leader.put(value)
        return True


class TwoRanks:
    """An engine of two ranks behind a connection, with a trainer's tensors that it can be compared with."""

    def __init__(self, whole: Decoder) -> None:
        self.trainer = {name: tensor.detach().clone() for name, tensor in whole.named_parameters()}
        self.parts = shares(whole)
        self.pair = Pair()
        self.versions: list[int] = []
        """Those that rank 1 has noted."""
        self.logprobs = [-1.0]
        sets = [
            PartSet(dict(part.named_parameters()), cuts_of(part, WORLD), Shard(rank, WORLD))
            for rank, part in enumerate(self.parts)
        ]
        follower = Follower(sets[1], Other(self.pair), lambda version, *_: self.versions.append(version), lambda tokens: None)
        self.thread = threading.Thread(target=self._follow, args=(follower,), daemon=True)
        self.thread.start()
        leader = Leader(self.pair)

        def probe(tokens: Sequence[int]) -> Sequence[float]:
            leader.order({"weights": "probe", "tokens": list(tokens)})
            return self.logprobs

        self.linked = LinkedEngine(
            self.trainer, make_receiver=lambda _, engine, __: WeightReceiver(DividedSet(sets[0], leader), engine, probe)
        )
        self.transport = CudaIpc([self.linked.channel], self.trainer, Sending(bucket_bytes=4096))

    def _follow(self, follower: Follower) -> None:
        while True:
            entry = self.pair.to_follower.get()
            if entry is None:
                return
            if isinstance(entry, threading.Event):
                entry.set()
            else:
                follower.do(entry)

    def update(self, version: int, logprobs: Sequence[float] = (-1.0,)) -> None:
        weights = WeightSet(version, self.trainer)
        self.transport.move(TransferPlan(version, tuple(self.trainer)), weights)
        self.transport.verify(weights)
        self.transport.adopt(Probe([1, 2], list(logprobs), 1e-3))

    def settle(self) -> None:
        """Wait until rank 1 has done all that it was told."""
        done = threading.Event()
        self.pair.to_follower.put(done)
        assert done.wait(60)

    def has(self, tensors: Mapping[str, Tensor]) -> bool:
        found = True
        for rank, part in enumerate(self.parts):
            for name, cut in cuts_of(part, WORLD).items():
                found &= torch.equal(dict(part.named_parameters())[name], cut.part(tensors[name], Shard(rank, WORLD)))
        return found

    def close(self) -> None:
        self.transport.close()
        self.linked.close()
        self.pair.to_follower.put(None)
        self.thread.join(60)


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    made = TwoRanks(decoder_of(tmp_path))
    yield made
    made.close()


def changed(tensors: Mapping[str, Tensor], seed: int) -> None:
    drawn = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        tensor.add_(torch.randn(tensor.shape, generator=drawn))


def test_every_rank_has_its_part_of_every_version(engine: TwoRanks) -> None:
    for version in (1, 2, 3):
        changed(engine.trainer, version)
        engine.update(version)
        assert engine.has(engine.trainer)
    assert engine.linked.engine.versions == engine.versions == [1, 2, 3]
    assert engine.linked.engine.num_holds == 3, "it stands still from the first bucket on"


def test_what_did_not_change_does_not_travel_and_stays(engine: TwoRanks) -> None:
    changed(engine.trainer, 1)
    engine.update(1)
    for version, name in ((2, "layers.1.o.weight"), (3, "norm")):
        engine.trainer[name].add_(1.0)
        weights = WeightSet(version, engine.trainer)
        assert engine.transport.move(TransferPlan(version, tuple(engine.trainer)), weights) < 40_000
        engine.transport.adopt(None)
        assert engine.has(engine.trainer)


def test_a_probe_that_fails_leaves_all_ranks_with_the_version_before(engine: TwoRanks) -> None:
    changed(engine.trainer, 1)
    engine.update(1)
    before = {name: tensor.clone() for name, tensor in engine.trainer.items()}
    changed(engine.trainer, 2)
    with pytest.raises(RedlineError, match="logprobs of a fixed prompt"):
        engine.update(2, logprobs=[-9.0])
    engine.settle()
    engine.transport.revert(2)
    assert engine.has(before)
    assert engine.linked.engine.versions[-1] == engine.versions[-1] == 1
    engine.update(3)
    assert engine.has(engine.trainer)


def test_all_ranks_go_back_to_other_weights_of_the_same_number(engine: TwoRanks) -> None:
    before = {name: tensor.clone() for name, tensor in engine.trainer.items()}
    changed(engine.trainer, 1)
    with pytest.raises(RedlineError, match="logprobs of a fixed prompt"):
        engine.update(0, logprobs=[-9.0])
    engine.settle()
    assert engine.has(before)
    engine.update(0)
    engine.transport.revert(0)
    engine.settle()
    assert engine.has(before)


def test_another_engine_that_fails_brings_all_ranks_back(engine: TwoRanks) -> None:
    changed(engine.trainer, 1)
    engine.update(1)
    before = {name: tensor.clone() for name, tensor in engine.trainer.items()}
    changed(engine.trainer, 2)
    engine.update(2)
    engine.transport.revert(2)
    engine.settle()
    assert engine.versions == [1, 2, 1]
    assert engine.has(before)


def test_other_bytes_on_another_rank_are_noticed_and_nothing_is_adopted(engine: TwoRanks) -> None:
    changed(engine.trainer, 1)
    engine.update(1)
    before = {name: tensor.clone() for name, tensor in engine.trainer.items()}
    changed(engine.trainer, 2)
    engine.pair.damage = lambda run: run[:8].add_(1)
    with pytest.raises(RedlineError, match="a rank of the engine has other bytes than it was sent"):
        engine.update(2)
    assert engine.has(before)


def test_a_rank_that_is_lost_ends_the_connection_and_the_engine(engine: TwoRanks) -> None:
    changed(engine.trainer, 1)
    engine.update(1)
    engine.pair.is_lost = True
    with pytest.raises(RedlineError, match="engine-0"):
        engine.update(2)
    assert isinstance(engine.linked.engine.failure, EngineLostError)
