"""The host's side of the texts that a device guesses from: which scope has which slot, and what of it is there.

A slot is filled with the newest texts of its scope, a `NO_TOKEN` behind each. What grows afterwards is added at the end: to its
text, where that is the last one there, or else in pieces that begin with the last tokens of the piece before, so that whoever
follows a text to the end of one finds the next. A slot that is full is filled anew.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from redline.engine.native.running.rows import NO_TOKEN, Rows
from redline.engine.native.running.verification import MAX_SLOTS, SLOT_TOKENS, TextWrites
from redline.engine.native.sequence import Sequence as Sequence_
from redline.engine.native.speculation.texts import Scope, Text

OVERLAP = 8
"""Tokens that a piece has in common with the one before."""
PIECE = 16
"""Tokens by which a text has grown before they are sent."""
FILLED = 0.75
"""Share of a slot that may be taken at first; the rest is for what grows."""
NO_SLOT = -1


@dataclass(slots=True, eq=False)
class _Slot:
    index: int
    end: int = 0
    """Tokens that are taken."""
    open: dict[int, tuple[Text, int]] = field(default_factory=dict)
    """By number: texts that may still grow, and how many of their tokens are there."""
    newest: int = -1
    """Number of the last text that was looked at."""
    last: int = -1
    """Number of the text whose tokens are at the end."""
    fills: int = 0
    """How often it was filled from the start."""


class References:
    """Slots for scopes, the one asked for longest ago making room for the next."""

    def __init__(self, rows: Rows, num_slots: int = MAX_SLOTS, num_tokens: int = SLOT_TOKENS) -> None:
        self._rows, self._num_tokens, self._num_slots = rows, num_tokens, num_slots
        self._slots: OrderedDict[Scope, _Slot] = OrderedDict()
        self._told: dict[int, tuple[int, int, int]] = {}
        """Row → its tenant, slot and the slot's filling, as the device knows them."""
        self._fresh: dict[int, list[tuple[int, np.ndarray]]] = {}
        """Slot → where and what the device is told next."""

    def forget(self) -> None:
        """The device has lost everything."""
        self._slots.clear()
        self._told.clear()

    def leave(self) -> None:
        """The rows went on without guesses, and their places are no longer theirs."""
        self._told.clear()

    def writes(self, sequences: Sequence[Sequence_], scopes: Sequence[Scope]) -> TextWrites:
        """What the device must be told before these sequences, at most as many as there are slots, guess from their scopes."""
        self._fresh = {}
        for scope in dict.fromkeys(scopes):
            self._update(scope)
        rows = []
        for sequence, scope in zip(sequences, scopes, strict=True):
            row, slot = sequence.row, self._slots[scope]
            told = (int(self._rows.epoch_R[row]), slot.index, slot.fills)
            if self._told.get(row) != told:
                self._told[row] = told
                rows.append((row, slot.index))
        pieces = [piece for pieces in self._fresh.values() for piece in pieces]
        places = [np.arange(first, first + len(tokens)) for first, tokens in pieces]
        lengths = [(slot.index, slot.end) for slot in self._slots.values() if slot.index in self._fresh]
        return TextWrites(_joined(places, np.int64), _joined([tokens for _, tokens in pieces], np.int32), lengths, rows)

    def _update(self, scope: Scope) -> None:
        slot = self._slots.get(scope)
        if slot is None:
            index = len(self._slots) if len(self._slots) < self._num_slots else self._slots.popitem(last=False)[1].index
            slot = self._slots[scope] = _Slot(index)
            self._fill(slot, scope)
        self._slots.move_to_end(scope)
        if not self._add_grown(slot, scope):
            self._fill(slot, scope)

    def _fill(self, slot: _Slot, scope: Scope) -> None:
        slot.end, slot.last, slot.fills, slot.open = 0, -1, slot.fills + 1, {}
        room = int(self._num_tokens * FILLED)
        self._fresh[slot.index] = []
        chosen = []
        for text in reversed(scope.texts.values()):
            tokens = text.read(self._rows)[-room:] if room > 0 else np.empty(0, np.int32)
            room -= len(tokens) + 1
            chosen.append((text, tokens))
            if room <= 0:
                break
        for text, tokens in reversed(chosen):
            self._put(slot, text, tokens)
            if text.sequence is not None:
                slot.open[text.number] = text, text.num_tokens(self._rows)
        slot.newest = max(scope.texts, default=-1)

    def _add_grown(self, slot: _Slot, scope: Scope) -> bool:
        """Add what has come to a scope. Returns False where there is no room for it."""
        for number in reversed(scope.texts):
            if number <= slot.newest:
                break
            slot.open[number] = scope.texts[number], 0
        slot.newest = max(slot.newest, max(slot.open, default=-1))
        for number, (text, before) in list(slot.open.items()):
            count = text.num_tokens(self._rows)
            if count - before >= PIECE or (text.sequence is None and count > before):
                overlap = 0 if slot.last == number else OVERLAP
                tokens = text.read(self._rows)[max(0, before - overlap) :]
                if slot.end + len(tokens) >= self._num_tokens:
                    return False
                self._put(slot, text, tokens)
                slot.open[number] = text, count
            if text.sequence is None:
                del slot.open[number]
        return True

    def _put(self, slot: _Slot, text: Text, tokens: np.ndarray) -> None:
        """At the end, with a `NO_TOKEN` behind; in the place of that one, where the end is the same text's."""
        if len(tokens):
            begin = slot.end - 1 if slot.last == text.number else slot.end
            first = slot.index * self._num_tokens + begin
            self._fresh.setdefault(slot.index, []).append((first, np.append(tokens, np.int32(NO_TOKEN))))
            slot.end, slot.last = begin + len(tokens) + 1, text.number


def _joined(parts: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0, dtype)
