"""Texts of sequences that grow, without an engine."""

from __future__ import annotations

import numpy as np

from redline.engine.native.running.rows import Rows
from redline.engine.native.sequence import Sequence, Stage, Wants
from redline.engine.native.speculation.texts import Text, Texts
from redline.types import GenerateRequest, SamplingParams

PROMPT = np.arange(100, 110, dtype=np.int32)


class World:
    """Rows, and sequences that grow in them."""

    def __init__(self, **limits: int) -> None:
        self.rows = Rows(8, 512, 8)
        self.texts = Texts(self.rows, **limits)

    def begin(self, row: int, key: bytes = b"task", prompt: np.ndarray = PROMPT) -> Text:
        request = GenerateRequest(prompt, SamplingParams(256))
        sequence = Sequence(0, 0, request, 0.0, Wants(), tokens=prompt)
        sequence.begin(row)
        self.rows.enter(sequence)
        sequence.stage = Stage.DECODE
        return self.texts.begin(key, sequence)

    def grow(self, text: Text, *tokens: int) -> None:
        assert text.sequence is not None
        row = text.sequence.row
        for token in tokens:
            self.rows.tokens_RN[row, self.rows.sampled_R[row]] = token
            self.rows.sampled_R[row] += 1

    def what_follows(self, text: Text, count: int = 4) -> list[int]:
        self.texts.index([text.scope])
        [place] = self.texts.find([text])
        return [] if place is None else self.texts.slice(place.text, place.offset, place.offset + count)

    def end(self, text: Text) -> None:
        sequence = text.sequence
        assert sequence is not None
        sequence.sampled, sequence.stage = self.rows.take(sequence.row), Stage.FINISHED
        self.rows.leave(sequence)
        self.texts.end(text)
