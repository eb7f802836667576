"""What all workers have in common: classes of which they make objects, and objects that live with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from redline.environments.workers.program import imported


@dataclass(slots=True, frozen=True)
class GameClass:
    """A class, and what its objects are made with."""

    path: str
    """`package.module:Class`."""
    keywords: Mapping[str, Any] = field(default_factory=dict)
    """Plain values: they may have to travel to a process."""
    folder: str | None = None
    """Where its module is, unless it is installed."""
    loaded: Callable[..., Any] | None = None
    """The class, where it was imported already: for games that live in this process."""

    def make(self) -> Any:
        """A new object, in this process."""
        return (self.loaded or imported(self.path, self.folder))(**self.keywords)


class Held(Protocol):
    """An object that lives with a worker. One call at a time."""

    async def call(self, name: str, *arguments: Any) -> Any:
        """What its method of this name returns; raises what it raises, or CallError."""
        ...

    def drop(self) -> None:
        """The object is not needed any more; its `close` is called, where it has one. Does not block."""
        ...


class Workers(Protocol):
    """Runs blocking code for coroutines."""

    async def make(self, game: GameClass) -> Held:
        """Make an object; raises what its class raises, or CallError."""
        ...

    async def call(self, function: str | Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns; one named by import path (`module:function`) may run in another process."""
        ...

    def close(self) -> None:
        """End everything. Calls under way fail. Blocks for some seconds at most."""
        ...
