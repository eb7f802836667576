"""The rules of the game, asked of the package `diplomacy`. Nothing else of redline imports it.

One `Game` serves all attempts of a process: a position is set on it, orders are given, the next position is read. Setting one
takes tens of microseconds, where the package copies a game in hundreds of milliseconds.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from diplomacy import Game

from redline.environments.diplomacy.options import WAIVE, Legal, Options
from redline.environments.diplomacy.position import COMPLETED, POWERS, Holding, Position
from redline.environments.diplomacy.prompts import Province

Orders = Mapping[str, Sequence[str]]
"""Power → its orders, each a legal one. Units without one hold, disband or wait, as the rules say."""


class Adjudicator:
    """Answers what is legal in a position and what follows from orders. Threads may share one: calls wait for each other."""

    def __init__(self) -> None:
        self._game = Game()
        self._loaded: Position | None = None
        self._lock = threading.Lock()

    def start(self) -> Position:
        """The position at the beginning of a game."""
        return read(Game())

    def provinces(self) -> list[Province]:
        """Every place of the map that a unit can be in, by name."""
        board = self._game.map
        provinces = [_province(board, name) for name in sorted({place[:3].upper() for place in board.locs})]
        return [province for province in provinces if province.army or province.fleet]

    def legal(self, position: Position) -> Legal:
        """What each power may order. Takes milliseconds: keep what it returns."""
        with self._lock:
            self._load(position)
            return read_legal(self._game)

    def advance(self, position: Position, orders: Orders) -> Position:
        """The position after the phase."""
        with self._lock:
            self._load(position)
            self._loaded = None  # until the phase is through
            self._loaded = process(self._game, orders)
            return self._loaded

    def svg(self, position: Position, orders: Orders) -> str:
        """The map with these orders drawn, as an SVG document."""
        with self._lock:
            self._load(position)
            self._loaded = None
            give(self._game, orders)
            picture: str = self._game.render(incl_abbrev=True)
            self._game.clear_orders()
            return picture

    def _load(self, position: Position) -> None:
        if self._loaded is not position:
            load(self._game, position)
            self._loaded = position


class LiveGame:
    """A `Game` of its own for one attempt, with all its history: the plain way to play, kept to be measured against."""

    def __init__(self, position: Position | None = None) -> None:
        self._game = Game()
        if position is not None:
            load(self._game, position)

    def copy(self) -> LiveGame:
        """A deep copy, history included."""
        copied = copy.deepcopy(self)
        copied._game.build_caches()  # the copied ones name powers of no game, and every order would be dropped
        return copied

    @property
    def position(self) -> Position:
        return read(self._game)

    def legal(self) -> Legal:
        return read_legal(self._game)

    def advance(self, orders: Orders) -> None:
        for power, given in orders.items():
            self._game.set_orders(power, list(given))
        self._game.process()


def read(game: Any) -> Position:
    """The position that a game stands at."""
    holdings = []
    for name in POWERS:
        power = game.powers[name]
        retreats = tuple((unit, tuple(places)) for unit, places in power.retreats.items())
        holdings.append(Holding(tuple(power.units), tuple(power.centers), tuple(power.influence), retreats))
    return Position(game.get_current_phase(), tuple(holdings), tuple(game.dislodged.items()))


def load(game: Any, position: Position) -> None:
    """Set a game to a position. Its history, orders and caches are emptied; the position's hash, which nothing here asks for,
    is not kept."""
    for history in (game.state_history, game.order_history, game.result_history, game.message_history):
        history.clear()
    game.set_current_phase(position.phase)
    for name, holding in zip(POWERS, position.holdings, strict=True):
        power = game.powers[name]
        power.units, power.centers = list(holding.units), list(holding.centres)
        power.influence = list(holding.influence)
        power.retreats = {unit: list(places) for unit, places in holding.retreats}
        power.orders, power.adjust, power.civil_disorder = {}, [], 0
    game.dislodged = dict(position.dislodged)
    game.popped, game.error, game.outcome, game.result, game.lost = [], [], [], {}, {}
    game.clear_cache()


def give(game: Any, orders: Orders) -> None:
    """Give legal orders, in the package's own spelling: they need no expansion, which is most of what it takes to set them."""
    for power, given in orders.items():
        game.set_orders(power, list(given), expand=False)


def process(game: Any, orders: Orders) -> Position:
    """Give the orders and let the phase happen. Returns the position after it."""
    give(game, orders)
    game.process()
    for history in (game.state_history, game.order_history, game.result_history, game.message_history):
        history.clear()  # or each phase compares its name with those of all earlier ones
    return read(game)


def read_legal(game: Any) -> Legal:
    """What each power may order now, sorted: the package's order differs from process to process."""
    phase = game.get_current_phase()
    if phase == COMPLETED:
        return {}
    possible = game.get_all_possible_orders()
    legal = {}
    for name in POWERS:
        options = _options(game, game.powers[name], phase[-1], possible)
        if options.due:
            legal[name] = options
    return legal


def _options(game: Any, power: Any, kind: str, possible: Mapping[str, Sequence[str]]) -> Options:
    if kind == "M":
        return Options("move", len(power.units), {unit: sorted(possible[unit[2:]]) for unit in sorted(power.units)})
    if kind == "R":
        return Options("retreat", len(power.retreats), {unit: sorted(possible[unit[2:]]) for unit in sorted(power.retreats)})
    missing = len(power.centers) - len(power.units)
    if missing > 0:
        sites = game.get_orderable_locations(power.name)
        builds = {site: sorted(order for order in _all_coasts(possible, site) if order != WAIVE) for site in sites}
        return Options("build", min(missing, len(sites)), builds)
    return Options("disband", -missing, {unit: [f"{unit} D"] for unit in sorted(power.units)} if missing else {})


def _all_coasts(possible: Mapping[str, Sequence[str]], site: str) -> set[str]:
    """Orders at a province and at each of its coasts."""
    return {order for place, orders in possible.items() if place[:3] == site for order in orders}


def _province(board: Any, name: str) -> Province:
    coasts = [place for place in board.find_coasts(name) if "/" in place] or [name]
    places = sorted(place.upper() for place in board.locs)
    army = tuple(place for place in places if "/" not in place and board.abuts("A", name, "-", place))
    fleet = {coast: tuple(place for place in places if board.abuts("F", coast, "-", place)) for coast in coasts}
    return Province(
        name, board.area_type(name).lower(), name in board.scs, army, {coast: goes for coast, goes in fleet.items() if goes}
    )
