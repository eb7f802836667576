"""Requests from event loops: each loop is woken once for all the pieces that one step of the engine brings it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress

import numpy as np

from redline.errors import EngineError
from redline.ports import Session
from redline.types import Delta, GenerateRequest, TopLogprobs

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
        if not receiver.boxes:
            self._receivers.pop(receiver.loop, None)


class _LoopReceiver:
    """Takes pieces in the engine's thread and puts them into the boxes of its event loop. Implements `ports.Receiver`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.boxes: dict[int, _Box] = {}
        """By the number of the request; only the loop's own thread changes it."""

    def receive(self, pieces: Sequence[tuple[int, Piece]]) -> None:
        with suppress(RuntimeError):  # a caller whose loop is closed has no use for it
            self.loop.call_soon_threadsafe(self._put_all, pieces)

    def _put_all(self, pieces: Sequence[tuple[int, Piece]]) -> None:
        boxes = self.boxes
        for number, piece in pieces:
            box = boxes.get(number)
            if box is not None:
                box.put(piece)


class _Box:
    """The pieces of one request that its reader has not taken yet. For the loop's own thread."""

    __slots__ = ("_loop", "_pieces", "_reader")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pieces: list[Piece] = []
        self._reader: asyncio.Future[None] | None = None

    def put(self, piece: Piece) -> None:
        self._pieces.append(piece)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def take(self) -> list[Piece]:
        """All there are, at least one."""
        if not self._pieces:
            self._reader = self._loop.create_future()
            await self._reader
        taken, self._pieces = self._pieces, []
        return taken


async def pieces(session: Session, loops: LoopReceivers, request: GenerateRequest, *, streaming: int) -> AsyncGenerator[Delta]:
    """Pieces of a request until all its completions are whole. A reader that is slower than the engine gets what has come of a
    completion meanwhile as one piece. Leaving it before the end aborts the request."""
    receiver = loops.of_this_loop()
    # Pieces reach this loop in a later callback of it, when the box is there.
    number = session.submit(request, receiver, streaming=streaming)
    box = receiver.boxes[number] = _Box(receiver.loop)
    missing = request.sampling.n
    try:
        while missing:
            for piece in joined(await box.take()):
                if isinstance(piece, Exception):
                    missing = 0
                    raise piece
                missing -= piece.completion is not None
                yield piece
    finally:
        del receiver.boxes[number]
        loops.forget_idle(receiver)
        if missing:
            with suppress(EngineError):  # it has stopped: there is nothing to abort
                session.abort(number)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """One piece for each completion, in the order of their first; what is no piece comes last."""
    if len(pieces) == 1:
        return list(pieces)
    by_index: dict[int, list[Delta]] = {}
    errors: list[Piece] = []
    for piece in pieces:
        if isinstance(piece, Exception):
            errors.append(piece)
        else:
            by_index.setdefault(piece.index, []).append(piece)
    return [own[0] if len(own) == 1 else _whole(own) for own in by_index.values()] + errors


def _whole(own: Sequence[Delta]) -> Delta:
    tops = [piece.top_logprobs for piece in own if piece.top_logprobs is not None]
    return Delta(
        own[0].index,
        np.concatenate([piece.token_ids for piece in own]),
        np.concatenate([piece.logprobs for piece in own]),
        _all_tops(tops) if tops else None,
        own[-1].completion,
    )


def _all_tops(tops: Sequence[TopLogprobs]) -> TopLogprobs:
    return TopLogprobs(np.concatenate([top.token_ids for top in tops]), np.concatenate([top.logprobs for top in tops]))
