"""The board of one attempt: asked what is legal, told the orders. A value on a shared game, a value on worker processes, or a
game object of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Protocol

from redline.environments.diplomacy.adjudicator import Adjudicator, LiveGame, Orders
from redline.environments.diplomacy.options import Legal
from redline.environments.diplomacy.position import POWERS, Position

POSITIONS_KEPT = 256
"""Positions whose legal orders and prompts are kept: those where the attempts of the groups under way begin."""


class Board(Protocol):
    """One attempt's game."""

    @property
    def position(self) -> Position: ...

    def legal(self) -> Legal:
        """What each power that has anything to order may order."""
        ...

    async def advance(self, orders: Orders) -> None:
        """Let the phase happen."""
        ...


class Rules:
    """The adjudicator of a process, and what it has said."""

    def __init__(self, *, memoise: bool) -> None:
        self.adjudicator = Adjudicator()
        self.legal = lru_cache(POSITIONS_KEPT)(self.adjudicator.legal) if memoise else self._asked_for_each_power

    def _asked_for_each_power(self, position: Position) -> Legal:
        return asked_for_each_power(lambda: self.adjudicator.legal(position))


class ValueBoard:
    """A position; the game object is shared with all other attempts."""

    def __init__(self, rules: Rules, position: Position) -> None:
        self._rules, self.position = rules, position

    def legal(self) -> Legal:
        return self._rules.legal(self.position)

    async def advance(self, orders: Orders) -> None:
        self.position = self._rules.adjudicator.advance(self.position, orders)


class LiveBoard:
    """A game object of its own."""

    def __init__(self, game: LiveGame, *, memoise: bool) -> None:
        self._game, self._memoise = game, memoise

    @property
    def position(self) -> Position:
        return self._game.position

    def legal(self) -> Legal:
        return self._game.legal() if self._memoise else asked_for_each_power(self._game.legal)

    async def advance(self, orders: Orders) -> None:
        self._game.advance(orders)


def asked_for_each_power(ask: Callable[[], Legal]) -> Legal:
    """The same answer at seven times the cost, as programs get it that ask for a power's orders when its turn comes."""
    answers = {power: ask().get(power) for power in POWERS}
    return {power: options for power, options in answers.items() if options is not None}
