"""The loop in simulated time. Engines decode rows that share their steps, rollouts begin groups as the buffer allows, the
trainer takes batches, new weights pause the engines.

    admit (buffer.admission) ─► engines, least loaded first ─► environment, reward ─► ready ─► trainer ─► sync ─► next version

Between two events every row of an engine advances at the same rate, 1 / (step_s + row_s · rows) tokens a second. An engine
therefore needs one clock of tokens and a heap of the tokens at which rows end: an event costs the logarithm of the rows,
however long the answers are.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random

import numpy as np

from redline.buffer.admission import must_wait_of, num_urgent_of, room
from redline.errors import ConfigError
from redline.lab.simulate.costs import EngineCost
from redline.lab.simulate.recorded import Group

_MOST_FAILURES = 20
"""Losses of each engine for every step."""
_SOON_S = 1.0
"""An engine that owes more than this is being started again."""


@dataclass(slots=True, frozen=True)
class Loop:
    """What is simulated."""

    groups: tuple[Group, ...]
    engine: EngineCost
    engines: int
    rows: int
    """Rows of each engine."""
    groups_per_step: int
    max_lag: int
    train_s: float
    """Seconds per sampled token of a batch that is trained on."""
    step_s: float
    """Seconds of a training step however small it is, and of everything else in the main thread."""
    sync_s: float
    steps: int
    begin_s: float = 0.0
    """Seconds that the host takes to begin an attempt, one after the other; those that it begins together get to the engines
    together."""
    slower: float = 1.0
    """Times that trainer and engines each take while both are at work, over what they take alone."""
    failure_every_s: float = 0.0
    """Mean time between two losses of an engine; 0: never."""
    recovery_s: float = 60.0
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    step_s: list[float] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    """The lag of every group that was trained on."""
    trainer_waits_s: float = 0.0
    busy_s: float = 0.0
    """Seconds of all engines with at least one row."""
    failures: int = 0

    @property
    def seconds(self) -> float:
        return float(np.sum(self.step_s))


@dataclass(slots=True)
class _Attempt:
    group: int
    tokens: int
    after_s: float
    """For environment and reward, once it is sampled."""
    prompt_s: float


class _Engine:
    """Rows that share the steps of one engine."""

    def __init__(self, cost: EngineCost, rows: int) -> None:
        self.cost, self.most = cost, rows
        self.rows: list[tuple[float, int]] = []
        """(token at which it ends, attempt): a heap."""
        self.waiting: deque[int] = deque()
        self.tokens = 0.0
        """That a row which was there from the beginning would have."""
        self.now = 0.0
        self.owes_s = 0.0
        """Seconds before any row advances: prompts, new weights, a restart."""
        self.slowed = 1.0
        self.epoch = 0
        """Counts what makes an announced end wrong."""

    @property
    def load(self) -> int:
        return len(self.rows) + len(self.waiting)

    def token_s(self) -> float:
        return self.cost.decode_s(len(self.rows)) * self.slowed

    def advance(self, now: float) -> float:
        """Let the time pass; returns how much of it the engine was at work."""
        passed, self.now = now - self.now, now
        paid = min(passed, self.owes_s)
        self.owes_s -= paid
        if self.rows:
            self.tokens += (passed - paid) / self.token_s()
        return passed if self.rows else paid

    def next_end(self) -> float | None:
        """When the next row ends, if nothing else happens."""
        if not self.rows:
            return None
        return self.now + self.owes_s + max(0.0, self.rows[0][0] - self.tokens) * self.token_s()


class Simulator:
    """Runs one loop."""

    def __init__(self, loop: Loop) -> None:
        self.loop, self.outcome = loop, Outcome()
        self._draw = Random(loop.seed)
        self._engines = [_Engine(loop.engine, loop.rows) for _ in range(loop.engines)]
        self._attempts: list[_Attempt] = []
        self._open: dict[int, list[int]] = {}
        """Group → attempts left, the version it was begun at, its tokens."""
        self._under_way: Counter[int] = Counter()
        self._ready: dict[int, deque[int]] = {}
        """Version → tokens of the groups that are ready."""
        self._num_ready = self._num_groups = self._leased = 0
        self._events: list[tuple[float, int, str, int, int]] = []
        self._num_events = 0
        self._version = 0
        self._trains = False
        self._beginning: dict[int, range] = {}
        """First of the attempts that the host is beginning → all of them."""
        self._host_until = 0.0
        """When the host has begun those."""
        self.now = self._step_began = self._waits_since = 0.0

    def run(self) -> Outcome:
        """Simulate all steps. Blocks until they are done. Raises `ConfigError` where engines are lost before attempts end."""
        if self.loop.failure_every_s:
            self._at(self._draw.expovariate(1 / self.loop.failure_every_s), "failure", 0)
        self._admit()
        self._take_batch()
        while self._version < self.loop.steps:
            time, _, what, which, epoch = heapq.heappop(self._events)
            if what == "row" and self._engines[which].epoch != epoch:
                continue
            self.now = time
            getattr(self, f"_on_{what}")(which)
        return self.outcome

    # ── events ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _at(self, time: float, what: str, which: int, epoch: int = 0) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time, self._num_events, what, which, epoch))

    def _on_row(self, which: int) -> None:
        """The first row of an engine ends."""
        engine = self._engines[which]
        self.outcome.busy_s += engine.advance(self.now)
        while engine.rows and engine.rows[0][0] <= engine.tokens + 1e-6:
            _, index = heapq.heappop(engine.rows)
            after_s = self._attempts[index].after_s
            if after_s > 0:
                self._at(self.now + after_s, "scored", index)
            else:
                self._on_scored(index)
        self._fill(which)

    def _on_scored(self, index: int) -> None:
        group = self._open[self._attempts[index].group]
        group[0] -= 1
        if group[0]:
            return
        _, version, tokens = self._open.pop(self._attempts[index].group)
        self._under_way[version] -= 1
        self._ready.setdefault(version, deque()).append(tokens)
        self._num_ready += 1
        self._take_batch()

    def _on_trained(self, which: int) -> None:
        self._trains = False
        self._leased = 0
        self._version += 1
        self.outcome.step_s.append(self.now - self._step_began)
        self._step_began = self._waits_since = self.now
        for index, engine in enumerate(self._engines):
            self.outcome.busy_s += engine.advance(self.now)
            engine.slowed = 1.0
            engine.owes_s += self.loop.sync_s
            self._announce(index)
        self._host_until = max(self._host_until, self.now + self.loop.sync_s)  # what is begun is begun with the new weights
        self._admit()
        self._take_batch()

    def _on_failure(self, which: int) -> None:
        """A random engine is lost: its rows begin again elsewhere, and it is back after a while."""
        self.outcome.failures += 1
        if self.outcome.failures > _MOST_FAILURES * len(self._engines) * (self._version + 1):
            raise ConfigError(
                f"engines would be lost more than {_MOST_FAILURES} times a step: attempts hardly ever end",
                "give a larger failure_every_h",
            )
        lost = self._draw.randrange(len(self._engines))
        engine = self._engines[lost]
        self.outcome.busy_s += engine.advance(self.now)
        again = [index for _, index in engine.rows] + list(engine.waiting)
        engine.rows, engine.owes_s = [], engine.owes_s + self.loop.recovery_s
        engine.waiting.clear()
        self._submit(again)
        self._at(self.now + self._draw.expovariate(1 / self.loop.failure_every_s), "failure", 0)

    # ── rollouts ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self) -> None:
        loop = self.loop
        alive = self._under_way.total() + self._num_ready + self._leased
        target = (loop.max_lag + 1) * loop.groups_per_step
        wanted = room(alive, target, loop.max_lag, loop.groups_per_step, loop.steps - self._version)
        begun = [self._begin(group) for group in self._drawn(wanted)]
        if not begun:
            return
        attempts = range(begun[0].start, begun[-1].stop)
        self._host_until = max(self.now, self._host_until) + loop.begin_s * len(attempts)
        self._beginning[attempts.start] = attempts
        if loop.begin_s:
            self._at(self._host_until, "begun", attempts.start)
        else:
            self._on_begun(attempts.start)

    def _on_begun(self, first: int) -> None:
        self._submit(self._beginning.pop(first))

    def _drawn(self, count: int) -> list[Group]:
        """So many that were recorded one after the other: what held one of them up may have held up its neighbours, too."""
        if not count:
            return []
        groups = self.loop.groups
        are_whole_steps = len(groups) % count == 0
        first = count * self._draw.randrange(len(groups) // count) if are_whole_steps else self._draw.randrange(len(groups))
        return [groups[(first + place) % len(groups)] for place in range(count)]

    def _begin(self, group: Group) -> range:
        """Begin a group; returns its attempts."""
        index = self._num_groups
        self._num_groups += 1
        self._open[index] = [len(group.tokens), self._version, sum(group.tokens)]
        self._under_way[self._version] += 1
        for place, (tokens, after_s) in enumerate(zip(group.tokens, group.environment_s, strict=True)):
            prompt = group.again_tokens if place else group.prompt_tokens
            self._attempts.append(_Attempt(index, tokens, after_s, prompt * self.loop.engine.prompt_token_s))
        return range(len(self._attempts) - len(group.tokens), len(self._attempts))

    def _submit(self, attempts: Iterable[int]) -> None:
        """Give each attempt to the engine with the least to do, those that are back in a while only where no other is there."""
        is_lost = [engine.owes_s > self.loop.sync_s + _SOON_S for engine in self._engines]
        loads = [(is_lost[place], engine.load, place) for place, engine in enumerate(self._engines)]
        heapq.heapify(loads)
        for index in attempts:
            lost, load, place = loads[0]
            self._engines[place].waiting.append(index)
            heapq.heapreplace(loads, (lost, load + 1, place))
        for place in range(len(self._engines)):
            self._fill(place)

    def _fill(self, which: int) -> None:
        """Give free rows to those that wait, and announce when the next row ends."""
        engine = self._engines[which]
        self.outcome.busy_s += engine.advance(self.now)
        if engine.waiting and len(engine.rows) < engine.most:
            engine.owes_s += engine.cost.pass_s
        while engine.waiting and len(engine.rows) < engine.most:
            index = engine.waiting.popleft()
            attempt = self._attempts[index]
            engine.owes_s += attempt.prompt_s
            heapq.heappush(engine.rows, (engine.tokens + attempt.tokens, index))
        self._announce(which)

    def _announce(self, which: int) -> None:
        engine = self._engines[which]
        engine.epoch += 1
        end = engine.next_end()
        if end is not None:
            self._at(end, "row", which, engine.epoch)

    # ── trainer ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _take_batch(self) -> None:
        """Begin to train where a batch is ready and no group under way would grow too old."""
        loop = self.loop
        if self._trains or self._num_ready < loop.groups_per_step or self._version >= loop.steps:
            return
        if loop.max_lag and must_wait_of(self._under_way, self._version, loop.max_lag, loop.groups_per_step):
            return
        tokens = self._chosen()
        self._trains, self._leased = True, loop.groups_per_step
        self.outcome.trainer_waits_s += self.now - self._waits_since
        seconds = loop.step_s + loop.train_s * tokens
        if loop.slower > 1 and any(engine.rows for engine in self._engines):
            seconds = self._slow_down(seconds)
        self._at(self.now + seconds, "trained", 0)
        self._admit()

    def _slow_down(self, seconds: float) -> float:
        """Trainer and engines share a device, or a machine: each takes longer while both work."""
        for index, engine in enumerate(self._engines):
            self.outcome.busy_s += engine.advance(self.now)
            engine.slowed = self.loop.slower
            self._announce(index)
        return self.loop.slower * seconds

    def _chosen(self) -> int:
        """Take a batch out of what is ready, as `buffer.selection` does; returns its tokens."""
        loop, version = self.loop, self._version
        ages = Counter({begun: len(groups) for begun, groups in self._ready.items()}) + self._under_way
        urgent = num_urgent_of(ages, version, loop.max_lag, loop.groups_per_step) if loop.max_lag else 0
        by_age = [begun for begun in sorted(self._ready) for _ in self._ready[begun]]
        in_turn = by_age[:urgent] + sorted(by_age[urgent:], reverse=True)
        return sum(self._take(begun) for begun in in_turn[: loop.groups_per_step])

    def _take(self, begun: int) -> int:
        tokens = self._ready[begun].popleft()
        if not self._ready[begun]:
            del self._ready[begun]
        self._num_ready -= 1
        self.outcome.lags.append(self._version - begun)
        return tokens
