"""The board of one attempt: asked what is legal, told the orders. A value on a shared game, a value on worker processes, or a
game object of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any, Protocol

from redline.environments.diplomacy.adjudicator import Adjudicator, LiveGame, Orders
from redline.environments.diplomacy.options import Legal, Options
from redline.environments.diplomacy.position import POWERS, Position, from_bytes
from redline.environments.workers.held import Workers

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
        self.process(orders)

    def process(self, orders: Orders) -> None:
        self.position = self._rules.adjudicator.advance(self.position, orders)


class WorkerBoard:
    """A position; phases are computed in worker processes, which answer with the next position and what is legal in it."""

    def __init__(self, rules: Rules, position: Position, workers: Workers) -> None:
        self._workers, self.position = workers, position
        self._legal = rules.legal(position)

    def legal(self) -> Legal:
        return self._legal

    async def advance(self, orders: Orders) -> None:
        state, legal = await self._workers.call(f"{__name__}:phase_after", self.position.to_bytes().decode(), orders)
        self.position = from_bytes(state.encode())
        self._legal = {power: Options(*fields) for power, fields in json.loads(legal).items()}


class LiveBoard:
    """A game object of its own."""

    def __init__(self, game: LiveGame, *, memoise: bool) -> None:
        self._game, self._memoise = game, memoise

    @property
    def position(self) -> Position:
        return self._game.position

    def legal(self) -> Legal:
        return self._game.legal() if self._memoise else asked_for_each_power(self._game.legal)

    def copy(self) -> LiveBoard:
        """A board of its own, with all its history."""
        return LiveBoard(self._game.copy(), memoise=self._memoise)

    async def advance(self, orders: Orders) -> None:
        self.process(orders)

    def process(self, orders: Orders) -> None:
        self._game.advance(orders)


def asked_for_each_power(ask: Callable[[], Legal]) -> Legal:
    """The same answer at seven times the cost, as programs get it that ask for a power's orders when its turn comes."""
    answers = {power: ask().get(power) for power in POWERS}
    return {power: options for power, options in answers.items() if options is not None}


# ── in a worker process ────────────────────────────────────────────────────────────────────────────────────────────────


def phase_after(state: str, orders: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """The state after a phase, and what is legal in it as JSON: one text travels faster than the hundreds in it."""
    position = _adjudicator().advance(from_bytes(state.encode()), orders)
    legal: dict[str, Any] = {
        power: [options.kind, options.due, options.by_subject] for power, options in _adjudicator().legal(position).items()
    }
    return position.to_bytes().decode(), json.dumps(legal)


_adjudicator = cache(Adjudicator)
