"""From a reply to orders: what can be read as a legal order counts, everything else does not."""

from __future__ import annotations

import re
from dataclasses import dataclass

from redline.environments.diplomacy.options import WAIVE, Options

_WORDS = {
    "ARMY": "A",
    "FLEET": "F",
    "HOLD": "H",
    "HOLDS": "H",
    "SUPPORT": "S",
    "SUPPORTS": "S",
    "CONVOY": "C",
    "CONVOYS": "C",
    "RETREAT": "R",
    "RETREATS": "R",
    "DISBAND": "D",
    "DISBANDS": "D",
    "BUILD": "B",
    "BUILDS": "B",
    "TO": "-",
}
_LIST_MARK = re.compile(r"^\s*(?:[-*•]|\d+[.)])\s+")
_ARROW = re.compile(r"\s*(?:->|=>|→|–|—|-)\s*")
_NOISE = str.maketrans("", "", "`*\"'.()[]:<>")


@dataclass(slots=True, frozen=True)
class Reading:
    """What a reply gave."""

    orders: tuple[str, ...]
    """Legal orders, at most one per unit or site and no more than are due."""
    expected: int
    """Orders that are due; or, where the reply has more lines than that, its lines."""

    @property
    def faults(self) -> int:
        """Orders that are missing, and lines that are no legal order or one too many: expected less legal ones."""
        return self.expected - len(self.orders)


def read_orders(text: str, options: Options) -> Reading:
    """The legal orders in a reply of one order per line. The first legal order of a unit counts."""
    orders: list[str] = []
    taken: set[str] = set()
    lines = _lines(text)
    for line in lines:
        order = _spelled(line)
        subject = f"{WAIVE} {len(orders)}" if order == WAIVE and options.kind == "build" else options.subject_of.get(order)
        if subject is not None and subject not in taken and len(orders) < options.due:
            taken.add(subject)
            orders.append(order)
    return Reading(tuple(orders), max(options.due, len(lines)))


def _lines(text: str) -> list[str]:
    """What may be an order each: lines, and what commas and semicolons separate, without those that say nothing."""
    return [line for line in re.split(r"[\n;,]", text) if any(letter.isalnum() for letter in line)]


def _spelled(line: str) -> str:
    """The line as the game spells orders: `army Par -> Bur.` is `A PAR - BUR`."""
    line = _ARROW.sub(" - ", _LIST_MARK.sub("", line)).translate(_NOISE)
    words = [_WORDS.get(word, word) for word in line.upper().split()]
    return " ".join(words)
