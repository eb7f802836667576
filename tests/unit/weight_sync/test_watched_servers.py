"""Servers that are started again, or away for a while, before, in and after an update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from redline.errors import EngineLostError, ServerAwayError, WeightSyncError
from redline.types import WeightSet
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.transports import http, watched_servers
from redline.weight_sync.transports.http import HttpWeights
from redline.weight_sync.transports.watched_servers import WatchedServers
from redline.weight_sync.verify import Probe

PROBE = Probe((1, 2), (-1.0,), tolerance=0.001)


@dataclass
class Server:
    """Has a version, loses it when it is told to, and may be away. Implements `http.WeightServer` and `http.Sampler`."""

    has: int | None = None
    left: int | None = None
    sent: int | None = None
    away: int = 0
    """Calls that it does not answer."""
    ends_in_adopt: int = 0
    """Versions that it loses under their adoption, since it is started again."""
    told: list[int] = field(default_factory=list)
    logprob: float = -1.0

    def start_again(self, away: int = 0) -> None:
        self.has, self.sent, self.away = None, None, away

    def _answer(self) -> None:
        if self.away:
            self.away -= 1
            raise ServerAwayError("nobody is there")

    def is_lost(self) -> bool:
        self._answer()
        return self.left is not None and self.has != self.left

    def send(self, version: int, tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> int:
        self._answer()
        self.sent = version
        return 1

    def verify(self) -> None:
        assert self.sent is not None

    def adopt(self) -> bool:
        was_lost = self.is_lost()
        if self.ends_in_adopt:
            self.ends_in_adopt -= 1
            self.start_again()
        if self.sent is None:
            raise WeightSyncError("that version was not sent")
        self.has = self.left = self.sent
        return was_lost

    def revert(self) -> None:
        self.has = self.left

    def close(self) -> None:
        """It has nothing to delete."""

    def adopting(self, version: int) -> None:
        self.told.append(version)

    def prompt_logprobs(self, tokens: Sequence[int]) -> Sequence[float]:
        if self.away:
            self.away -= 1
            raise EngineLostError("nobody is there")
        return [self.logprob]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "PAUSE_S", 0.001)
    monkeypatch.setattr(watched_servers, "PAUSE_S", 0.001)


def weights(version: int) -> WeightSet:
    return WeightSet(version, {"w": torch.ones(2)})


def transport(server: Server, patience_s: float = 300.0) -> HttpWeights:
    return HttpWeights([server], weights(0).tensors, sampler=server, patience_s=patience_s)


def move(sent: HttpWeights, version: int) -> None:
    sent.move(TransferPlan(version, ("w",)), weights(version))
    sent.verify(weights(version))


def at(version: int, server: Server) -> HttpWeights:
    """A transport that has brought the server to a version."""
    sent = transport(server)
    move(sent, version)
    sent.adopt(PROBE)
    return sent


def test_a_server_that_is_away_when_an_update_begins_is_waited_for() -> None:
    server = Server()
    sent = at(3, server)
    server.start_again(away=3)
    move(sent, 4)
    sent.adopt(PROBE)
    assert (server.has, sent.num_losses, server.told) == (4, 1, [3, 4])


@pytest.mark.parametrize("away", [0, 3])
def test_a_server_that_is_started_again_between_what_was_sent_and_its_adoption_gets_everything(away: int) -> None:
    server = Server()
    sent = at(3, server)
    move(sent, 4)
    server.start_again(away)
    sent.adopt(PROBE)
    assert server.has == 4
    assert sent.num_losses > 0


def test_a_version_that_a_server_refuses_is_not_sent_over_and_over() -> None:
    server = Server()
    sent = at(3, server)
    move(sent, 4)
    server.sent = None
    with pytest.raises(WeightSyncError, match="was not sent"):
        sent.adopt(PROBE)
    sent.revert(4)
    assert server.told == [3, 4, 3]


def test_a_server_that_stays_away_is_given_up() -> None:
    server = Server(away=10**9)
    with pytest.raises(ServerAwayError):
        move(transport(server, patience_s=0.01), 1)


@contextmanager
def at_rest(who: str) -> Iterator[WeightSet]:
    yield weights(3)


def test_a_server_that_gets_a_version_in_place_of_its_own_model_is_lost_until_then_and_counted_right_after() -> None:
    server = Server()
    sent = at(3, server)
    watched = WatchedServers(sent, at_rest)
    move(sent, 4)
    sent.adopt(PROBE)
    assert watched.num_losses == 0, "nothing was lost in an update like any other"
    server.start_again(away=1)
    move(sent, 5)
    assert (watched.are_there(), watched.num_losses) == (False, 0), "what it answers now is of its own model"
    sent.adopt(PROBE)
    assert (watched.are_there(), watched.num_losses) == (True, 1), "and what it answered before does not count"


def test_after_an_adoption_that_failed_nothing_that_was_under_way_counts() -> None:
    server = Server()
    sent = at(3, server)
    move(sent, 4)
    server.logprob = -2.0
    with pytest.raises(WeightSyncError, match="does not sample from the weights"):
        sent.adopt(PROBE)
    assert sent.num_losses == 1


@pytest.mark.parametrize("away", [0, 3])
def test_weights_that_were_lost_between_two_updates_are_brought_back(away: int) -> None:
    server = Server()
    watched = WatchedServers(at(3, server), at_rest)
    assert watched.are_there()
    server.start_again(away)
    assert not watched.are_there()
    watched.restore()
    assert watched.are_there()
    assert server.has == 3
    assert watched.num_losses > 0


def test_a_server_that_is_started_again_while_it_gets_its_weights_back_gets_them_once_more() -> None:
    server = Server()
    sent = at(3, server)
    watched = WatchedServers(sent, at_rest)
    server.start_again()
    server.ends_in_adopt = 2
    watched.restore()
    assert (server.has, watched.are_there()) == (3, True)
    move(sent, 4)
    server.ends_in_adopt = 2
    sent.adopt(PROBE)
    assert (server.has, watched.are_there()) == (4, True)


def test_a_server_that_refuses_the_version_whenever_it_gets_it_is_not_sent_it_for_ever() -> None:
    server = Server()
    watched = WatchedServers(at(3, server), at_rest)
    server.start_again()
    server.ends_in_adopt = 10**9
    with pytest.raises(WeightSyncError, match="was not sent"):
        watched.restore()


def test_a_server_that_comes_back_and_computes_otherwise_is_not_used() -> None:
    server = Server()
    watched = WatchedServers(at(3, server), at_rest)
    server.start_again()
    server.logprob = -2.0
    with pytest.raises(WeightSyncError, match="does not sample from the weights that it was sent"):
        watched.restore()
