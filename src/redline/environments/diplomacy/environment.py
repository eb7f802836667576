"""The policy plays all seven powers of a game of Diplomacy."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from redline.environments.diplomacy.adjudicator import LiveGame
from redline.environments.diplomacy.boards import POSITIONS_KEPT, Board, LiveBoard, Rules, ValueBoard, WorkerBoard
from redline.environments.diplomacy.options import Options
from redline.environments.diplomacy.orders import read_orders
from redline.environments.diplomacy.position import POWERS, SOLO, Position, from_bytes
from redline.environments.diplomacy.prompts import board_text, own_text, system_text
from redline.environments.diplomacy.scripted import scripted_orders
from redline.environments.diplomacy.settings import Settings
from redline.environments.states import StateCache
from redline.environments.workers.processes import ProcessWorkers
from redline.errors import BudgetError
from redline.ports import Policy
from redline.types import Message, Task

T = TypeVar("T")

STATE_KIND = "diplomacy 1, standard map"
"""Goes up when `Position.to_bytes` changes."""
WARM_PHASES = 24
"""Most phases that a script plays to make a state for a file, where `warm_up` says nothing."""
CALL_LIMIT_S = 60.0
"""Seconds for a worker process to compute a phase; it takes milliseconds."""
FIRST_PHASE = "S1901M"
TRIES_PER_START = 20
"""Scripted games, for each held-out game that is asked for, among which one is looked for."""
STATES_PER_GAME = 12
"""States of a file that come of one scripted game: each by itself would play its way there alone."""


@dataclass(slots=True)
class Seat:
    """One power of one attempt."""

    messages: list[Message]
    legal: int = 0
    """Legal orders that it gave."""
    expected: int = 0
    """Orders that it should have given."""


@dataclass(slots=True)
class Years:
    """Counts the years in which no centre changed hands."""

    year: int
    ownership: tuple[frozenset[str], ...]
    quiet: int = field(default=0)

    def look(self, position: Position) -> None:
        """Take in the position after a phase."""
        if position.is_over or position.year == self.year:
            return
        ownership = position.ownership()
        self.quiet = self.quiet + 1 if ownership == self.ownership else 0
        self.year, self.ownership = position.year, ownership


class Diplomacy:
    """A game of seven roles. Implements `ports.Environment`, brings its own tasks, and can make a file of states.

    The reward of a power has four parts: `centres`, the supply centres that it gained; `illegal`, minus the share of its orders
    that were missing or not legal; `eliminated`, -1 when it has nothing left; `won`, 1 when it owns 18 centres.
    """

    def __init__(self, seed: int = 0, **params: Any) -> None:
        self.settings = Settings.of(params)
        self._seed = seed
        self._rules = Rules(memoise=self.settings.memoise)
        self._provinces = self._rules.adjudicator.provinces()
        self._centres = frozenset(province.name for province in self._provinces if province.is_centre)
        self._states = self._open_states()
        self._workers = ProcessWorkers(self.settings.workers, CALL_LIMIT_S) if self.settings.workers else None
        if self.settings.keep_prompts:
            self._system = lru_cache(1)(self._system)  # type: ignore[method-assign]
            self._board_text = lru_cache(POSITIONS_KEPT)(self._board_text)  # type: ignore[method-assign]
        self._movement_phases = lru_cache(1)(self._movement_phases)  # type: ignore[method-assign]
        if self.settings.memoise:
            self._scripted = lru_cache(POSITIONS_KEPT)(self._scripted)  # type: ignore[method-assign]

    # ── tasks ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def train(self, index: int) -> Task:
        """Where training game `index` begins. With `warm_up` a script plays there, which takes milliseconds for each phase."""
        rng = random.Random(f"{self._seed}/train/{index}")
        start = rng.randrange(self._states.num_train) if self._states else rng.getrandbits(48)
        while not self._states and self._is_held_out(start):
            start = rng.getrandbits(48)
        return _task(f"diplomacy-{index}", start)

    def held_out(self, count: int) -> Sequence[Task]:
        """At most `count` games that begin where no training game does, each at a position of its own. With neither `states`
        nor `warm_up` there is one start, and they are told apart from training games by their names alone."""
        if self._states:
            first, last = self._states.num_train, min(len(self._states), self._states.num_train + count)
            return [_task(f"diplomacy-held-out-{start}", start) for start in range(first, last)]
        if not self.settings.warm_up:
            return [_task(f"diplomacy-held-out-{index}", -1 - index) for index in range(count)]
        found: dict[Position, int] = {}
        for start in range(-1, -1 - TRIES_PER_START * count, -1):
            if len(found) == count:
                break
            if self._is_held_out(start):
                found.setdefault(self._scripted(start, self.settings.warm_up), start)
        return [_task(f"diplomacy-held-out-{index}", start) for index, start in enumerate(found.values())]

    def _is_held_out(self, start: int) -> bool:
        """Whether the position that a script comes to is kept for evaluation: half of all are, by their content, so that few
        have to be drawn again. The beginning of a game is trained on."""
        if not self.settings.warm_up:
            return False
        position = self._scripted(start, self.settings.warm_up)
        if position.phase == FIRST_PHASE:
            return False
        return hashlib.blake2b(position.to_bytes(), digest_size=1).digest()[0] < 128

    def fingerprint(self) -> str:
        """A text that changes when the states of the file do; empty without a file."""
        if not self._states:
            return ""
        digest = hashlib.blake2b(f"{STATE_KIND}/{self._states.num_train}".encode(), digest_size=16)
        for index in range(len(self._states)):
            digest.update(self._states[index] + b"/")
        return digest.hexdigest()

    @property
    def state_kind(self) -> str:
        return STATE_KIND

    def make_state(self, seed: int) -> bytes:
        """A position at a movement phase of a game that a script has played, up to `warm_up` phases into it, or up to 24. Seeds
        that follow each other give the phases of one game."""
        game, place = divmod(seed, STATES_PER_GAME)
        phases = self._movement_phases(game)
        return phases[place % len(phases)].to_bytes()

    # ── an attempt ─────────────────────────────────────────────────────────────────────────────────────────────────────

    async def play(self, task: Task, policy: Policy) -> Mapping[str, Mapping[str, float]]:
        """Play from the task's position to the horizon, or until the recipe's budget of turns or tokens is used up. Returns the
        parts of the reward of each power that was asked."""
        board = self._board(task)
        start = board.position
        years = Years(start.year, start.ownership())
        seats: dict[str, Seat] = {}
        phase = 0
        while not self._is_over(board.position, start, phase, years):
            try:
                await self._play_phase(board, seats, policy)
            except BudgetError:
                break  # the phase does not happen: nobody's units are ordered by half of a reply
            years.look(board.position)
            phase += 1
        end = board.position
        return {power: _reward(seats[power], power, start, end) for power in POWERS if power in seats}

    def close(self) -> None:
        """End the worker processes. Blocks for some seconds at most."""
        if self._workers is not None:
            self._workers.close()

    @property
    def num_worker_processes(self) -> int | None:
        """Worker processes that take calls now; None where everything runs in this process."""
        return self._workers.num_running if self._workers else None

    async def _play_phase(self, board: Board, seats: dict[str, Seat], policy: Policy) -> None:
        position, legal = board.position, board.legal()
        asked = []
        for power, options in legal.items():
            seat = seats.setdefault(power, Seat([]))
            asked.append(self._ask(power, options, position, seat, policy))
        given = await _together(asked) if self.settings.gather else [await question for question in asked]
        await board.advance(dict(zip(legal, given, strict=True)))

    async def _ask(self, power: str, options: Options, position: Position, seat: Seat, policy: Policy) -> Sequence[str]:
        """The legal orders in the power's reply, read as soon as it is there."""
        if not self.settings.conversation or not seat.messages:
            seat.messages = [{"role": "system", "content": self._system()}]
        own = own_text(power, options, compact=self.settings.compact)
        if self.settings.suggest:
            own += f"\nReply like this:\n{self._suggestion(position, power, options)}"
        seat.messages.append({"role": "user", "content": f"{self._board_text(position)}\n{own}"})
        room = self.settings.tokens_per_order * (options.due + 1)
        turn = await policy.say(seat.messages, role=power, max_tokens=room)
        seat.messages.append(turn.message)
        reading = read_orders(turn.text, options)
        seat.legal += len(reading.orders)
        seat.expected += reading.expected
        return reading.orders

    def _is_over(self, position: Position, start: Position, phase: int, years: Years) -> bool:
        limits = self.settings
        if position.is_over or (limits.phases and phase >= limits.phases):
            return True
        return position.year >= start.year + limits.years or bool(limits.quiet_years and years.quiet >= limits.quiet_years)

    # ── where it begins, and what is shown ─────────────────────────────────────────────────────────────────────────────

    def _board(self, task: Task) -> Board:
        if self.settings.clone == "deepcopy":
            return self._live_board(task).copy()
        position = self.start(task)
        if self._workers is not None:
            return WorkerBoard(self._rules, position, self._workers)
        return ValueBoard(self._rules, position)

    def _live_board(self, task: Task) -> LiveBoard:
        """A game object at the task's position, which has played its way there unless the position is of a file."""
        if self._states:
            return LiveBoard(LiveGame(self.start(task)), memoise=self.settings.memoise)
        board = LiveBoard(LiveGame(), memoise=self.settings.memoise)
        position = self._walk(board, int(task.data["start"]), self.settings.warm_up)
        return board if board.position == position else LiveBoard(LiveGame(position), memoise=self.settings.memoise)

    def start(self, task: Task) -> Position:
        """Where a task's game begins."""
        start = int(task.data["start"])
        if self._states:
            return from_bytes(self._states[start])
        return self._scripted(start, self.settings.warm_up)

    def _scripted(self, seed: int, most_phases: int) -> Position:
        return self._walk(self._first_board(), seed, most_phases)

    def _walk(self, board: ValueBoard | LiveBoard, seed: int, most_phases: int) -> Position:
        """Let a script play up to so many phases on the board, and on to the next movement phase. Returns that position, or the
        last movement phase where the game ends before."""
        phases = random.Random(f"{self._seed}/phases/{seed}").randint(0, most_phases)
        found = None
        for place, position in enumerate(self._script(seed, board)):
            found = position if position.kind == "M" or found is None else found
            if place >= phases and found is position:
                break
        assert found is not None, "a game begins with a movement phase"
        return found

    def _movement_phases(self, game: int) -> Sequence[Position]:
        """The movement phases of the scripted game with this seed, as far as states are made of it."""
        phases = itertools.islice(self._script(game, self._first_board()), self.settings.warm_up or WARM_PHASES)
        return [position for position in phases if position.kind == "M"]

    def _first_board(self) -> ValueBoard:
        return ValueBoard(self._rules, self._rules.adjudicator.start())

    def _script(self, seed: int, board: ValueBoard | LiveBoard) -> Iterator[Position]:
        """The positions of a game that a script plays on the board, until it is over."""
        rng = random.Random(f"{self._seed}/script/{seed}")
        while not (position := board.position).is_over:
            yield position
            board.process(scripted_orders(position, board.legal(), self._centres, rng))

    def _open_states(self) -> StateCache | None:
        if not self.settings.states:
            return None
        path = self.settings.states
        return StateCache(Path(path), STATE_KIND, f"redline env warm diplomacy --states 1000 --out {path}")

    def _system(self) -> str:
        return system_text(self._provinces if self.settings.show_map else (), compact=self.settings.compact)

    def _suggestion(self, position: Position, power: str, options: Options) -> str:
        """Orders of the script, a line each; the same for all attempts at this position."""
        rng = random.Random(f"{self._seed}/{power}/{position.phase}/{position.of(power)}")
        return "\n".join(scripted_orders(position, {power: options}, self._centres, rng)[power])

    def _board_text(self, position: Position) -> str:
        return board_text(position, compact=self.settings.compact)


async def _together(questions: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them return. When one fails the others are cancelled, so that none goes on without its attempt."""
    tasks = [asyncio.ensure_future(question) for question in questions]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _task(name: str, start: int) -> Task:
    return Task(name, [{"role": "user", "content": f"A game of Diplomacy, from start {start}."}], data={"start": start})


def _reward(seat: Seat, power: str, start: Position, end: Position) -> dict[str, float]:
    now = end.of(power)
    return {
        "centres": float(len(now.centres) - len(start.of(power).centres)),
        "illegal": (seat.legal - seat.expected) / seat.expected if seat.expected else 0.0,
        "eliminated": 0.0 if now.centres or now.units or now.retreats else -1.0,
        "won": 1.0 if len(now.centres) >= SOLO else 0.0,
    }
