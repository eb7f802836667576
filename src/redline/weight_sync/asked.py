"""Engines at the end of connections, as a transport asks them: each question to all of them, each answer within a time limit.

An engine that does not keep it, or whose connection ends, is lost. `Sending.on_lost` decides what that means: by default its
error is raised; a pool of engines goes on without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from redline.errors import PeerError, WireClosed, WireError, WireTimeout
from redline.wire import Connection, Frame, peer_error

TIMEOUT_S = 120.0


@dataclass(slots=True, frozen=True)
class Sending:
    """How to send."""

    timeout_s: float = TIMEOUT_S
    """How long an engine may take for one answer."""
    bucket_bytes: int | None = None
    """The size of a bucket; None takes the transport's own for the device."""
    on_lost: Callable[[Connection, WireError], None] | None = None
    """Told of an engine that went away or did not answer; the others go on. None raises."""
    host: str = "127.0.0.1"
    """Where engines reach the trainer, if the link needs more than the connections."""
    holds_engines: bool = False
    """Whether engines stand still from the first bucket until the version is theirs. Right where they are on the trainer's own
    GPU: processes have it in turn, and everything here would wait for their kernels again and again."""


class AskedEngines:
    """The engines of a transport."""

    def __init__(self, channels: Sequence[Connection], sending: Sending) -> None:
        self.channels = list(channels)
        """Those that are asked; one that was lost is no longer among them."""
        self._sending = sending
        self._waiting: dict[Connection, deque[str]] = {channel: deque() for channel in self.channels}
        """What each engine was asked and has not answered."""
        self.after_loss: Callable[[Connection, WireError], None] = lambda channel, error: None
        """Called when `on_lost` was told of an engine that is gone."""

    def ask_all(self, kind: str, fields: dict[str, Any]) -> dict[Connection, Frame]:
        """The answer of every engine. Blocks until each has answered or its time is up."""
        self.send_all(kind, fields)
        return self.answers(kind)

    def send_all(self, kind: str, fields: dict[str, Any]) -> None:
        """Ask all of them; `answers` takes what they say."""
        for channel in list(self.channels):
            self.send(channel, kind, fields)

    def send(self, channel: Connection, kind: str, fields: dict[str, Any]) -> bool:
        """Ask one of them. False where it is lost."""
        try:
            channel.send(kind, fields, timeout_s=self._sending.timeout_s)
        except WireError as error:
            self._lose(channel, error)
            return False
        self._waiting[channel].append(kind)
        return True

    def answers(self, kind: str) -> dict[Connection, Frame]:
        """The answer of every engine to the oldest question of this kind. Blocks until each has answered or its time is up;
        what one answers with is raised when all have."""
        replies: dict[Connection, Frame] = {}
        failed: list[PeerError] = []
        for channel in list(self.channels):
            try:
                reply = self.receive(channel, kind)
            except PeerError as error:
                failed.append(error)
                continue
            if reply is not None:
                replies[channel] = reply
        if failed:
            raise failed[0]
        return replies

    def receive(self, channel: Connection, kind: str) -> Frame | None:
        """The answer of one engine; None where it is lost."""
        assert self._waiting[channel][0] == kind
        try:
            reply = channel.receive(self._sending.timeout_s)
        except WireTimeout as error:
            channel.close()  # a late answer must not be taken for the next one
            why = f"{channel.name} did not answer {kind!r} of the weights within {self._sending.timeout_s:g} s"
            self._lose(channel, WireTimeout(why, error.hint))
            return None
        except WireError as error:
            self._lose(channel, error)
            return None
        self._waiting[channel].popleft()
        if reply.kind == "error":
            raise peer_error(channel.name, reply)
        return reply

    def tell_each(self, kind: str, fields: dict[str, Any]) -> None:
        """Have every engine that can be reached do something, after what it was asked before. Blocks until each has."""
        for channel in self.channels:
            with suppress(WireError):
                self.drain(channel)
                channel.ask(kind, fields, timeout_s=self._sending.timeout_s)

    def drain(self, channel: Connection) -> None:
        """Take the answers to what was asked before something failed."""
        while self._waiting[channel]:
            try:
                channel.receive(self._sending.timeout_s)
            except WireError:
                channel.close()
                self._waiting[channel].clear()
                raise WireClosed(f"the connection to {channel.name} was closed") from None
            self._waiting[channel].popleft()

    @contextmanager
    def alone(self, channel: Connection) -> Iterator[None]:
        """Ask one that is not among them, and nobody else. It is among them afterwards, unless this raises or it is lost:
        WireClosed then says so."""
        others, self.channels, self._waiting[channel] = self.channels, [channel], deque()
        try:
            yield
            if not self.channels:
                raise WireClosed(f"{channel.name} was lost while it was brought to the present version", "it is started again")
            others = [*others, channel]
        finally:
            self.channels = others

    def _lose(self, channel: Connection, error: WireError) -> None:
        if self._sending.on_lost is None:
            raise error
        channel.close()
        self.channels = [other for other in self.channels if other is not channel]
        self._waiting[channel].clear()
        self._sending.on_lost(channel, error)
        self.after_loss(channel, error)
