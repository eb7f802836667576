"""Weights to engines that are servers: `redline serve`, SGLang's and vLLM's.

    trainer                       a server
    move ────── tensors ────────► beside those that it samples from; SGLang and vLLM: into a folder that they can read
    verify ────────────────────── the digests of what arrived
    adopt ──────────────────────► samples from them, between two steps
          ────── probe ─────────► as any request for samples: its logprobs must be the trainer's own
    revert ─────────────────────► back to the version before

Tensors whose bytes the server has already are not sent. A server may be started again at any time, or be given weights by
somebody else. It is asked what it has whenever an answer of it is used (`watched_servers.py`). An update takes such a server
from weights of others to ours, so that afterwards it says that all is well: every adoption therefore tells what the server had
right before, and `num_losses` counts it. Who asks for answers trusts none that was under way when it went up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from torch import Tensor

from redline.errors import EngineLostError, ServerAwayError, WeightSyncError
from redline.types import WeightSet
from redline.weight_sync.buckets import form_of
from redline.weight_sync.parts import timed
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.tensor_bytes import digests
from redline.weight_sync.transports.pushed import OTHER_KERNELS
from redline.weight_sync.verify import Probe, check_logprobs
from redline.wire import Connection

PATIENCE_S = 300.0
"""How long a server that is away may take to come back."""
PAUSE_S = 1.0
"""Between two attempts to reach it."""
MAX_ATTEMPTS = 4
"""How often servers are brought to a version when one loses it again meanwhile, before its error is raised."""
Result = TypeVar("Result")
Convert = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


class WeightServer(Protocol):
    """One server, in the words of its own protocol. `HttpWeights` calls `send`, `verify` and `adopt` in this order, `revert`
    after any of them."""

    def is_lost(self) -> bool:
        """Whether the server no longer has the weights that it was left with: it was started again, or somebody else has sent
        others. Raises WeightSyncError where it does not say."""
        ...

    def send(self, version: int, tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> int:
        """Bring a version into the server's reach; `found` are the digests of its tensors. Returns the bytes that were sent."""
        ...

    def verify(self) -> None:
        """Raise WeightSyncError unless what was sent is whole, and the server could sample from it."""
        ...

    def adopt(self) -> bool:
        """Have the server sample from what was sent. Returns whether it had lost the weights that it was left with: what it
        answered until now may be of any."""
        ...

    def revert(self) -> None:
        """Have the server sample from the version before the one that was sent, whether or not that was adopted."""
        ...

    def close(self) -> None:
        """Delete what was written for the server alone. It keeps the weights that it has."""
        ...


class Sampler(Protocol):
    """What samples from the servers, as far as their weights matter to it."""

    def adopting(self, version: int) -> None:
        """The servers may sample from this version from now on."""
        ...

    def prompt_logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        """The logprob of each token after the first, as the servers compute it for a request. Blocks."""
        ...


class HttpWeights:
    """Brings weights to several servers at once. Implements `Transport`."""

    shares_storage = False

    def __init__(
        self,
        servers: Sequence[WeightServer],
        tensors: Mapping[str, Tensor],
        convert: Convert = lambda tensors: tensors,
        sampler: Sampler | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`tensors` are the trainer's: those that every update will have. `convert` makes of them what the servers are sent.
        Without a `sampler` no probe is computed. A server that is away may take `patience_s` to come back."""
        self._servers, self._convert, self._sampler, self.patience_s = list(servers), convert, sampler, patience_s
        self._forms = {name: form_of(name, tensor) for name, tensor in tensors.items()}
        self._moved: WeightSet | None = None
        """The version that was sent last."""
        self._is_under_way = False
        """Whether it is not adopted yet."""
        self._version = 0
        """The version that the servers have."""
        self._probe: Probe | None = None
        """What the trainer made of a prompt under that version."""
        self.num_losses = 0
        """How often a server was given weights in place of others than it was left with, or may have been: it goes up right
        after."""
        self._counting = threading.Lock()
        self.parts: dict[str, float] = {}
        """Seconds of each part of the last update."""
        self.pause_s: float | None = None

    def move(self, plan: TransferPlan, weights: WeightSet) -> int:
        """Send the version to every server, but for tensors that it has already. Returns the bytes sent. Waits for a server
        that is away."""
        self._check_forms(weights)
        self.parts, self._moved, self._is_under_way = {}, weights, True
        return self._patiently(lambda: self._send(weights))

    def look(self) -> bool:
        """Ask every server whether it still has the weights that it was left with. Returns False where one has not. Raises
        WeightSyncError where one does not say."""
        return not any(self._each(lambda server: server.is_lost()))

    def restore(self, weights: WeightSet) -> None:
        """Bring servers that have lost their weights to these: those of the version that they had. A few times, where one is
        started again meanwhile. Raises WeightSyncError or EngineLostError where one is away, or does not get them."""
        for _ in range(MAX_ATTEMPTS - 1):
            try:
                return self._restore(weights)
            except ServerAwayError:
                raise
            except WeightSyncError:
                if self.look():  # it was there all the time
                    raise
        return self._restore(weights)

    def _restore(self, weights: WeightSet) -> None:
        if self.look():
            self._examine()
        else:
            self._send(weights)
            self._each(lambda server: server.verify())
            self._take()

    def _send(self, weights: WeightSet) -> int:
        with timed("convert", self.parts):
            sent = self._convert(weights.tensors)
        with timed("gather", self.parts):
            host = {name: tensor.detach().cpu() for name, tensor in sent.items()}
        with timed("serialise", self.parts):
            found = digests(host)
        with timed("transfer", self.parts):
            return sum(self._each(lambda server: server.send(weights.version, host, found)))

    def verify(self, weights: WeightSet) -> None:
        self._check_forms(weights)
        if self._is_under_way:
            with timed("verify", self.parts):
                self._each(lambda server: server.verify())

    def adopt(self, probe: Probe | None = None) -> None:
        """Have every server sample from what was sent, and compare what it makes of a prompt with the trainer's own. One that
        is started again meanwhile is waited for, and gets everything."""
        assert self._moved is not None, "nothing was moved"
        weights, self._probe = self._moved, probe
        self._tell(weights.version)
        try:
            self._take()
        except (WeightSyncError, EngineLostError):
            self._count_loss()
            if self._patiently(self.look):  # it was there all the time: the version is not to its liking, or ours
                raise
            self._patiently(lambda: self.restore(weights))
        self._version, self._is_under_way = weights.version, False

    def _take(self) -> None:
        with timed("load", self.parts):
            self._each(self._adopt_by)
        with timed("verify", self.parts):
            self._examine()

    def _adopt_by(self, server: WeightServer) -> None:
        if server.adopt():
            self._count_loss()

    def _count_loss(self) -> None:
        with self._counting:
            self.num_losses += 1

    def _patiently(self, action: Callable[[], Result]) -> Result:
        """What `action` gives, again and again while a server is away."""
        deadline = time.monotonic() + self.patience_s
        while True:
            try:
                return action()
            except (ServerAwayError, EngineLostError):
                if time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE_S)

    def _examine(self) -> None:
        if self._probe is None or self._sampler is None:
            return
        found = self._sampler.prompt_logprobs(self._probe.tokens)
        try:
            check_logprobs(self._probe.logprobs, found, OTHER_KERNELS * self._probe.tolerance)
        except WeightSyncError as error:
            raise WeightSyncError(
                f"the server does not sample from the weights that it was sent: {error.message}",
                "is engine.served_model an adapter or another model, does engine.url lead elsewhere than the weights,"
                " or does the server quantise them?",
            ) from error

    def _tell(self, version: int) -> None:
        if self._sampler is not None:
            self._sampler.adopting(version)

    def revert(self, version: int) -> None:
        """Every server that can be reached goes back to what it had before `version`."""
        if self._moved is not None and self._moved.version == version:
            self._moved, self._is_under_way = None, False
            for server in self._servers:
                with suppress(WeightSyncError):
                    server.revert()
            self._tell(self._version)

    def catch_up(self, channel: Connection, weights: WeightSet, probe: Probe | None = None) -> None:
        """Servers are not started by a run: `watched_servers.py` notices one that was started again."""
        raise AssertionError("servers have no connection of their own")

    def close(self) -> None:
        """Delete what was written for the servers. They go on with the weights that they have."""
        for server in self._servers:
            server.close()

    def _check_forms(self, weights: WeightSet) -> None:
        found = {name: form_of(name, tensor) for name, tensor in weights.tensors.items()}
        other = {name for name, _ in found.items() ^ self._forms.items()}
        assert not other, f"other tensors than the servers were told of: {', '.join(sorted(other))}"

    def _each(self, call: Callable[[WeightServer], Any]) -> list[Any]:
        """What each server gave. All are waited for, so that none is still at work when an error is raised."""
        if len(self._servers) == 1:
            return [call(self._servers[0])]
        with ThreadPoolExecutor(max(1, len(self._servers)), thread_name_prefix="http-weights") as pool:
            futures = [pool.submit(call, server) for server in self._servers]
        return [future.result() for future in futures]
