"""Calls in the event loop itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from redline.environments.workers.held import GameClass
from redline.environments.workers.program import closed, imported


class LoopWorkers:
    """Makes calls in the event loop itself: for code that never waits. Implements `Workers`."""

    async def make(self, game: GameClass) -> HeldInLoop:
        return HeldInLoop(game.make())

    async def call(self, function: str | Callable[..., Any], *arguments: Any) -> Any:
        return (imported(function, None) if isinstance(function, str) else function)(*arguments)

    def close(self) -> None:
        """Nothing is to end."""


class HeldInLoop:
    """Implements `Held`."""

    __slots__ = ("_game",)

    def __init__(self, game: Any) -> None:
        self._game = game

    async def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._game, name)(*arguments)

    def drop(self) -> None:
        closed(self._game)
