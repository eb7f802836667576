"""Which requests may come in, and whose turn it is.

A request takes a place once its body has arrived, and the place grows with the choices it asks for. Where the waiting room is
full, it is turned away with 429 and a `Retry-After`. Inside, prompts wait for rows of the engine's batch, and requests take
turns: one with many prompts does not go before one that came after it, and leaves some rows for those that have none. A prompt
with many choices begins with the rows that are free and takes the others as they come: no newcomer waits until all of them are.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass

from redline.serve.requests.protocol import ApiError

KEPT_SHARE = 16
"""One row in so many is kept for requests that have none."""
LONGEST_RETRY_S = 60


class Place:
    """One request inside."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._since = time.monotonic()
        self.choices = 1
        self.held = 0
        """Rows."""

    def grow(self, choices: int) -> None:
        """It asks for so many choices. Raises `ApiError` where there is no room for them."""
        self._admission.refuse_beyond(choices - self.choices)
        self._admission.inside += choices - self.choices
        self.choices = choices

    def leave(self) -> None:
        """Give the place to others; more than once does no harm."""
        if self.choices:
            self._admission.left(self.choices, time.monotonic() - self._since)
            self.choices = 0

    async def take(self, most: int, least: int = 1) -> int:
        """Wait for rows of the batch. Returns how many it got, from `least` to `most`; `give` gives them back."""
        return await self._admission.take(self, most, least)

    def give(self, count: int) -> None:
        """Give rows to others."""
        self._admission.give(self, count)


class Admission:
    """The admission of one event loop."""

    def __init__(self, rows: int, max_queued: int) -> None:
        self.inside = 0
        """Choices of all requests that have a place."""
        self._rows = rows
        self._free = rows
        self._max_inside = rows + max_queued
        self._waiting: dict[Place, deque[_Wait]] = {}
        """In order of turns."""
        self._choice_s = 1.0
        """About how long a choice takes, of late."""

    def enter(self) -> Place:
        """Raises `ApiError` where there is no room."""
        self.refuse_beyond(1)
        self.inside += 1
        return Place(self)

    def left(self, choices: int, seconds: float) -> None:
        self.inside -= choices
        self._choice_s += 0.1 * (seconds - self._choice_s)

    def refuse_beyond(self, more: int) -> None:
        if self.inside + more <= self._max_inside:
            return
        waiting_s = self._choice_s * (self.inside + more - self._rows) / self._rows
        retry = max(1, min(LONGEST_RETRY_S, math.ceil(waiting_s)))
        raise ApiError(
            429,
            f"the server is busy: {self.inside} choices are under way, and at most {self._max_inside} may be; try again in"
            f" {retry} s",
            code="rate_limit_exceeded",
            headers={"retry-after": str(retry)},
        )

    # ── rows ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    async def take(self, place: Place, most: int, least: int) -> int:
        """Wait for rows, in turn; returns how many there were."""
        wait = _Wait(most, least, asyncio.get_running_loop().create_future())
        self._waiting.setdefault(place, deque()).append(wait)
        self._grant()
        try:
            return await wait.turn
        except asyncio.CancelledError:
            if wait.turn.done() and not wait.turn.cancelled():
                self.give(place, wait.turn.result())
            else:
                self._withdraw(place, wait)
            raise

    def give(self, place: Place, count: int) -> None:
        place.held -= count
        self._free += count
        self._grant()

    def _grant(self) -> None:
        while (place := self._next()) is not None:
            waits = self._waiting.pop(place)
            wait = waits.popleft()
            if waits:
                self._waiting[place] = waits  # behind the others
            if wait.turn.cancelled():
                continue
            count = min(wait.most, self._room(place))
            self._free -= count
            place.held += count
            wait.turn.set_result(count)

    def _next(self) -> Place | None:
        """The request whose turn it is. None overtakes one that has no row yet; one that has some may be, while it waits."""
        for place, waits in self._waiting.items():
            if waits[0].least <= self._room(place):
                return place
            if not place.held:
                return None
        return None

    def _room(self, place: Place) -> int:
        """Rows that it may have now."""
        return self._free - (self._rows // KEPT_SHARE if place.held else 0)

    def _withdraw(self, place: Place, wait: _Wait) -> None:
        left = deque(other for other in self._waiting.pop(place, ()) if other is not wait)
        if left:
            self._waiting[place] = left
        self._grant()


@dataclass(slots=True, frozen=True, eq=False)
class _Wait:
    """A wish for a place, for from `least` to `most` rows."""

    most: int
    least: int
    turn: asyncio.Future[int]
    """How many it got."""
