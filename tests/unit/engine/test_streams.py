"""Pieces in an event loop: one wake-up for a step, and whatever came meanwhile as one piece."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from redline.engine.streams import LoopReceivers, joined, pieces
from redline.errors import EngineError
from redline.ports import Receiver
from redline.types import Completion, Delta, FinishReason, GenerateRequest, SamplingParams, TopLogprobs, VersionSpan

REQUEST = GenerateRequest(np.array([1, 2], np.int32), SamplingParams(max_tokens=9, n=2))


class FakeSession:
    """Remembers who receives."""

    def __init__(self) -> None:
        self.aborted: list[int] = []

    def submit(self, request: GenerateRequest, receiver: Receiver, *, streaming: int = 0) -> int:
        self.receiver = receiver
        return 7

    def abort(self, number: int) -> None:
        self.aborted.append(number)


def delta(index: int, *tokens: int, ends: bool = False, top: bool = False) -> Delta:
    ids, logprobs = np.array(tokens, np.int32), -np.array(tokens, np.float32)
    whole = Completion(ids, logprobs, FinishReason.STOP, VersionSpan(0, 0), 0, 0, 0) if ends else None
    return Delta(index, ids, logprobs, TopLogprobs(ids[:, None], logprobs[:, None]) if top else None, whole)


def shown(piece: Delta) -> tuple[int, list[int], list[float], bool]:
    return piece.index, piece.token_ids.tolist(), piece.logprobs.tolist(), piece.completion is not None


def test_a_reader_that_keeps_up_gets_every_piece_and_one_that_does_not_gets_them_together() -> None:
    async def read() -> list[tuple[int, list[int], list[float], bool]]:
        found = []
        stream = pieces(session, LoopReceivers(), REQUEST, streaming=1)  # type: ignore[arg-type]
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        session.receiver.receive([(7, delta(0, 5)), (7, delta(1, 6))])
        found.append(shown(await reading))
        found.append(shown(await anext(stream)))
        for step in ([(7, delta(0, 8)), (7, delta(1, 9, ends=True))], [(7, delta(0, 10, 11))], [(7, delta(0, 12, ends=True))]):
            session.receiver.receive(step)
            await asyncio.sleep(0)
        found += [shown(piece) async for piece in stream]
        return found

    session = FakeSession()
    assert asyncio.run(read()) == [
        (0, [5], [-5.0], False),
        (1, [6], [-6.0], False),
        (0, [8, 10, 11, 12], [-8.0, -10.0, -11.0, -12.0], True),
        (1, [9], [-9.0], True),
    ]
    assert session.aborted == []


def test_what_came_before_a_failure_is_read_first() -> None:
    async def read() -> None:
        stream = pieces(session, LoopReceivers(), REQUEST, streaming=1)  # type: ignore[arg-type]
        reading = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        session.receiver.receive([(7, delta(0, 5)), (7, EngineError("lost", "start it"))])
        assert shown(await reading)[1] == [5]
        with pytest.raises(EngineError, match="lost"):
            await anext(stream)

    session = FakeSession()
    asyncio.run(read())
    assert session.aborted == []


def test_the_likeliest_tokens_of_pieces_are_put_together() -> None:
    [whole] = joined([delta(0, 5, top=True), delta(0, 6, 7, top=True, ends=True)])
    assert isinstance(whole, Delta)
    assert whole.top_logprobs is not None
    assert whole.top_logprobs.token_ids.tolist() == [[5], [6], [7]]
    assert whole.top_logprobs.logprobs.tolist() == [[-5.0], [-6.0], [-7.0]]
    assert whole.completion is not None
