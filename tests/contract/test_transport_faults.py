"""What every transport to engines elsewhere owes the protocol when one of two engines is killed, hangs or gets other bytes, at
any stage of an update: both have their old version, whole, with the same tokens; the error names who and what."""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from support.linked_engines import LinkedEngine, WorkerEngine
from support.weight_servers import VersionsOnly, weight_server
from torch import Tensor

from redline.errors import EngineError, RedlineError
from redline.types import Completion, GenerateRequest, WeightSet, WeightUpdate
from redline.weight_sync import Broadcast, CheckpointEngine, CudaIpc, Sending, WeightProtocol, WeightReceiver
from redline.weight_sync.buckets import Range
from redline.weight_sync.transport import Transport
from redline.weight_sync.transports.http import HttpWeights
from redline.weight_sync.transports.http_calls import HttpServer
from redline.weight_sync.transports.inlets import Inlet
from redline.weight_sync.transports.redline_server import RedlineServer
from redline.weight_sync.verify import Probe
from redline.wire import Connection, Frame

TIMEOUT_S, HANG_S = 60.0, 1.5
"""How long an answer may take, and where one hangs: then it is waited for."""
TRANSPORTS: dict[str, Callable[[Sequence[Connection], Mapping[str, Tensor], Sending], Transport]] = {
    **({"cuda_ipc": CudaIpc} if hasattr(os, "memfd_create") else {}),  # memory without a name is Linux's
    "broadcast": Broadcast,
    "checkpoint_engine": lambda channels, tensors, sending: CheckpointEngine(
        channels, tensors, Path(tempfile.mkdtemp(prefix="redline-faults-")), sending
    ),
}
STAGES = ("move", "verify", "adopt", "apply", "probe")
WORDS = {
    "move": r"has other bytes than were sent in 1 of \d+ buckets \(embed",
    "verify": r"has other bytes than were sent in 1 of \d+ buckets",
    "adopt": "the engine's logprobs of a fixed prompt are",
    "apply": "RuntimeError: the engine does not take it",
    "probe": "the engine's logprobs of a fixed prompt are nan",
}
"""What an error says where bytes, sums or answers are other than they should be."""
ASKED = {"move": "'bucket'", "verify": "'bucket'", "adopt": "'adopt'", "apply": "'adopt'", "probe": "'adopt'"}


@dataclass
class Fault:
    """What happens to one engine, once."""

    stage: str = ""
    how: str = ""
    is_over: threading.Event = field(default_factory=threading.Event)
    """Set when the test has seen what came of it: one that hung goes on then."""
    kill: Callable[[], None] = lambda: None

    def strikes(self, stage: str) -> bool:
        """Whether it happens now. One that is killed or hangs has done so when this returns."""
        if stage != self.stage:
            return False
        self.stage = ""
        if self.how == "kill":
            self.kill()
        elif self.how == "hang":
            self.is_over.wait(300)
        return self.how == "corrupt"


class FaultyInlet:
    """Other bytes arrive than were sent. Implements `Inlet`."""

    def __init__(self, inlet: Inlet, fault: Fault) -> None:
        self._inlet, self._fault = inlet, fault

    def load(self, slot: int, into: Tensor, ranges: Sequence[Range]) -> None:
        is_corrupt = self._fault.strikes("move")
        self._inlet.load(slot, into, ranges)
        if is_corrupt:
            into[1] ^= 64

    def close(self) -> None:
        self._inlet.close()


class FaultyReceiver(WeightReceiver):
    """A receiver to which something happens."""

    fault: Fault

    def answer(self, frame: Frame) -> Frame:
        if frame.kind == "adopt" and self.fault.strikes("adopt"):
            self._second.buckets[0].memory[3] ^= 64  # after its sum was told
        reply = super().answer(frame)
        if frame.kind == "open" and self._inlet is not None:
            self._inlet = FaultyInlet(self._inlet, self.fault)
        if reply.fields.get("sums") and self.fault.strikes("verify"):
            reply.fields["sums"][0] += 1
        return reply


@dataclass
class FaultyEngine(WorkerEngine):
    fault: Fault = field(default_factory=Fault)

    def apply(self, update: WeightUpdate) -> None:
        if self.fault.strikes("apply"):
            raise RuntimeError("the engine does not take it")
        super().apply(update)


class Policy:
    """An engine that samples from its weights."""

    def __init__(self, trainer: Mapping[str, Tensor], name: str) -> None:
        self.fault = Fault()
        self.linked = LinkedEngine(trainer, name, self.logprobs, FaultyEngine(fault=self.fault), self._receiver)
        self.fault.kill = self.linked.worker.close

    def _receiver(self, *args: Any) -> WeightReceiver:
        receiver = FaultyReceiver(*args)
        receiver.fault = self.fault
        return receiver

    def logprobs(self, tokens: Sequence[int]) -> list[float]:
        if self.fault.strikes("probe"):
            return [float("nan")] * (len(tokens) - 1)
        return logprobs_of(self.linked.tensors, tokens)

    def sample(self) -> tuple[int, list[int]]:
        """Its version and the tokens that it samples."""
        logits = sum(tensor.float().flatten()[:12] for tensor in self.linked.tensors.values())
        assert isinstance(logits, Tensor)
        generator = torch.Generator().manual_seed(0)
        return self.linked.receiver.version, torch.multinomial(logits.softmax(0), 20, True, generator=generator).tolist()


def logprobs_of(tensors: Mapping[str, Tensor], tokens: Sequence[int]) -> list[float]:
    """What a network with these weights makes of a prompt."""
    logits = sum(tensor.float().flatten()[:12] for tensor in tensors.values())
    assert isinstance(logits, Tensor)
    found: list[float] = logits.log_softmax(0)[list(tokens[1:])].tolist()
    return found


class Here:
    """The engines as the trainer's process has them. Implements `protocol.HeldEngine`."""

    def __init__(self) -> None:
        self.version, self.num_holds = -1, 0

    def hold(self) -> None:
        self.num_holds += 1

    def resume(self) -> None:
        self.num_holds -= 1

    def apply(self, update: WeightUpdate) -> None:
        self.version = update.version

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        raise NotImplementedError


class Run:
    """A trainer and two engines, of which the second has the faults."""

    def __init__(self, name: str, timeout_s: float = TIMEOUT_S) -> None:
        torch.manual_seed(0)
        self.trainer = {"embed": torch.randn(12, 3), "norm": torch.randn(12), "head": torch.randn(4, 12)}
        self.policies = [Policy(self.trainer, f"engine-{index}") for index in range(2)]
        channels = [policy.linked.channel for policy in self.policies]
        self.transport = TRANSPORTS[name](channels, self.trainer, Sending(timeout_s=timeout_s, bucket_bytes=64))
        self.here = Here()
        tokens = [0, 3, 5, 7, 11]
        probe = lambda: Probe(tokens, logprobs_of(self.trainer, tokens), 1e-3)  # noqa: E731
        self.protocol = WeightProtocol(self.transport, self.here, probe=probe)

    def take(self, version: int) -> None:
        with self.protocol.writing():
            for tensor in self.trainer.values():
                tensor.add_(torch.randn_like(tensor))
        self.protocol.engine.apply(self.protocol.publish(WeightSet(version, self.trainer)))

    def end(self) -> None:
        self.policies[1].fault.is_over.set()
        self.protocol.close()
        for policy in self.policies:
            policy.linked.close()


@pytest.fixture
def make_run() -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(name: str, timeout_s: float = TIMEOUT_S) -> Run:
        runs.append(Run(name, timeout_s))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


def words_of(stage: str, how: str) -> str:
    if how == "kill":
        return "engine-1 has ended the connection"
    if how == "hang":
        return f"engine-1 did not answer {ASKED[stage]} of the weights within {HANG_S:g} s"
    return f"engine-1:? {WORDS[stage]}"


FAULTS = [
    pytest.param(name, stage, how, marks=[pytest.mark.slow] if how == "hang" and (name, stage) != ("cuda_ipc", "adopt") else [])
    for name in TRANSPORTS
    for stage in STAGES
    for how in ("kill", "hang", "corrupt")
]


@pytest.mark.parametrize(("name", "stage", "how"), FAULTS)
def test_a_fault_at_any_stage_leaves_every_engine_at_its_old_version_with_the_same_tokens(
    make_run: Callable[..., Run], name: str, stage: str, how: str
) -> None:
    run = make_run(name, HANG_S if how == "hang" else TIMEOUT_S)
    run.take(1)
    before = [policy.sample() for policy in run.policies]
    fault = run.policies[1].fault
    fault.stage, fault.how = stage, how
    with pytest.raises(RedlineError, match=words_of(stage, how)):
        run.take(2)
    assert fault.stage == "", "it did not happen"
    fault.is_over.set()
    run.end()  # so that whoever hung has come to an end
    assert [policy.sample() for policy in run.policies] == before
    assert [version for version, _ in before] == [1, 1]
    assert (run.here.version, run.here.num_holds) == (1, 0)
    assert not any(policy.linked.engine.is_held for policy in run.policies)
    assert all(policy.linked.engine.failure is None for policy in run.policies)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_after_bytes_that_were_wrong_the_next_update_is_taken_by_all(
    make_run: Callable[..., Run], name: str, stage: str
) -> None:
    run = make_run(name)
    run.take(1)
    fault = run.policies[1].fault
    fault.stage, fault.how = stage, "corrupt"
    with pytest.raises(RedlineError, match="engine-1"):
        run.take(2)
    run.take(3)
    assert all(policy.linked.has(run.trainer) for policy in run.policies)
    assert run.policies[0].sample() == run.policies[1].sample()


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", TRANSPORTS)
def test_an_engine_that_joins_proves_what_it_got_as_in_every_update(
    make_run: Callable[..., Run], name: str, stage: str
) -> None:
    run = make_run(name)
    run.take(1)
    late = Policy(run.trainer, "engine-2")
    late.fault.stage, late.fault.how = stage, "corrupt"
    with pytest.raises(RedlineError, match=f"engine-2:? {WORDS[stage]}"):
        run.protocol.catch_up(late.linked.channel)
    assert late.linked.receiver.version == 0
    again = Policy(run.trainer, "engine-3")
    assert run.protocol.catch_up(again.linked.channel) == 1
    assert again.sample() == run.policies[0].sample()
    run.take(2)
    assert again.sample() == run.policies[0].sample()
    late.linked.close()


# ── servers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class FaultyServer(HttpServer):
    """A server to which other bytes go than were sent. One that hangs does so until it is told to go back."""

    fault: Fault = field(default_factory=Fault)

    def call(
        self, method: str, path: str, parts: Sequence[bytes | memoryview] = (), headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        if method == "PUT" and self.fault.strikes("move"):
            body = bytearray(b"".join(parts))
            body[-1] ^= 64
            parts = [bytes(body)]
        if path.endswith("/revert"):
            self.fault.is_over.set()
        return super().call(method, path, parts, headers)


@dataclass
class FaultyVersions(VersionsOnly):
    """The engine of a server, to which something happens."""

    fault: Fault = field(default_factory=Fault)

    def apply(self, update: WeightUpdate) -> None:
        if self.fault.strikes("apply"):
            raise EngineError("the engine does not take it")
        super().apply(update)

    async def run(self, action: Callable[[Any], Any]) -> Any:
        if self.fault.strikes("adopt"):
            while not self.fault.is_over.is_set():
                await asyncio.sleep(0.01)
        return await super().run(action)


class Servers:
    """A trainer and two servers, of which the second has the faults. Implements `http.Sampler`."""

    def __init__(self, timeout_s: float) -> None:
        torch.manual_seed(0)
        self.trainer = {"embed": torch.randn(12, 3), "norm": torch.randn(12), "head": torch.randn(4, 12)}
        self.fault, self.here = Fault(), Here()
        self.engines = [VersionsOnly(), FaultyVersions(fault=self.fault)]
        self.tensors = [{name: torch.zeros_like(tensor) for name, tensor in self.trainer.items()} for _ in self.engines]
        (url, first), (_, second) = (weight_server(*both) for both in zip(self.tensors, self.engines, strict=True))
        other = url.replace("127.0.0.1", "localhost")  # the same by another name
        servers = [HttpServer(url, first, TIMEOUT_S), FaultyServer(other, second, timeout_s, self.fault)]
        transport = HttpWeights([RedlineServer(server, 64) for server in servers], self.trainer, sampler=self, patience_s=0)
        tokens = [0, 3, 5, 7, 11]
        probe = lambda: Probe(tokens, logprobs_of(self.trainer, tokens), 1e-3)  # noqa: E731
        self.protocol = WeightProtocol(transport, self.here, probe=probe)

    def adopting(self, version: int) -> None:
        """It samples nothing meanwhile."""

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        return [float("nan")] * (len(tokens) - 1) if self.fault.strikes("probe") else logprobs_of(self.tensors[1], tokens)

    def take(self, version: int) -> None:
        with self.protocol.writing():
            for tensor in self.trainer.values():
                tensor.add_(torch.randn_like(tensor))
        self.protocol.engine.apply(self.protocol.publish(WeightSet(version, self.trainer)))

    def state(self) -> list[tuple[int, list[float]]]:
        """The version of each server, and what it makes of a prompt."""
        both = zip(self.engines, self.tensors, strict=True)
        return [(engine.version, logprobs_of(tensors, range(12))) for engine, tensors in both]


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        ("move", r"localhost:\d+ refuses PUT /weights/2/tensors \(422\): the body's SHA-256 is"),
        ("apply", r"localhost:\d+ refuses POST /weights/2/adopt \(409\): the engine does not take it"),
        ("adopt", r"localhost:\d+ did not answer POST /weights/2/adopt within 2 s"),
        ("probe", "the server does not sample from the weights that it was sent"),
    ],
)
def test_a_fault_at_any_stage_leaves_every_server_at_its_old_version(stage: str, words: str) -> None:
    servers = Servers(2 if stage == "adopt" else TIMEOUT_S)
    servers.take(1)
    before = servers.state()
    servers.fault.stage, servers.fault.how = stage, "corrupt"
    with pytest.raises(RedlineError, match=words):
        servers.take(2)
    assert servers.state() == before
    assert [version for version, _ in before] == [1, 1]
    assert (servers.here.version, servers.here.num_holds) == (1, 0)
    servers.take(3)
    assert servers.state() == [(3, logprobs_of(servers.trainer, range(12)))] * 2
