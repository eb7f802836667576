"""Two spellings of one prompt: what one says the other says, in fewer tokens."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("diplomacy")

from support.diplomacy_games import Seen, random_orders, read_compact, read_full
from tokenizers import Tokenizer

from redline.environments.diplomacy.adjudicator import Adjudicator
from redline.environments.diplomacy.options import Legal
from redline.environments.diplomacy.position import POWERS, Position
from redline.environments.diplomacy.prompts import board_text, own_text, system_text
from redline.models.files.sources import cached_folder

ADJUDICATOR = Adjudicator()


def positions() -> list[tuple[Position, Legal]]:
    """Of a game until every kind of phase has come, retreats and disbands included."""
    rng, position, found, kinds = random.Random(11), ADJUDICATOR.start(), [], set()
    while len(kinds) < 4 or len(found) < 30:
        legal = ADJUDICATOR.legal(position)
        found.append((position, legal))
        kinds |= {options.kind for options in legal.values()}
        position = ADJUDICATOR.advance(position, random_orders(legal, rng))
    return found


POSITIONS = positions()


def prompt(position: Position, legal: Legal, power: str, *, compact: bool) -> str:
    return f"{board_text(position, compact=compact)}\n{own_text(power, legal[power], compact=compact)}"


def truth(position: Position, legal: Legal, power: str) -> Seen:
    options = legal[power]
    orders = {subject: set(orders) for subject, orders in options.by_subject.items()}
    return Seen(
        position.phase,
        {name: set(position.of(name).units) for name in POWERS},
        {name: set(position.of(name).centres) for name in POWERS},
        {
            name: {unit: set(places) for unit, places in position.of(name).retreats}
            for name in POWERS
            if position.of(name).retreats
        },
        power,
        options.kind,
        options.due,
        orders | ({"WAIVE": {"WAIVE"}} if options.kind == "build" else {}),
    )


def test_both_prompts_say_all_there_is_and_the_same() -> None:
    asked = [(position, legal, power) for position, legal in POSITIONS for power in legal]
    assert {legal[power].kind for _, legal, power in asked} == {"move", "retreat", "build", "disband"}
    for position, legal, power in asked:
        said = truth(position, legal, power)
        assert read_full(prompt(position, legal, power, compact=False)) == said
        assert read_compact(prompt(position, legal, power, compact=True)) == said


def test_both_maps_say_the_same() -> None:
    provinces = ADJUDICATOR.provinces()
    text = system_text(provinces, compact=True)
    lines = {line.split()[0].rstrip("*;"): line for line in text.partition("fleets go.\n")[2].splitlines()}
    assert set(lines) == {province.name for province in provinces}
    assert len(lines) == 75
    for province in provinces:
        head, *moves = lines[province.name].split("; ")
        assert head == f"{province.name}{'*' if province.is_centre else ''} {province.kind}"
        read = {part.split()[0]: tuple(part.split()[1:]) for part in moves}
        assert read.pop("A", ()) == province.army
        assert read == {f"F{place[3:]}": goes for place, goes in province.fleet.items()}


def test_compact_saves_more_than_half_of_the_tokens(users_cache: None) -> None:
    folder = cached_folder("builtin:smollm2-135m-instruct")
    if folder is None:
        pytest.skip("the tokenizer of SmolLM2 is not in the cache")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))

    def tokens(*, compact: bool) -> tuple[int, int]:
        prompts = [prompt(position, legal, power, compact=compact) for position, legal in POSITIONS[:12] for power in legal]
        system = system_text(ADJUDICATOR.provinces(), compact=compact)
        return len(tokenizer.encode(system).ids), sum(len(encoding.ids) for encoding in tokenizer.encode_batch(prompts))

    full, compact = tokens(compact=False), tokens(compact=True)
    assert compact[0] < 0.4 * full[0]
    assert compact[1] < 0.5 * full[1]


def test_powers_share_the_board_and_phases_the_rules() -> None:
    position, legal = POSITIONS[0]
    board = board_text(position, compact=True)
    assert all(prompt(position, legal, power, compact=True).startswith(board) for power in legal)
    assert not any(power in system_text(ADJUDICATOR.provinces(), compact=True) for power in POWERS)
