"""Requests from event loops: each loop is woken once for all the pieces that one step of the engine brings it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

from redline.errors import EngineError
from redline.ports import Session
from redline.types import Delta, GenerateRequest

Piece = Delta | Exception


class LoopReceivers:
    """A receiver for each event loop that has requests under way."""

    def __init__(self) -> None:
        self._receivers: dict[asyncio.AbstractEventLoop, _LoopReceiver] = {}

    def of_this_loop(self) -> _LoopReceiver:
        loop = asyncio.get_running_loop()
        receiver = self._receivers.get(loop)
        if receiver is None:
            receiver = self._receivers[loop] = _LoopReceiver(loop)
        return receiver

    def forget_idle(self, receiver: _LoopReceiver) -> None:
        if not receiver.queues:
            self._receivers.pop(receiver.loop, None)


class _LoopReceiver:
    """Takes pieces in the engine's thread and puts them into the queues of its event loop. Implements `ports.Receiver`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.queues: dict[int, asyncio.Queue[Piece]] = {}
        """By the number of the request; only the loop's own thread changes it."""

    def receive(self, pieces: Sequence[tuple[int, Piece]]) -> None:
        with suppress(RuntimeError):  # a caller whose loop is closed has no use for it
            self.loop.call_soon_threadsafe(self._put_all, pieces)

    def _put_all(self, pieces: Sequence[tuple[int, Piece]]) -> None:
        for number, piece in pieces:
            if number in self.queues:
                self.queues[number].put_nowait(piece)


async def pieces(session: Session, loops: LoopReceivers, request: GenerateRequest, *, streaming: int) -> AsyncGenerator[Delta]:
    """Pieces of a request until all its completions are whole. Leaving it before aborts the request."""
    receiver = loops.of_this_loop()
    # Pieces reach this loop in a later callback of it, when the queue is there.
    number = session.submit(request, receiver, streaming=streaming)
    queue = receiver.queues[number] = asyncio.Queue()
    missing = request.sampling.n
    try:
        while missing:
            piece = await queue.get()
            if isinstance(piece, Exception):
                missing = 0
                raise piece
            missing -= piece.completion is not None
            yield piece
    finally:
        del receiver.queues[number]
        loops.forget_idle(receiver)
        if missing:
            with suppress(EngineError):  # it has stopped: there is nothing to abort
                session.abort(number)
