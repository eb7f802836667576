"""The environments that ship, by name. Nothing is imported here: `redline env list` needs none of their packages."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class Shipped:
    """An environment that a recipe may name."""

    path: str
    """`package.module:Class`, called as `Class(seed=..., **params)`; an `Environment`, or a `Game` that is made anew for each
    attempt."""
    what: str
    """One line for a list."""
    extra: str | None = None
    """The extra that brings what it imports."""


ENVIRONMENTS: dict[str, Shipped] = {
    "code": Shipped(
        "redline.environments.code.environment:Code", "answers are programs, run in a sandbox against tests; several tries"
    ),
    "diplomacy": Shipped(
        "redline.environments.diplomacy.environment:Diplomacy", "self-play of seven powers on the standard map", "diplomacy"
    ),
}
