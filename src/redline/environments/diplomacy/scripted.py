"""A player that needs no model: random legal orders that like to go where supply centres are."""

from __future__ import annotations

import random
from collections.abc import Sequence

from redline.environments.diplomacy.options import Legal, Options
from redline.environments.diplomacy.position import POWERS, Position

_MOVE_TO_CENTRE, _MOVE, _OTHER = 8.0, 2.0, 0.2
"""How likely an order is beside the others of its unit. Uniform play would mostly support: there are more ways to."""


def scripted_orders(position: Position, legal: Legal, centres: frozenset[str], rng: random.Random) -> dict[str, Sequence[str]]:
    """Orders for every power that may order. `centres` are all supply centres of the map."""
    wanted = {power: centres - frozenset(holding.centres) for power, holding in zip(POWERS, position.holdings, strict=True)}
    return {power: _of_power(options, wanted[power], rng) for power, options in legal.items()}


def _of_power(options: Options, wanted: frozenset[str], rng: random.Random) -> Sequence[str]:
    subjects = list(options.by_subject)
    if options.due < len(subjects):
        subjects = rng.sample(subjects, options.due)
    return [_one(options.by_subject[subject], wanted, rng) for subject in subjects]


def _one(orders: Sequence[str], wanted: frozenset[str], rng: random.Random) -> str:
    return rng.choices(orders, [_weight(order, wanted) for order in orders])[0]


def _weight(order: str, wanted: frozenset[str]) -> float:
    words = order.split()
    if words[2] in ("-", "R"):
        return _MOVE_TO_CENTRE if words[3][:3] in wanted else _MOVE
    return _OTHER if words[2] in ("H", "S", "C", "D") else _MOVE
