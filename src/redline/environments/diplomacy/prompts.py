"""What a power is shown: the rules and the map, the same for everyone in every phase; then the board; then its own orders.

In that order the prefix cache computes the rules once for all games, and the board once for the seven powers of a phase. There
are two spellings of the same facts: JSON with names, indented, as programs usually write it; and `compact`, which says every
fact once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from redline.environments.diplomacy.options import WAIVE, Options
from redline.environments.diplomacy.position import POWERS, SOLO, Position

RULES = f"""You play Diplomacy. Seven powers order their units at the same time; {SOLO} of the 34 supply centres win.
Orders, A is an army and F a fleet:
A PAR H = hold
A PAR - BUR = move
A LON - BEL VIA = move by convoy
A PAR S A MAR = support a unit that stays
A PAR S A MAR - BUR = support a move
F NTH C A LON - BEL = convoy
A PAR R GAS = retreat
A PAR D = disband
A PAR B = build
{WAIVE} = do not build
A move succeeds with more support than whatever else wants the place or holds it. Who stands on a centre after fall owns it.
Reply with your orders only, one per line, one for each of your units; a unit without a legal order holds.
"""


@dataclass(slots=True, frozen=True)
class Province:
    """A place on the map, for the prompt."""

    name: str
    kind: str
    """land, coast or water."""
    is_centre: bool
    army: tuple[str, ...]
    """Places an army can go to from here."""
    fleet: Mapping[str, tuple[str, ...]]
    """Coast, or the place itself → places a fleet can go to from there."""


def system_text(provinces: Sequence[Province], *, compact: bool) -> str:
    """The rules, and the map where provinces are given."""
    if not provinces:
        return RULES
    if not compact:
        return RULES + "Map:\n" + json.dumps({p.name: _full_province(p) for p in provinces}, indent=2)
    lines = "\n".join(_compact_province(province) for province in provinces)
    return f"{RULES}Map, a line per place: * is a centre, A where armies go from there, F where fleets go.\n{lines}"


def board_text(position: Position, *, compact: bool) -> str:
    """Phase, units, centres and dislodged units of all powers."""
    return _compact_board(position) if compact else json.dumps(_full_board(position), indent=2)


def own_text(power: str, options: Options, *, compact: bool) -> str:
    """Who is asked, and the legal orders."""
    if not compact:
        return json.dumps(_full_own(power, options), indent=2)
    if options.kind in ("build", "disband"):
        what = "B" if options.kind == "build" else "D"
        units = (order.removesuffix(f" {what}") for orders in options.by_subject.values() for order in orders)
        return f"You are {power}. {options.kind} {options.due}: {', '.join(units)}"
    lines = (_compact_subject(subject, orders) for subject, orders in options.by_subject.items())
    return f"You are {power}. Legal:\n" + "\n".join(lines)


# ── compact ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _compact_province(province: Province) -> str:
    star = "*" if province.is_centre else ""
    parts = [f"{province.name}{star} {province.kind}"]
    if province.army:
        parts.append(f"A {' '.join(province.army)}")
    for place, goes in province.fleet.items():
        parts.append(f"F{place[3:]} {' '.join(goes)}")
    return "; ".join(parts)


def _compact_board(position: Position) -> str:
    lines = [position.phase]
    for power, holding in zip(POWERS, position.holdings, strict=True):
        units = ", ".join(sorted(holding.units)) or "none"
        lines.append(f"{power}: {units}; owns {' '.join(sorted(holding.centres)) or 'none'}")
        for unit, places in sorted(holding.retreats):
            lines.append(f"{power} dislodged {unit} > {' '.join(sorted(places)) or 'none'}")
    return "\n".join(lines)


def _compact_subject(subject: str, orders: Sequence[str]) -> str:
    """`A PAR: H; - BUR PIC; VIA LON; S A MAR, F BRE; S A MAR - BUR GAS; C A LON - BEL`: targets of one kind stand together."""
    ends: list[str] = []
    held: list[str] = []
    moved: dict[str, list[str]] = {}
    for order in orders:
        rest = order[len(subject) + 1 :]
        head, dash, place = rest.rpartition(" - ") if " - " in rest else ("", "", "")
        if rest.startswith("- "):
            kind = "VIA" if rest.endswith(" VIA") else "-"
            moved.setdefault(kind, []).append(rest[2:].removesuffix(" VIA"))
        elif rest.startswith("R "):
            moved.setdefault("R", []).append(rest[2:])
        elif dash:
            moved.setdefault(f"{head} -", []).append(place)
        elif rest.startswith("S "):
            held.append(rest[2:])
        else:
            ends.append(rest)
    parts = [*ends, *(f"{kind} {' '.join(places)}" for kind, places in moved.items())]
    if held:
        parts.insert(len(ends), f"S {', '.join(held)}")
    return f"{subject}: {'; '.join(parts)}"


# ── full ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _full_province(province: Province) -> dict[str, Any]:
    return {
        "type": province.kind,
        "supply_center": province.is_centre,
        "army_moves": list(province.army),
        "fleet_moves": {place: list(goes) for place, goes in province.fleet.items()},
    }


def _full_board(position: Position) -> dict[str, Any]:
    return {
        "phase": position.phase,
        "units": {power: sorted(position.of(power).units) for power in POWERS},
        "supply_centers": {power: sorted(position.of(power).centres) for power in POWERS},
        "dislodged": {
            power: {unit: sorted(places) for unit, places in sorted(position.of(power).retreats)}
            for power in POWERS
            if position.of(power).retreats
        },
    }


def _full_own(power: str, options: Options) -> dict[str, Any]:
    return {
        "you_are": power,
        "orders_due": {"kind": options.kind, "count": options.due},
        "legal_orders": dict(_full_legal(options)),
    }


def _full_legal(options: Options) -> Iterator[tuple[str, list[str]]]:
    for subject, orders in options.by_subject.items():
        yield subject, list(orders)
    if options.kind == "build":
        yield WAIVE, [WAIVE]
