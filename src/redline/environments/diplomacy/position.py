"""The board as a value: what a game needs to go on, and nothing of how it came there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from redline.errors import TaskError

POWERS = ("AUSTRIA", "ENGLAND", "FRANCE", "GERMANY", "ITALY", "RUSSIA", "TURKEY")
"""In the order of the standard map."""
COMPLETED = "COMPLETED"
"""The phase of a game that is over."""
SOLO = 18
"""Supply centres that win the game."""


@dataclass(slots=True, frozen=True)
class Holding:
    """What one power has. The order inside each tuple is the game's own: it decides between equal candidates."""

    units: tuple[str, ...] = ()
    """`A PAR`, `F STP/SC`; dislodged ones are not among them."""
    centres: tuple[str, ...] = ()
    influence: tuple[str, ...] = ()
    """Provinces that this power was the last to enter."""
    retreats: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Dislodged units, each with the places it may retreat to."""


@dataclass(slots=True, frozen=True)
class Position:
    """A board between two phases. Two equal positions go on alike under the same orders."""

    phase: str
    """`S1901M`: season, year, kind (Movement, Retreats, Adjustments); or `COMPLETED`."""
    holdings: tuple[Holding, ...]
    """One per power, in the order of POWERS."""
    dislodged: tuple[tuple[str, str], ...] = ()
    """Dislodged units and where each was attacked from."""

    @property
    def is_over(self) -> bool:
        return self.phase == COMPLETED

    @property
    def kind(self) -> str:
        """M movement, R retreats, A adjustments, D when the game is over."""
        return self.phase[-1]

    @property
    def year(self) -> int:
        """The year of the phase; not to be asked when the game is over."""
        return int(self.phase[1:5])

    def of(self, power: str) -> Holding:
        return self.holdings[POWERS.index(power)]

    def centres(self) -> Mapping[str, int]:
        """Power → supply centres that it owns."""
        return {power: len(holding.centres) for power, holding in zip(POWERS, self.holdings, strict=True)}

    def ownership(self) -> tuple[frozenset[str], ...]:
        """Which centres belong to whom, in whatever order they were won."""
        return tuple(frozenset(holding.centres) for holding in self.holdings)

    def to_bytes(self) -> bytes:
        """The position as a text of eight lines: phase and attackers, then a line per power."""
        first = self.phase + "|" + ",".join(f"{unit}<{site}" for unit, site in self.dislodged)
        return "\n".join([first, *(_holding_line(holding) for holding in self.holdings)]).encode()


def from_bytes(state: bytes) -> Position:
    """The position that `to_bytes` wrote. Raises TaskError where the bytes are none."""
    try:
        first, *lines = state.decode().split("\n")
        phase, attackers = first.split("|")
        dislodged = tuple((unit, site) for unit, _, site in (pair.partition("<") for pair in _items(attackers)))
        holdings = tuple(_holding(line) for line in lines)
    except ValueError as error:
        raise TaskError(f"these {len(state)} bytes are no position of Diplomacy: {error}", "make the states anew") from None
    if len(holdings) != len(POWERS) or not phase:
        raise TaskError(f"a position of Diplomacy has {len(POWERS)} powers, not {len(holdings)}", "make the states anew")
    return Position(phase, holdings, dislodged)


def _holding_line(holding: Holding) -> str:
    retreats = ",".join(f"{unit}>{' '.join(places)}" for unit, places in holding.retreats)
    return "|".join([",".join(holding.units), ",".join(holding.centres), ",".join(holding.influence), retreats])


def _holding(line: str) -> Holding:
    units, centres, influence, retreats = line.split("|")
    pairs = (pair.partition(">") for pair in _items(retreats))
    return Holding(
        _items(units), _items(centres), _items(influence), tuple((unit, tuple(places.split())) for unit, _, places in pairs)
    )


def _items(text: str) -> tuple[str, ...]:
    return tuple(text.split(",")) if text else ()
