"""What of which text a device has to guess from."""

from __future__ import annotations

import numpy as np
from support.growing_texts import World

from redline.engine.native.speculation.references import FILLED, OVERLAP, PIECE, References
from redline.engine.native.speculation.texts import Text

SLOT = 256


class Device:
    """Slots as a device has them, written as it is told."""

    def __init__(self, world: World) -> None:
        self._references = References(world.rows, num_slots=4, num_tokens=SLOT)
        self._tokens = np.full(4 * SLOT, -1)
        self._ends: dict[int, int] = {}

    def update(self, *texts: Text) -> None:
        sequences = [text.sequence for text in texts if text.sequence is not None]
        writes = self._references.writes(sequences, [text.scope for text in texts])
        assert len(set(writes.places_W.tolist())) == len(writes.places_W), "no place is written twice at once"
        self._tokens[writes.places_W] = writes.tokens_W
        self._ends |= dict(writes.lengths)

    def texts(self, slot: int = 0) -> list[list[int]]:
        """What is there, a list for each piece."""
        tokens = self._tokens[slot * SLOT : slot * SLOT + self._ends[slot]].tolist()
        assert tokens[-1] == -1
        ends = [index for index, token in enumerate(tokens) if token == -1]
        return [tokens[begin:end] for begin, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]


def test_a_text_that_grows_alone_stays_in_one_piece() -> None:
    world = World()
    device, text = Device(world), world.begin(0)
    for begin in range(0, 90, 30):
        world.grow(text, *range(begin, begin + 30))
        device.update(text)
    prompt, own = device.texts()
    assert prompt == text.scope.prompt_ids.tolist()
    assert own == [*text.lead.tolist(), *range(90)]


def test_texts_that_grow_in_turn_come_in_pieces_that_overlap() -> None:
    world = World()
    device, first, second = Device(world), world.begin(0), world.begin(1)
    for begin in (0, 20):
        world.grow(first, *range(begin, begin + 20))
        world.grow(second, *range(100 + begin, 120 + begin))
        device.update(first, second)
    assert device.texts()[-2:] == [list(range(20 - OVERLAP, 40)), list(range(120 - OVERLAP, 140))]


def test_a_few_tokens_are_not_worth_sending() -> None:
    world = World()
    device, text = Device(world), world.begin(0)
    world.grow(text, *range(30))
    device.update(text)
    world.grow(text, *range(30, 30 + PIECE - 1))
    device.update(text)
    assert device.texts()[-1][-1] == 29
    world.grow(text, 77)
    device.update(text)
    assert device.texts()[-1][-1] == 77


def test_a_slot_that_is_full_is_filled_with_the_newest_tokens() -> None:
    world = World()
    device, text = Device(world), world.begin(0)
    for begin in range(0, 240, 40):
        world.grow(text, *range(begin, begin + 40))
        device.update(text)
    assert device.texts()[-1][-1] == 239
    assert len(device.texts()[-1]) <= SLOT
    assert len(device.texts()[-1]) >= int(SLOT * FILLED)
