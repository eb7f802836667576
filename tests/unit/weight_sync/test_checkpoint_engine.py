"""Weights through a folder: what the contract of all transports does not say."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.linked_engines import LinkedEngine
from torch import Tensor

from redline.errors import PeerError, RunFolderError
from redline.types import WeightSet
from redline.weight_sync import CheckpointEngine, Sending
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.version_folder import StoredTensors, current_version, reading

SENDING = Sending(timeout_s=60, bucket_bytes=64)


def make_tensors() -> dict[str, Tensor]:
    return {"embed": torch.randn(30, 3), "norm": torch.ones(3, dtype=torch.bfloat16), "frozen": torch.randn(40)}


def take(transport: CheckpointEngine, version: int, tensors: dict[str, Tensor]) -> int:
    weights = WeightSet(version, tensors)
    moved = transport.move(TransferPlan(version, tuple(tensors)), weights)
    transport.verify(weights)
    transport.adopt()
    return moved


def test_engines_read_only_what_changed(tmp_path: Path) -> None:
    trainer = make_tensors()
    engines = [LinkedEngine(trainer, f"engine-{index}") for index in range(2)]
    transport = CheckpointEngine([engine.channel for engine in engines], trainer, tmp_path, SENDING)
    assert take(transport, 0, trainer) == sum(tensor.nbytes for tensor in trainer.values())
    for engine in engines:
        engine.tensors["frozen"].fill_(7)  # is not written to again
    trainer["norm"] = trainer["norm"] * 2
    assert take(transport, 1, trainer) == 6
    assert take(transport, 2, trainer) == 0
    for engine in engines:
        assert torch.equal(engine.tensors["norm"], trainer["norm"])
        assert torch.equal(engine.tensors["frozen"], torch.full((40,), 7.0))
        assert engine.engine.versions == [0, 1, 2]
        engine.close()


def test_an_engine_that_comes_late_or_again_reads_the_current_version(tmp_path: Path) -> None:
    trainer = make_tensors()
    first, late = LinkedEngine(trainer, "engine-0"), LinkedEngine(trainer, "engine-1")
    transport = CheckpointEngine([first.channel], trainer, tmp_path, SENDING)
    for version in range(3):
        trainer["embed"].add_(1)
        take(transport, version, trainer)
    transport.catch_up(late.channel, WeightSet(2, trainer))
    assert late.has(trainer)
    assert late.engine.versions == [2]
    trainer["embed"].add_(1)
    take(transport, 3, trainer)
    assert first.has(trainer)
    assert late.has(trainer)
    with reading(tmp_path) as manifest:  # by itself
        assert manifest.version == 3
        assert all(torch.equal(tensor, trainer[name]) for name, tensor in StoredTensors(tmp_path, manifest).items())
    transport.close()


def test_what_is_current_follows_the_engines_not_the_trainer(tmp_path: Path) -> None:
    trainer = make_tensors()
    engine = LinkedEngine(trainer)
    transport = CheckpointEngine([engine.channel], trainer, tmp_path, SENDING)
    take(transport, 0, trainer)
    old = {name: tensor.clone() for name, tensor in trainer.items()}
    trainer["embed"].add_(1)
    engine.engine.refuses = 1
    with pytest.raises(PeerError, match="does not take it"):
        take(transport, 1, trainer)
    transport.revert(1)
    assert current_version(tmp_path) == 0
    assert engine.has(old)
    engine.engine.refuses = None
    take(transport, 1, trainer)
    assert current_version(tmp_path) == 1
    transport.revert(1)  # another engine could not
    assert current_version(tmp_path) == 0
    assert engine.has(old)
    take(transport, 1, trainer)
    assert engine.has(trainer)


def test_a_shard_that_is_damaged_on_the_way_is_noticed_and_the_engine_goes_on_with_what_it_has(tmp_path: Path) -> None:
    trainer = make_tensors()
    engine = LinkedEngine(trainer)
    transport = CheckpointEngine([engine.channel], trainer, tmp_path, SENDING)
    take(transport, 0, trainer)
    old = {name: tensor.clone() for name, tensor in trainer.items()}
    for tensor in trainer.values():
        tensor.add_(1)
    write = transport._folder.write

    def damaged(version: int, tensors: dict[str, Tensor]):  # type: ignore[no-untyped-def]
        manifest = write(version, tensors)
        shard = tmp_path / "shards" / manifest.tensors["embed"].shard
        content = shard.read_bytes()
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        return manifest

    transport._folder.write = damaged  # type: ignore[assignment]
    with pytest.raises(PeerError, match="is not what was written"):
        take(transport, 1, trainer)
    transport.revert(1)
    assert engine.has(old)
    assert engine.engine.versions == [0]


def test_two_runs_do_not_write_to_one_folder(tmp_path: Path) -> None:
    trainer = make_tensors()
    first = CheckpointEngine([], trainer, tmp_path, SENDING)
    with pytest.raises(RunFolderError, match="another process writes"):
        CheckpointEngine([], trainer, tmp_path, SENDING)
    first.close()
