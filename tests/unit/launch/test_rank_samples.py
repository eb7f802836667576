"""Samples of other ranks' machines, through the store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from support.eventually import eventually

from redline.launch import rank_samples
from redline.launch.rank_samples import KEPT, RankSampleReader, RankSamples, take_samples
from redline.telemetry.machine.hosts import HostSamples, HostSampling
from redline.telemetry.machine.samplers import read_samples


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[HostSamples]:
    with HostSamples(tmp_path, HostSampling(1.0, "run", "home"), pytest.fail) as made:
        yield made


def times(tmp_path: Path, machine: str) -> list[float]:
    return [row["time"] for row in read_samples(tmp_path / f"{machine}.jsonl")]


def send(sender: RankSamples, machine: str, *times: float) -> None:
    for time in times:
        sender.send(machine, {"time": time, "host": machine})


def test_every_sample_of_every_machine_comes_to_rank_0_once(hosts: HostSamples, tmp_path: Path) -> None:
    store = dist.HashStore()
    one, two, reader = RankSamples(lambda: store), RankSamples(lambda: store), RankSampleReader(store, hosts)
    reader.read()
    send(one, "node-1", 1.0, 2.0)
    reader.read()
    send(two, "node-2", 1.5)
    send(one, "node-1", 3.0)
    reader.read()
    reader.read()
    assert times(tmp_path, "node-1") == [1.0, 2.0, 3.0]
    assert times(tmp_path, "node-2") == [1.5]


def test_where_rank_0_takes_nothing_the_newest_stay_and_the_store_does_not_grow(hosts: HostSamples, tmp_path: Path) -> None:
    store = dist.HashStore()
    sender, reader = RankSamples(lambda: store), RankSampleReader(store, hosts)
    send(sender, "node-1", *map(float, range(10)))
    reader.read()
    keys = store.num_keys()
    send(sender, "node-1", *map(float, range(10, 10 + 3 * KEPT)))
    assert store.num_keys() <= keys + KEPT
    reader.read()
    assert times(tmp_path, "node-1") == [*map(float, range(10)), *map(float, range(10 + 2 * KEPT, 10 + 3 * KEPT))]


def test_the_thread_of_rank_0_reads_until_the_run_closes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_samples, "EVERY_S", 0.01)
    store = dist.HashStore()
    with HostSamples(tmp_path, HostSampling(1.0, "run", "home"), pytest.fail) as hosts:
        take_samples(store, hosts)
        send(RankSamples(lambda: store), "node-1", 1.0)
        eventually(lambda: (tmp_path / "node-1.jsonl").exists() and times(tmp_path, "node-1") == [1.0])
