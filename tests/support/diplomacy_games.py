"""Diplomacy without a model: random games, and readers of prompts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from redline.environments.diplomacy.options import Legal
from redline.environments.driver import Asked, Reply, Speaker


def random_orders(legal: Legal, rng: random.Random) -> dict[str, list[str]]:
    """Legal orders for every power, now and then one too few."""
    orders = {}
    for power, options in legal.items():
        subjects = rng.sample(list(options.by_subject), min(options.due, len(options.by_subject)))
        given = [rng.choice(options.by_subject[subject]) for subject in subjects if rng.random() < 0.95]
        orders[power] = ["WAIVE", *given[1:]] if options.kind == "build" and rng.random() < 0.2 else given
    return orders


def order_giver(seed: object, legal_share: float = 1.0) -> Speaker:
    """A policy that gives random orders out of those that a compact prompt lists; what follows from the seed, the role and the
    prompt alone."""

    def speak(asked: Asked) -> Reply:
        text = str(asked.messages[-1]["content"])
        rng = random.Random(f"{seed}/{asked.role}/{text}")
        seen = read_compact(text)
        subjects = list(seen.legal)
        if seen.due < len(subjects):
            subjects = rng.sample([subject for subject in subjects if subject != "WAIVE"], seen.due)
        return Reply(
            "\n".join(
                rng.choice(sorted(seen.legal[subject])) if rng.random() < legal_share else "A XXX - YYY" for subject in subjects
            )
        )

    return speak


@dataclass
class Seen:
    """All that a prompt says of the game."""

    phase: str
    units: dict[str, set[str]]
    centres: dict[str, set[str]]
    dislodged: dict[str, dict[str, set[str]]]
    power: str
    kind: str
    due: int
    legal: dict[str, set[str]]


def read_full(text: str) -> Seen:
    """What a prompt in indented JSON says."""
    decoder = json.JSONDecoder()
    board, end = decoder.raw_decode(text)
    own: dict[str, Any] = json.loads(text[end:])
    return Seen(
        board["phase"],
        _sets(board["units"]),
        _sets(board["supply_centers"]),
        {power: _sets(units) for power, units in board["dislodged"].items()},
        own["you_are"],
        own["orders_due"]["kind"],
        own["orders_due"]["count"],
        _sets(own["legal_orders"]),
    )


def _sets(table: dict[str, list[str]]) -> dict[str, set[str]]:
    return {name: set(values) for name, values in table.items()}


def read_compact(text: str) -> Seen:
    """What a compact prompt says."""
    phase, *lines = text.split("\n")
    at = next(place for place, line in enumerate(lines) if line.startswith("You are "))
    seen = Seen(phase, {}, {}, {}, *_own(lines[at:]))
    for line in lines[:at]:
        _read_board_line(line, seen)
    if seen.kind == "":
        seen.kind = "retreat" if phase.endswith("R") else "move"
        seen.due = len(seen.legal)
    return seen


def _words(text: str) -> set[str]:
    return set() if text == "none" else set(text.split())


def _read_board_line(line: str, seen: Seen) -> None:
    if " dislodged " in line:
        power, _, rest = line.partition(" dislodged ")
        unit, _, places = rest.partition(" > ")
        seen.dislodged.setdefault(power, {})[unit] = _words(places)
        return
    power, _, rest = line.partition(": ")
    units, _, centres = rest.partition("; owns ")
    seen.units[power] = set() if units == "none" else set(units.split(", "))
    seen.centres[power] = _words(centres)


def _own(lines: list[str]) -> tuple[str, str, int, dict[str, set[str]]]:
    power, _, rest = lines[0].removeprefix("You are ").partition(". ")
    if rest == "Legal:":
        return power, "", 0, {line.partition(": ")[0]: set(_orders(line)) for line in lines[1:]}
    kind, due, listed = rest.replace(":", "").split(" ", 2)
    legal: dict[str, set[str]] = {"WAIVE": {"WAIVE"}} if kind == "build" else {}
    for unit in listed.split(", "):
        subject = unit[2:5] if kind == "build" else unit
        legal.setdefault(subject, set()).add(f"{unit} {'B' if kind == 'build' else 'D'}")
    return power, kind, int(due), legal


def _orders(line: str) -> Iterator[str]:
    unit, _, rest = line.partition(": ")
    for part in rest.split("; "):
        if part in ("H", "D"):
            yield f"{unit} {part}"
        elif part.startswith("VIA "):
            yield from (f"{unit} - {place} VIA" for place in part[4:].split())
        elif " - " in part:
            head, _, places = part.rpartition(" - ")
            yield from (f"{unit} {head} - {place}" for place in places.split())
        elif part.startswith("S "):
            yield from (f"{unit} S {other}" for other in part[2:].split(", "))
        else:
            yield from (f"{unit} {part[0]} {place}" for place in part[2:].split())
