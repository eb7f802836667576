"""The process group of `broadcast`: who is lost when it is formed, where it meets, and what goes on while a bucket travels."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from support.linked_engines import LinkedEngine
from torch import Tensor

from redline.errors import RedlineError, WireClosed, WireError
from redline.types import WeightSet
from redline.weight_sync import Broadcast, Sending, WeightReceiver
from redline.weight_sync.buckets import Range
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.transports.broadcast import GroupInlet, _own_address
from redline.weight_sync.verify import Probe
from redline.wire import Connection, Frame

TENSORS = {"first": torch.ones(16), "second": torch.ones(16), "third": torch.ones(16)}


class Losses:
    """What a pool of engines is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def __call__(self, channel: Connection, error: WireError) -> None:
        self.said.append(error.message)


def take(transport: Broadcast, version: int, tensors: Mapping[str, Tensor]) -> None:
    weights = WeightSet(version, tensors)
    transport.move(TransferPlan(version, tuple(tensors)), weights)
    transport.verify(weights)
    transport.adopt()


def test_an_engine_that_is_gone_when_the_group_is_formed_is_named_and_the_others_go_on() -> None:
    lost, engines = Losses(), [LinkedEngine(TENSORS, f"engine-{index}") for index in range(3)]
    engines[1].worker.close()
    transport = Broadcast([engine.channel for engine in engines], TENSORS, Sending(timeout_s=60, on_lost=lost))
    assert lost.said == ["engine-1 has ended the connection"]
    take(transport, 1, TENSORS)
    assert engines[0].has(TENSORS)
    assert engines[2].has(TENSORS)
    transport.close()


def test_without_a_pool_an_engine_that_is_gone_when_the_group_is_formed_ends_it_with_its_name() -> None:
    engine = LinkedEngine(TENSORS, "engine-0")
    engine.worker.close()
    with pytest.raises(WireClosed, match="engine-0 has ended the connection"):
        Broadcast([engine.channel], TENSORS, Sending(timeout_s=60))


def test_an_engine_that_is_lost_while_it_joins_is_named_and_one_that_joins_later_gets_the_weights() -> None:
    lost, first = Losses(), LinkedEngine(TENSORS, "engine-0")
    transport = Broadcast([first.channel], TENSORS, Sending(timeout_s=60, on_lost=lost))
    take(transport, 1, TENSORS)
    for name in ("engine-1", "engine-2"):
        gone = LinkedEngine(TENSORS, name)
        gone.worker.close()
        with pytest.raises(RedlineError, match=f"{name} was lost while it was brought to the present version"):
            transport.catch_up(gone.channel, WeightSet(1, TENSORS))
    late = LinkedEngine(TENSORS, "engine-3")
    transport.catch_up(late.channel, WeightSet(1, TENSORS))
    assert late.has(TENSORS)
    assert lost.said == ["engine-1 has ended the connection", "engine-2 has ended the connection"]
    new = {name: tensor + 1 for name, tensor in TENSORS.items()}
    take(transport, 2, new)
    assert first.has(new)
    assert late.has(new)
    transport.close()


class Leaves(WeightReceiver):
    """A receiver whose connection ends under one of its frames."""

    left = 10**9
    """Frames of the kind below that it answers before."""
    kind = ""
    leave: Callable[[], None]

    def answer(self, frame: Frame) -> Frame:
        self.left -= frame.kind == self.kind
        if self.left < 0:
            self.leave()
        return super().answer(frame)


def leaving(name: str, kind: str, after: int) -> LinkedEngine:
    """An engine that goes away under a frame of this kind, after so many of them."""
    engine = LinkedEngine(TENSORS, name, make_receiver=Leaves)
    assert isinstance(engine.receiver, Leaves)
    engine.receiver.leave, engine.receiver.kind, engine.receiver.left = engine.worker.close, kind, after
    return engine


def plus(number: int) -> dict[str, Tensor]:
    return {name: tensor + number for name, tensor in TENSORS.items()}


def test_when_an_engine_is_lost_in_adopt_the_others_take_the_next_update() -> None:
    lost, first, second = Losses(), LinkedEngine(TENSORS, "engine-0"), leaving("engine-1", "adopt", after=1)
    transport = Broadcast([first.channel, second.channel], TENSORS, Sending(timeout_s=60, on_lost=lost))
    for version in (1, 2, 3):
        take(transport, version, plus(version))
        assert first.has(plus(version))
        assert lost.said == ([] if version == 1 else ["engine-1 has ended the connection"])
    transport.close()


def test_when_an_engine_that_joins_fails_its_probe_the_others_take_the_next_update() -> None:
    first = LinkedEngine(TENSORS, "engine-0")
    transport = Broadcast([first.channel], TENSORS, Sending(timeout_s=60, on_lost=Losses()))
    take(transport, 1, plus(1))
    wrong = LinkedEngine(TENSORS, "engine-1", logprobs=lambda tokens: [-9.0])
    with pytest.raises(RedlineError, match=r"engine-1.* of a fixed prompt"):
        transport.catch_up(wrong.channel, WeightSet(1, plus(1)), Probe((1, 2), (-1.0,), 0.001))
    wrong.close()
    for version in (2, 3):
        take(transport, version, plus(version))
        assert first.has(plus(version))
    transport.close()


def test_an_engine_that_goes_away_once_it_has_joined_is_named_in_the_next_update() -> None:
    lost, first, late = Losses(), LinkedEngine(TENSORS, "engine-0"), leaving("engine-1", "open", after=1)
    transport = Broadcast([first.channel], TENSORS, Sending(timeout_s=60, on_lost=lost))
    take(transport, 1, plus(1))
    transport.catch_up(late.channel, WeightSet(1, plus(1)))
    assert (late.has(plus(1)), lost.said) == (True, [])
    take(transport, 2, plus(2))
    assert lost.said == ["engine-1 has ended the connection"]
    assert late.channel.is_closed, "who has started it sees that it gets no weights any more"
    assert first.has(plus(2))
    transport.close()


@pytest.mark.parametrize("has_come_back_before", [False, True])
def test_when_all_engines_are_lost_in_an_update_the_one_that_comes_back_takes_the_next(has_come_back_before: bool) -> None:
    lost, engine = Losses(), LinkedEngine(TENSORS, "engine-0")
    transport = Broadcast([engine.channel], TENSORS, Sending(timeout_s=60, on_lost=lost))
    take(transport, 1, plus(1))
    if has_come_back_before:  # no group is open then
        engine.worker.close()
        engine = LinkedEngine(TENSORS, "engine-0")
        transport.catch_up(engine.channel, WeightSet(1, plus(1)))
    engine.worker.close()
    take(transport, 2, plus(2))
    assert transport.channels == []
    assert len(lost.said) == 1 + has_come_back_before
    back = LinkedEngine(TENSORS, "engine-0")
    transport.catch_up(back.channel, WeightSet(2, plus(2)))
    for version in (3, 4):
        take(transport, version, plus(version))
        assert back.has(plus(version))
    transport.close()


class Asked(Mapping[str, Tensor]):
    """The trainer's tensors, put together when they are asked for: notes which were."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.gathered = {name: threading.Event() for name in tensors}

    def __getitem__(self, name: str) -> Tensor:
        self.gathered[name].set()
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def test_the_next_bucket_is_gathered_while_one_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, new = LinkedEngine(TENSORS), {name: tensor + 1 for name, tensor in TENSORS.items()}
    asked, transport = Asked(new), Broadcast([engine.channel], TENSORS, Sending(timeout_s=60, bucket_bytes=64))
    take(transport, 1, TENSORS)  # forms the group
    load, order = GroupInlet.load, list[str]()

    def late(self: GroupInlet, slot: int, into: Tensor, ranges: list[Range]) -> None:
        """An engine that takes no bucket before the trainer has gathered the tensor of the next."""
        name = ["first", "second", "third"][len(order)]
        after = {"first": "second", "second": "third", "third": "third"}[name]
        assert asked.gathered[after].wait(60), f"{after} is not gathered while {name} travels"
        order.append(name)
        load(self, slot, into, ranges)

    monkeypatch.setattr(GroupInlet, "load", late)
    take(transport, 2, asked)
    assert order == ["first", "second", "third"]
    assert engine.has(new)
    transport.close()


def own_address() -> str | None:
    """An address of this machine that is not loopback, where it has one."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return None


@pytest.mark.skipif(own_address() is None, reason="this machine has no network")
def test_a_group_meets_at_the_address_that_it_is_given() -> None:
    host = own_address()
    assert host is not None
    engine = LinkedEngine(TENSORS)
    transport = Broadcast([engine.channel], TENSORS, Sending(timeout_s=60, host=host))
    port = transport._group._port
    take(transport, 1, TENSORS)
    assert engine.has(TENSORS)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 2)
    assert _own_address(host) == host
    transport.close()
