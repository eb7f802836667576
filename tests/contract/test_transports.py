"""What every transport promises (`Transport` of `weight_sync/transport.py`) under the protocol that uses it. A new one gets a
line in `TRANSPORTS`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from support.fakes import FakeEngine
from support.linked_engines import LinkedEngine
from support.weight_servers import weight_server
from torch import Tensor

from redline.types import WeightSet, WeightUpdate
from redline.weight_sync import Broadcast, CheckpointEngine, CudaIpc, Sending, SharedStorage, WeightProtocol
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.transport import Transport
from redline.weight_sync.transports.http import HttpWeights
from redline.weight_sync.transports.http_calls import HttpServer
from redline.weight_sync.transports.pushed import PushedTensors
from redline.weight_sync.transports.redline_server import RedlineServer
from redline.weight_sync.verify import Probe
from redline.wire import Connection


class CopiedTensors:
    """Copies to one side, compares, and copies to where the engine reads. Implements `Transport`."""

    shares_storage = False
    pause_s = None
    parts: Mapping[str, float] = MappingProxyType({})

    def __init__(self, engine_tensors: Mapping[str, Tensor]) -> None:
        self.engine_tensors = dict(engine_tensors)
        self._arrived: dict[str, Tensor] = {}
        self.lost: str | None = None
        """A tensor whose bytes do not arrive."""
        self.ends_before: str | None = None
        """A tensor at which the connection ends."""

    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        self._arrived = {}
        for name in plan.names:
            if name == self.ends_before:
                raise ConnectionError(f"the connection ended before {name}")
            self._arrived[name] = weights.tensors[name].clone() if name != self.lost else self.engine_tensors[name].clone()
        return sum(tensor.nbytes for tensor in self._arrived.values())

    def verify(self, weights: WeightSet) -> None:
        assert weights.tensors.keys() == self.engine_tensors.keys(), "other tensors"
        for name, there in (self.engine_tensors | self._arrived).items():
            sent, read = weights.tensors[name], self.engine_tensors[name]
            assert (sent.shape, sent.dtype) == (read.shape, read.dtype), f"{name}: another form"
            assert torch.equal(there, sent), f"{name}: other bytes"

    def adopt(self, probe: Probe | None = None) -> None:
        for name, tensor in self._arrived.items():
            self.engine_tensors[name].copy_(tensor)
        self._arrived = {}

    def revert(self, version: int) -> None:
        self._arrived = {}

    def catch_up(self, channel: Connection, weights: WeightSet, probe: Probe | None = None) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def make_tensors() -> dict[str, Tensor]:
    return {"embed": torch.randn(4, 3), "norm": torch.ones(3, dtype=torch.bfloat16), "head": torch.randn(3, 4).T}


def shared(trainer: Mapping[str, Tensor]) -> tuple[Transport, Mapping[str, Tensor]]:
    engine = {name: tensor.detach() for name, tensor in trainer.items()}
    return SharedStorage(engine), engine


def copied(trainer: Mapping[str, Tensor]) -> tuple[Transport, Mapping[str, Tensor]]:
    transport = CopiedTensors({name: tensor.clone() for name, tensor in trainer.items()})
    return transport, transport.engine_tensors


def cuda_ipc(trainer: Mapping[str, Tensor]) -> tuple[Transport, Mapping[str, Tensor]]:
    linked = LinkedEngine(trainer)
    return CudaIpc([linked.channel], trainer, Sending(timeout_s=60, bucket_bytes=32)), linked.tensors


def checkpoint_engine(trainer: Mapping[str, Tensor]) -> tuple[Transport, Mapping[str, Tensor]]:
    linked, folder = LinkedEngine(trainer), Path(tempfile.mkdtemp())
    return CheckpointEngine([linked.channel], trainer, folder, Sending(timeout_s=60, bucket_bytes=32)), linked.tensors


def http(trainer: Mapping[str, Tensor]) -> tuple[Transport, Mapping[str, Tensor]]:
    there = {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in trainer.items()}
    server = RedlineServer(HttpServer(*weight_server(there), 10), bucket_bytes=32)
    return HttpWeights([server], trainer), there


def broadcast(trainer: Mapping[str, Tensor]) -> tuple[Transport, Mapping[str, Tensor]]:
    linked = LinkedEngine(trainer)
    return Broadcast([linked.channel], trainer, Sending(timeout_s=60, bucket_bytes=32)), linked.tensors


class LoadingEngine:
    """Copies what it is given into tensors of its own."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.tensors[name].copy_(tensor)

    def stop_sampling(self, reason: str) -> None:
        raise AssertionError(reason)


def pushed(trainer: Mapping[str, Tensor]) -> tuple[Transport, Mapping[str, Tensor]]:
    engine = LoadingEngine(trainer)
    return PushedTensors(engine, trainer, lambda tensors: tensors.items()), engine.tensors


TRANSPORTS: dict[str, Callable[[Mapping[str, Tensor]], tuple[Transport, Mapping[str, Tensor]]]] = {
    "shared": shared,
    "copied": copied,
    "cuda_ipc": cuda_ipc,
    "broadcast": broadcast,
    "checkpoint_engine": checkpoint_engine,
    "http": http,
    "pushed": pushed,
}
"""Name → a transport for the trainer's tensors, and the tensors that its engine reads."""


@dataclass
class HeldFake(FakeEngine):
    """Counts holds, and samples its version and its weights while it is not held."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    version: int | None = None
    num_holds: int = 0
    refuses: bool = False

    def hold(self) -> None:
        self.num_holds += 1

    def resume(self) -> None:
        assert self.num_holds > 0
        self.num_holds -= 1

    def apply(self, update: WeightUpdate) -> None:
        assert self.num_holds, "only between two steps"
        if self.refuses:
            raise RuntimeError("the engine ended")
        self.version = update.version

    def sample(self) -> tuple[int | None, dict[str, Tensor]]:
        assert not self.num_holds, "a held engine takes no step"
        return self.version, {name: tensor.clone() for name, tensor in self.tensors.items()}


@dataclass
class Bench:
    """A trainer, a transport and an engine, connected."""

    transport: Transport
    trainer: dict[str, Tensor]
    engine: HeldFake
    protocol: WeightProtocol
    waits: list[str]

    def write(self, version: int) -> WeightSet:
        """Change every tensor in place, as a step of the trainer does."""
        with self.protocol.writing():
            for tensor in self.trainer.values():
                tensor.add_(version + 1)
        return WeightSet(version, self.trainer)

    def take(self, version: int) -> WeightUpdate:
        update = self.protocol.publish(self.write(version))
        self.protocol.engine.apply(update)
        return update

    def assert_engine_is_at(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        found, read = self.engine.sample()
        assert found == version
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


@pytest.fixture(params=TRANSPORTS)
def bench(request: pytest.FixtureRequest) -> Bench:
    if request.param == "cuda_ipc" and not hasattr(os, "memfd_create"):
        pytest.skip("memory without a name is Linux's")
    trainer, waits = make_tensors(), list[str]()
    transport, tensors = TRANSPORTS[request.param](trainer)
    engine = HeldFake(tensors=tensors)
    return Bench(transport, trainer, engine, WeightProtocol(transport, engine, lambda: waits.append("device")), waits)


# ── all is well ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_byte_of_every_version_arrives(bench: Bench) -> None:
    for version in range(4):
        update = bench.take(version)
        assert (update.version, update.changed) == (version, ("embed", "norm", "head"))
        bench.assert_engine_is_at(version, bench.trainer)


def test_bytes_are_counted_where_they_are_copied(bench: Bench) -> None:
    size = sum(tensor.nbytes for tensor in bench.trainer.values())
    assert bench.take(0).bytes_moved == (0 if bench.transport.shares_storage else size)


def test_a_version_is_visible_only_once_it_is_verified_and_applied(bench: Bench) -> None:
    bench.take(0)
    old = {name: tensor.clone() for name, tensor in bench.trainer.items()}
    update = bench.protocol.publish(bench.write(1))
    assert bench.engine.version == 0
    if not bench.transport.shares_storage:
        bench.assert_engine_is_at(0, old)
    bench.protocol.engine.apply(update)
    bench.assert_engine_is_at(1, bench.trainer)


def test_nothing_moves_when_nothing_changed(bench: Bench) -> None:
    bench.take(5)
    again = bench.protocol.publish(WeightSet(5, bench.trainer))
    assert again == WeightUpdate(version=5, changed=(), bytes_moved=0)
    bench.protocol.engine.apply(again)
    bench.assert_engine_is_at(5, bench.trainer)


@pytest.mark.parametrize("versions", [[0, 1, 2], [0, 5, 5]])
def test_every_version_is_passed_on(bench: Bench, versions: list[int]) -> None:
    updates = []
    for version in versions:
        updates.append(bench.protocol.publish(WeightSet(version, bench.trainer)))
        bench.protocol.engine.apply(updates[-1])
    assert [update.version for update in updates] == versions


def test_an_engine_is_held_while_weights_that_it_shares_are_written_and_not_otherwise(bench: Bench) -> None:
    with bench.protocol.writing():
        assert bool(bench.engine.num_holds) == bench.transport.shares_storage
        assert bench.waits == []
    assert bench.waits == ["device"], "the weights are written when the device has written them"
    bench.protocol.engine.apply(bench.protocol.publish(WeightSet(1, bench.trainer)))
    assert bench.engine.num_holds == 0


def test_the_loop_generates_with_the_engine_itself(bench: Bench) -> None:
    assert bench.protocol.engine.generate([]) == []
    assert bench.engine.calls == [("engine.generate", 0)]


# ── something fails ────────────────────────────────────────────────────────────────────────────────────────────────────


def altered(tensors: Mapping[str, Tensor], how: str) -> dict[str, Tensor]:
    norm = tensors["norm"]
    if how == "a tensor is missing":
        return {name: tensor for name, tensor in tensors.items() if name != "norm"}
    if how == "a tensor is new":
        return {**tensors, "extra": torch.zeros(1)}
    if how == "another shape":
        return {**tensors, "norm": norm.view(1, 3)}
    if how == "another type":
        return {**tensors, "norm": norm.view(torch.float16)}
    if how == "a shape at another place":
        return {**tensors, "norm": torch.ones(4, dtype=norm.dtype)}
    raise ValueError(how)


ALTERATIONS = ["a tensor is missing", "a tensor is new", "another shape", "another type", "a shape at another place"]


@pytest.mark.parametrize("how", ALTERATIONS)
def test_tensors_of_another_form_than_the_engines_are_refused(bench: Bench, how: str) -> None:
    with pytest.raises(AssertionError):
        bench.protocol.publish(WeightSet(0, altered(bench.trainer, how)))
    assert bench.engine.version is None


@pytest.mark.parametrize("how", ["a tensor is missing", "a tensor is new", "a shape at another place"])
def test_a_failed_publication_leaves_the_engine_at_its_old_version_whole(bench: Bench, how: str) -> None:
    bench.take(0)
    old = {name: tensor.clone() for name, tensor in bench.trainer.items()}
    weights = bench.write(1)
    with pytest.raises(AssertionError):
        bench.protocol.publish(WeightSet(1, altered(weights.tensors, how)))
    assert bench.engine.version == 0
    with pytest.raises(AssertionError, match="version 1 was not verified"):
        bench.protocol.engine.apply(WeightUpdate(1, ("embed",), 0))
    if bench.transport.shares_storage:
        assert bench.engine.num_holds == 1, "part of what it reads may be new"
    else:
        bench.assert_engine_is_at(0, old)
    bench.protocol.engine.apply(bench.protocol.publish(weights))
    bench.assert_engine_is_at(1, bench.trainer)


def test_an_engine_does_not_go_on_where_writing_weights_that_it_shares_broke_off(bench: Bench) -> None:
    bench.take(0)
    old = {name: tensor.clone() for name, tensor in bench.trainer.items()}
    with pytest.raises(IndexError), bench.protocol.writing():
        bench.trainer["embed"].add_(1)[99]
    assert bench.waits == ["device"], "of version 0 alone"
    if bench.transport.shares_storage:
        assert bench.engine.num_holds == 1
    else:
        bench.assert_engine_is_at(0, old)


def test_an_engine_that_does_not_take_the_version_stays_held(bench: Bench) -> None:
    bench.take(0)
    update = bench.protocol.publish(bench.write(1))
    bench.engine.refuses = True
    with pytest.raises(RuntimeError, match="the engine ended"):
        bench.protocol.engine.apply(update)
    assert (bench.engine.version, bench.engine.num_holds) == (0, 1)


@pytest.mark.parametrize("fault", ["lost", "ends_before"])
def test_bytes_that_do_not_arrive_are_noticed_and_the_engine_goes_on_with_what_it_has(fault: str) -> None:
    trainer = make_tensors()
    transport, tensors = copied(trainer)
    engine = HeldFake(tensors=tensors)
    bench = Bench(transport, trainer, engine, WeightProtocol(transport, engine), [])
    bench.take(0)
    old = {name: tensor.clone() for name, tensor in trainer.items()}
    setattr(transport, fault, "head")
    with pytest.raises((AssertionError, ConnectionError), match="head"):
        bench.protocol.publish(bench.write(1))
    bench.assert_engine_is_at(0, old)
    setattr(transport, fault, None)
    bench.take(2)
    bench.assert_engine_is_at(2, trainer)
