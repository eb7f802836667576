"""A device for the scheduler that computes nothing and forgets nothing: every slot of its cache holds the tokens that its keys
and values would stand for, so that a block that is read too early, too late or by the wrong sequence shows at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from redline.engine.native.cache.blocks import BlockPool
from redline.engine.native.running.rows import Rows
from redline.engine.native.scheduler import Plan, Scheduler
from redline.engine.native.sequence import Sequence, Stage, Wants
from redline.types import GenerateRequest, SamplingParams

NOBODYS_TOKEN = 999


@dataclass
class Slot:
    """What one token's keys and values depend on."""

    tokens: tuple[int, ...]
    versions: frozenset[int]
    """Of the policies that computed it and what came before it."""


@dataclass
class _Results:
    rows: np.ndarray
    epochs: np.ndarray
    tokens_SB: np.ndarray


def next_token(tokens: list[int], index: int) -> int:
    """The network and the sampler: something that depends on every token before, and on which completion it is."""
    value = index
    for token in tokens:
        value = (value * 31 + token + 7) % 1_000_003
    return value % 11


def alone(sequence: Sequence) -> list[int]:
    """What the sequence samples if nobody else is there."""
    sampling, tokens, sampled = sequence.request.sampling, sequence.request.prompt_ids.tolist(), []
    while len(sampled) < sampling.max_tokens and not (sampled and sampled[-1] in sampling.stop_token_ids):
        sampled.append(next_token(tokens + sampled, sequence.index))
    return sampled


@dataclass
class World:
    """A scheduler with everything around it, stepped as the engine steps it."""

    num_blocks: int = 100
    block_size: int = 4
    num_rows: int = 8
    budget: int = 1000
    prefix_caching: bool = True
    runs_ahead: bool = False
    """Whether a step's tokens are looked at only after the next step was launched."""
    version: int = 0
    slots: dict[tuple[int, int], Slot] = field(default_factory=dict)
    """(block, offset) → content."""
    finished: list[Sequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.num_blocks + 1, self.block_size)
        self.rows = Rows(self.num_rows, 128, 128)
        self.scheduler = Scheduler(
            self.pool,
            self.rows,
            self.budget,
            lambda adapter: f"{self.version}/{adapter or ''}".encode(),
            enable_prefix_caching=self.prefix_caching,
        )
        self._tables: dict[int, dict[int, int]] = {}
        self._tokens: dict[int, list[int]] = {}
        self._alive: set[int] = set()
        self._at_row: dict[int, Sequence] = {}
        self._in_flight: deque[_Results] = deque()
        self._num_requests = 0

    # ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        adapter: str | None = None,
        order: tuple[int, float] = (0, 0.0),
        **sampling: object,
    ) -> list[Sequence]:
        request = GenerateRequest(
            np.array(prompt, np.int32),
            SamplingParams(max_tokens=max_tokens, **sampling),  # type: ignore[arg-type]
            adapter,
            order,
        )
        self._num_requests += 1
        sequences = [
            Sequence(self._num_requests, index, request, 0.0, Wants(), tokens=request.prompt_ids)
            for index in range(request.sampling.n)
        ]
        self.scheduler.add(sequences)
        return sequences

    def abort(self, sequence: Sequence) -> None:
        if sequence.stage is Stage.DECODE:
            self._alive.discard(sequence.row)
            self.scheduler.finish(sequence)
        else:
            self.scheduler.withdraw(sequence)

    def apply(self, version: int) -> None:
        self._collect(keep=0)
        self.version = version
        for sequence in (*self.scheduler.decoding, *self.scheduler.prefilling):
            sequence.cacheable = False

    def suspend(self) -> None:
        """The cache is gone."""
        self._collect(keep=0)
        self.scheduler.suspend()
        self.slots, self._alive = {}, set()

    # ── steps ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def step(self, num_steps: int = 1) -> Plan:
        if not self.scheduler.can_grow(num_steps):
            self._collect(keep=0)
            num_steps = 1
        plan, before = self.scheduler.schedule(num_steps), len(self._in_flight)
        self._launch(plan)
        self._collect(keep=len(self._in_flight) - before if self.runs_ahead else 0)
        self.assert_sound()
        return plan

    def run(self, num_steps: int = 1) -> list[Plan]:
        """Until nothing is left to do."""
        plans = []
        while self.scheduler.has_work:
            plans.append(self.step(num_steps))
            assert len(plans) < 5000, "no end in sight"
        return plans

    def _launch(self, plan: Plan) -> None:
        assert plan.num_steps >= 1
        self._alive -= set(plan.preempted_rows)
        for sequence in plan.admitted:
            row = sequence.row
            assert row not in self._alive, "the row has a tenant"
            self._at_row[row], self._tables[row] = sequence, {}
        for row, place, block in plan.new_blocks:
            assert place not in self._tables[row]
            self._tables[row][place] = block
        if plan.decode:
            self._decode(plan)
        if plan.chunks:
            self._prefill(plan)

    def _decode(self, plan: Plan) -> None:
        rows = [sequence.row for sequence in plan.decode]
        launched = {row: int(self.rows.launched_position_R[row]) for row in rows}
        sampled = [[self._decode_once(row, launched[row]) for row in rows] for _ in range(plan.num_steps)]
        self._expect(rows, sampled)

    def _decode_once(self, row: int, launched_position: int) -> int:
        if row not in self._alive:
            return NOBODYS_TOKEN
        tokens = self._tokens[row]
        assert len(tokens) <= launched_position, "the host does not know how far the device is"
        assert not self.pool.is_shared(self._tables[row][(len(tokens) - 1) // self.block_size]), "others read what it writes"
        self._write(row, tokens, len(tokens) - 1, len(tokens))
        self._read(row, tokens)
        return self._sample(row, tokens)

    def _prefill(self, plan: Plan) -> None:
        for chunk in plan.chunks:
            assert chunk.start < chunk.end <= len(chunk.sequence.tokens)
            self._write(chunk.sequence.row, chunk.sequence.tokens.tolist(), chunk.start, chunk.end)
        for chunk in plan.chunks:
            self._read(chunk.sequence.row, chunk.sequence.tokens[: chunk.end].tolist())
            if chunk.sequence in plan.admitted:
                found = [self._slot(chunk.sequence.row, position) for position in range(chunk.start)]
                assert all(slot.versions == {self.version} for slot in found), "keys and values of another policy"
        for source, target in plan.copies:
            for offset in range(self.block_size):
                if (source, offset) in self.slots:
                    self.slots[target, offset] = self.slots[source, offset]
        samplers = [(sequence, chunk.sequence) for chunk in plan.chunks for sequence in chunk.samplers]
        sampled = []
        for sequence, leader in samplers:
            self._alive.add(sequence.row)
            self._tokens[sequence.row] = leader.tokens.tolist()
            self._read(sequence.row, self._tokens[sequence.row])
            sampled.append(self._sample(sequence.row, self._tokens[sequence.row]))
        if sampled:
            self._expect([sequence.row for sequence, _ in samplers], [sampled])

    def _write(self, row: int, tokens: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            before = self._slot(row, position - 1).versions if position else frozenset()
            block = self._tables[row][position // self.block_size]
            self.slots[block, position % self.block_size] = Slot(tuple(tokens[: position + 1]), before | {self.version})

    def _read(self, row: int, tokens: list[int]) -> None:
        for position in range(len(tokens)):
            assert self._slot(row, position).tokens == tuple(tokens[: position + 1]), "another sequence's keys and values"

    def _slot(self, row: int, position: int) -> Slot:
        return self.slots[self._tables[row][position // self.block_size], position % self.block_size]

    def _sample(self, row: int, tokens: list[int]) -> int:
        sequence = self._at_row[row]
        sampling = sequence.request.sampling
        token = next_token(tokens, sequence.index)
        tokens.append(token)
        if token in sampling.stop_token_ids or len(tokens) - sequence.num_prompt >= sampling.max_tokens:
            self._alive.discard(row)
        return token

    # ── what comes back ────────────────────────────────────────────────────────────────────────────────────────────────

    def _expect(self, rows: list[int], sampled: list[list[int]]) -> None:
        at = np.array(rows)
        self._in_flight.append(_Results(at, self.rows.epoch_R[at], np.array(sampled, np.int32)))

    def _collect(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            results = self._in_flight.popleft()
            tenants = self.rows.epoch_R[results.rows] == results.epochs
            for tokens in results.tokens_SB:
                self.rows.append(results.rows, results.epochs, tokens, np.zeros(len(tokens), np.float32))
            for row in results.rows[tenants].tolist():
                if not self.rows.alive_R[row]:
                    self.finished.append(self._at_row[row])
                    self.scheduler.finish(self._at_row[row])

    # ── what must always be so ─────────────────────────────────────────────────────────────────────────────────────────

    def holders(self) -> Iterator[Sequence]:
        yield from self.scheduler.decoding
        for leader in self.scheduler.prefilling:
            yield from (leader, *leader.followers)

    def assert_sound(self) -> None:
        held = [block for sequence in self.holders() for block in sequence.blocks]
        assert self.pool.num_used == len(set(held))
        assert all(self.pool.is_shared(block) == (held.count(block) > 1) for block in set(held))
        rows = [sequence.row for sequence in self.holders()]
        assert len(set(rows)) == len(rows) <= self.num_rows
        assert min(rows, default=0) >= 0

    def assert_empty(self) -> None:
        """No row and no block is held."""
        self._collect(keep=0)
        assert not self.scheduler.has_work
        assert self.pool.num_used == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert not self._alive
        assert sorted(self.scheduler._free_rows) == list(range(self.num_rows))
