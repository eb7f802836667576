"""What the next step computes: which sequences decode, which prompts advance, who waits and who gives way.

    submit ──► WAITING ──rows and blocks are free──► PREFILL ──last chunk──► DECODE ──► FINISHED
                  ▲                                    └─ its n-1 FOLLOWING ─┘ │
                  └────────────────── preempted: blocks given back ────────────┘

Every step first gives one token to each decoding sequence, then spends what is left of `max_num_batched_tokens` on chunks of
prompts, by `GenerateRequest.order` and in order of arrival. When the cache is full, the sequence that came last gives its
blocks back and is computed again later; what it has sampled is kept. Nothing here touches a tensor, so the same decisions fall
on every device and every rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress, islice

import numpy as np

from redline.engine.native.cache.blocks import BlockPool, block_keys
from redline.engine.native.running.rows import Rows
from redline.engine.native.sequence import NO_ROW, Sequence, Stage


@dataclass(slots=True)
class Chunk:
    """Tokens [start, end) of a sequence, to be put through the network."""

    sequence: Sequence
    start: int
    end: int
    samplers: list[Sequence] = field(default_factory=list)
    """Where it is the last chunk: the sequences that sample their next token after it."""

    @property
    def is_last(self) -> bool:
        return self.end == len(self.sequence.tokens)


@dataclass(slots=True)
class Plan:
    """One step."""

    decode: list[Sequence] = field(default_factory=list)
    rows_B: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """Of those that decode."""
    num_steps: int = 1
    """Tokens each decoding sequence advances by."""
    chunks: list[Chunk] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that got a row in this step."""
    preempted_rows: list[int] = field(default_factory=list)
    new_blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """(row, place in its table, block)."""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """(from, to): blocks to copy after the chunks are computed, for sequences that part ways inside a block."""
    drafts: dict[Sequence, list[int]] = field(default_factory=dict)
    """Tokens that decoding sequences may sample next, to be verified in this step."""
    guesses: dict[Sequence, int] = field(default_factory=dict)
    """Tokens that the device is to guess for decoding sequences in each step."""


@dataclass(slots=True)
class SchedulerCounts:
    """Since the engine was made."""

    preemptions: int = 0
    prefix_query_tokens: int = 0
    """Prompt tokens looked up in the prefix cache."""
    prefix_hit_tokens: int = 0
    """Prompt tokens that did not have to be computed."""


class Scheduler:
    """Rows, blocks and queues."""

    def __init__(
        self,
        pool: BlockPool,
        rows: Rows,
        max_num_batched_tokens: int,
        salt_of: Callable[[str | None], bytes],
        *,
        enable_prefix_caching: bool,
    ) -> None:
        self.pool = pool
        self.waiting: deque[Sequence] = deque()
        """Each the leader of its request, or preempted."""
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        """In order of admission."""
        self._decoding_rows: np.ndarray | None = None
        self.counts = SchedulerCounts()
        self._rows = rows
        self._free_rows = list(range(len(rows.alive_R) - 1, -1, -1))
        self._max_num_batched_tokens = max_num_batched_tokens
        self._salt_of = salt_of
        """Adapter → what the hashes of blocks computed now begin with: the policy version and the adapter's."""
        self._prefix_caching = enable_prefix_caching
        self.prompts_at_once: int | None = None
        """Prompts that a step may compute; None leaves it to the budget."""
        self.is_crowded = False
        """The last step had no room for all the prompts that could have run. While that is so, sequences that decode already
        should not be many steps ahead: a step of few rows costs almost as much as one of many."""

    @property
    def num_waiting(self) -> int:
        return sum(1 + len(leader.followers) for leader in self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.decoding) + sum(1 + len(leader.followers) for leader in self.prefilling)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.prefilling or self.decoding)

    @property
    def decoding_rows(self) -> np.ndarray:
        """int64: those of `decoding`."""
        if self._decoding_rows is None:
            self._decoding_rows = np.array([sequence.row for sequence in self.decoding], np.int64)
        return self._decoding_rows

    def _decode(self, sequences: list[Sequence]) -> None:
        self.decoding += sequences
        self._decoding_rows = None

    def _decode_no_more(self, sequence: Sequence) -> None:
        self.decoding.remove(sequence)
        self._decoding_rows = None

    # ── the next step ──────────────────────────────────────────────────────────────────────────────────────────────────

    def can_grow(self, num_steps: int) -> bool:
        """Whether every decoding sequence finds blocks for that many tokens, and for its drafts, without a preemption."""
        rows = self.decoding_rows
        missing = self._blocks_after(rows, num_steps) - self._rows.table.num_blocks_R[rows]
        return int(np.maximum(missing, 0).sum()) <= self.pool.num_free

    def schedule(
        self,
        num_steps: int = 1,
        drafts: dict[Sequence, list[int]] | None = None,
        guesses: dict[Sequence, int] | None = None,
        most_prompts: int | None = None,
    ) -> Plan:
        """Decide a step and book what it takes. Preempts only where `can_grow` is False; then the host must be up to date, and
        there are no drafts and no guesses. At most `most_prompts` are computed, None leaves it to the budget."""
        plan = Plan(num_steps=num_steps, drafts=drafts or {}, guesses=guesses or {})
        self._schedule_decode(plan)
        self.reserve_for({})
        budget = max(1, self._max_num_batched_tokens - len(plan.decode))
        for sequence in self.prefilling[: self.prompts_at_once]:
            budget -= self._advance_prefill(sequence, budget, plan)
        # Who gave blocks back must not take them again in the same breath.
        has_most = False
        while budget > 0 and self._may_admit(plan):
            has_most = most_prompts is not None and len(plan.chunks) >= most_prompts
            if has_most or not self._admit(self.waiting[0], plan):
                break
            budget -= self._advance_prefill(self.waiting.popleft(), budget, plan)
        self.is_crowded = budget <= 0 or has_most
        self._end_prefills(plan)
        return plan

    def reserve_for(self, drafted: dict[Sequence, int]) -> None:
        """The next step, or launch, verifies so many drafts of each, and of no others."""
        self._rows.drafted_R[:] = 0
        for sequence, count in drafted.items():
            self._rows.drafted_R[sequence.row] = count

    def _may_admit(self, plan: Plan) -> bool:
        is_full = self.prompts_at_once is not None and len(self.prefilling) >= self.prompts_at_once
        return bool(self.waiting) and not plan.preempted_rows and not is_full

    def _schedule_decode(self, plan: Plan) -> None:
        book, rows = self._rows, self.decoding_rows
        # Rows that began together cross into a new block together: what all of them need is asked once.
        wanted_B = self._blocks_after(rows, plan.num_steps)
        short_B = np.flatnonzero(wanted_B > book.table.num_blocks_R[rows]).tolist()
        for sequence, wanted in [(self.decoding[b], int(wanted_B[b])) for b in short_B]:
            if sequence.stage is Stage.DECODE:  # or it has given way to an earlier one
                self._grow(sequence, wanted, plan)
        rows = self.decoding_rows
        goes_on = book.launched_R[rows] < book.limit_R[rows]
        plan.decode = self.decoding.copy() if goes_on.all() else list(compress(self.decoding, goes_on.tolist()))
        plan.rows_B = rows = rows[goes_on]
        # How many guesses turn out right is heard of later; until then all may.
        most = plan.num_steps + book.drafted_R[rows] if plan.guesses else plan.num_steps
        advance = np.minimum(most, book.limit_R[rows] - book.launched_R[rows])
        book.launched_position_R[rows] += advance
        book.launched_R[rows] += advance

    def _blocks_after(self, rows: np.ndarray, num_steps: int) -> np.ndarray:
        """Blocks the rows need to hold `num_steps` tokens and their drafts more, or as many as they may still sample."""
        book = self._rows
        more = np.minimum(num_steps + book.drafted_R[rows], book.limit_R[rows] - book.launched_R[rows])
        return -(-(self._rows.launched_position_R[rows] + more) // self.pool.block_size)

    def _grow(self, sequence: Sequence, wanted: int, plan: Plan) -> None:
        """Give it blocks until it has so many, the last ones' where none is free."""
        while len(sequence.blocks) < wanted:
            while self.pool.num_free == 0:
                last = self.decoding[-1]
                self._preempt(last, plan)
                if last is sequence:
                    return
            self._append_blocks(sequence, [self.pool.allocate()], plan)

    def _append_blocks(self, sequence: Sequence, blocks: list[int], plan: Plan) -> None:
        row, first = sequence.row, len(sequence.blocks)
        plan.new_blocks += [(row, place, block) for place, block in enumerate(blocks, first)]
        sequence.blocks += blocks
        self._rows.table.append(row, blocks)

    def _preempt(self, sequence: Sequence, plan: Plan) -> None:
        plan.new_blocks = [entry for entry in plan.new_blocks if entry[0] != sequence.row]
        plan.preempted_rows.append(sequence.row)
        self.counts.preemptions += 1
        self._requeue(sequence)

    def _requeue(self, sequence: Sequence) -> None:
        """Back to the head of the queue. What it sampled is kept, its keys and values are computed again."""
        self._decode_no_more(sequence)
        sequence.sampled = self._rows.take(sequence.row)
        self._file_blocks(sequence)
        self._give_back(sequence)
        sequence.tokens = np.concatenate([sequence.request.prompt_ids, sequence.sampled.token_ids])
        sequence.keys = []
        sequence.stage = Stage.WAITING
        self.waiting.appendleft(sequence)

    # ── prompts ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _admit(self, leader: Sequence, plan: Plan) -> bool:
        """Give the request rows and the blocks of its whole prompt, shared ones first. Followers without a free row wait until
        they find the prompt computed. Returns False while there is no room."""
        if leader.elder is not None and leader.elder.stage is Stage.PREFILL:
            return False  # it will find the prompt computed
        size, found = self.pool.block_size, self._find_prefix(leader)
        own = -(-len(leader.tokens) // size) - len(found)
        count = len(leader.followers)
        if self._can_split(leader):
            count = max(0, min(count, len(self._free_rows) - 1))
        # Each follower will continue the prompt's last block in a copy of its own.
        copies = count if len(leader.tokens) % size else 0
        if len(self._free_rows) < 1 + count or self.pool.num_free < own + copies + self.pool.num_idle(found):
            return False
        followers = self._split(leader, count)
        for sequence in (leader, *followers):
            sequence.begin(self._free_rows.pop())
            self._rows.enter(sequence)
            sequence.stage = Stage.FOLLOWING
        plan.admitted += [leader, *followers]
        self._append_blocks(leader, [self.pool.share(block) for block in found], plan)
        self._append_blocks(leader, [self.pool.allocate() for _ in range(own)], plan)
        if copies:
            for follower in followers:
                follower.blocks = [self.pool.allocate()]
        leader.stage = Stage.PREFILL
        leader.num_computed = len(found) * size
        self.counts.prefix_query_tokens += len(leader.tokens)
        self.counts.prefix_hit_tokens += leader.num_computed
        for sequence in (leader, *followers):
            sequence.cached_tokens = max(sequence.cached_tokens, min(leader.num_computed, sequence.num_prompt))
        self.prefilling.append(leader)
        return True

    def _can_split(self, leader: Sequence) -> bool:
        """Whether followers may come later and still find the prompt computed."""
        return self._prefix_caching and not leader.request.sampling.prompt_logprobs

    def _split(self, leader: Sequence, count: int) -> list[Sequence]:
        """Return the first `count` followers of the head of the queue. The others become the next in the queue."""
        leader.followers, late = leader.followers[:count], leader.followers[count:]
        if late:
            late[0].elder, late[0].followers = leader, late[1:]
            self.waiting.insert(1, late[0])
        return leader.followers

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks with the beginning of its tokens. The last token is always computed: the next one is sampled after it."""
        if not self._prefix_caching or sequence.request.sampling.prompt_logprobs:
            return []
        size, salt = self.pool.block_size, self._salt_of(sequence.request.adapter)
        if not sequence.keys or sequence.salt != salt:
            sequence.salt, sequence.cacheable = salt, True
            sequence.keys = list(block_keys(sequence.tokens, size, salt))
        return self.pool.find(list(islice(sequence.keys, (len(sequence.tokens) - 1) // size)))

    def _advance_prefill(self, sequence: Sequence, budget: int, plan: Plan) -> int:
        """The next chunk within the budget; returns its size."""
        start = sequence.num_computed
        end = min(len(sequence.tokens), start + budget)
        if end > start:
            plan.chunks.append(Chunk(sequence, start, end))
            sequence.num_computed = end
            # A prompt with the same beginning may find these blocks in this very step: in every layer, keys and values
            # are written before any are read.
            self._file(sequence, end)
        return end - start

    def _file(self, sequence: Sequence, num_tokens: int, first: int = 0) -> None:
        """File the full blocks of its first tokens, from block `first` on."""
        if self._prefix_caching and sequence.cacheable:
            last = num_tokens // self.pool.block_size
            for block, key in zip(sequence.blocks[first:last], sequence.keys[first:], strict=False):
                self.pool.file(block, key)

    def _end_prefills(self, plan: Plan) -> None:
        """A sequence whose last chunk is in the plan decodes from the next step on, its followers on the same blocks."""
        for chunk in plan.chunks:
            if not chunk.is_last:
                continue
            leader = chunk.sequence
            self.prefilling.remove(leader)
            chunk.samplers, leader.followers = [leader, *leader.followers], []
            for follower in chunk.samplers[1:]:
                self._fork(leader, follower, plan)
            for sequence in chunk.samplers:
                sequence.stage = Stage.DECODE
                self._rows.launched_position_R[sequence.row] = len(leader.tokens)
                self._rows.launched_R[sequence.row] += 1
            self._decode(chunk.samplers)

    def _fork(self, leader: Sequence, follower: Sequence, plan: Plan) -> None:
        partial, follower.blocks = follower.blocks, []
        whole = leader.blocks[: len(leader.tokens) // self.pool.block_size]
        self._append_blocks(follower, [*(self.pool.share(block) for block in whole), *partial], plan)
        plan.copies += [(leader.blocks[-1], block) for block in partial]
        follower.keys, follower.salt, follower.cacheable = leader.keys, leader.salt, leader.cacheable
        follower.prompt_logprobs = leader.prompt_logprobs

    def undo_prefills(self, plan: Plan) -> list[int]:
        """The prompts of a plan were not computed: their sequences wait again, in the old order, and what their blocks hold is
        found by nobody. Returns the rows that they had."""
        rows = []
        for chunk in reversed(plan.chunks):
            leader = chunk.sequence
            members = chunk.samplers or [leader, *leader.followers]
            rows += [member.row for member in members]
            for member in members:
                self.pool.forget(member.blocks)
                member.cacheable = False
            if chunk.samplers:
                for member in reversed(members):
                    self._requeue(member)
                continue
            for member in members:
                self._give_back(member)
                member.stage = Stage.WAITING
            self.prefilling.remove(leader)
            self.waiting.appendleft(leader)
        return rows

    # ── ends ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def add(self, sequences: list[Sequence]) -> None:
        """The n sequences of one request; the first leads, the others follow its prompt."""
        leader, *leader.followers = sequences
        place = len(self.waiting)
        while place and _begins_after(self.waiting[place - 1], leader):
            place -= 1
        self.waiting.insert(place, leader)

    def finish(self, sequence: Sequence) -> None:
        """A decoding sequence gives back what it holds. Its full blocks can still be found by content."""
        self._decode_no_more(sequence)
        sequence.sampled = self._rows.take(sequence.row)
        self._file_blocks(sequence)
        self._give_back(sequence)
        sequence.stage = Stage.FINISHED

    def withdraw(self, sequence: Sequence) -> None:
        """Take out a sequence that does not decode yet. Where others follow it, the request starts over without it."""
        leader = next(s for s in (*self.waiting, *self.prefilling) if s is sequence or sequence in s.followers)
        heirs = [s for s in (leader, *leader.followers) if s is not sequence]
        if leader is not sequence:
            leader.followers.remove(sequence)
            self._give_back(sequence)
        else:
            queued = leader in self.waiting
            (self.waiting if queued else self.prefilling).remove(leader)
            for member in (leader, *heirs):
                self._give_back(member)
                member.stage, member.followers = Stage.WAITING, []
            if heirs:
                heirs[0].elder, heirs[0].followers = leader.elder, heirs[1:]
                self.waiting.appendleft(heirs[0])
        sequence.stage = Stage.FINISHED

    def suspend(self) -> None:
        """Everybody gives back rows and blocks and waits again, in the old order; no block can be found by content."""
        for leader in reversed(self.prefilling):
            for member in (leader, *leader.followers):
                self._give_back(member)
                member.stage = Stage.WAITING
            self.waiting.appendleft(leader)
        self.prefilling = []
        for sequence in reversed(self.decoding.copy()):
            self._requeue(sequence)
        self.pool.forget_all()

    def hash_blocks(self, sequences: Iterable[Sequence]) -> None:
        """Blocks of sequences that decode have become full: who ends later has less left to do, which a caller waits for."""
        for sequence in sequences:
            if self._can_file(sequence):
                self._hash_blocks(sequence)

    def _hash_blocks(self, sequence: Sequence) -> None:
        """All that its row has tokens for. To hash a long prompt again for each of its completions would hold up the step."""
        size, begin = self.pool.block_size, len(sequence.keys) * self.pool.block_size
        prompt, row = sequence.request.prompt_ids, sequence.row
        sampled = self._rows.tokens_RN[row, max(0, begin - len(prompt)) : self._rows.sampled_R[row]]
        tokens = sampled if begin >= len(prompt) else np.concatenate([prompt[begin:], sampled])
        before = sequence.keys[-1] if sequence.keys else sequence.salt
        sequence.keys = [*sequence.keys, *block_keys(tokens, size, before)]  # siblings share the list of their prompt

    def _can_file(self, sequence: Sequence) -> bool:
        """Whether anybody could find its blocks. A prompt with logprobs was never looked for, so it has no salt."""
        return self._prefix_caching and sequence.cacheable and not sequence.request.sampling.prompt_logprobs

    def _file_blocks(self, sequence: Sequence) -> None:
        """File the full blocks of prompt and completion: a next turn may begin with both. Those of the prompt were filed when
        they were computed."""
        if not self._can_file(sequence):
            return
        size, count = self.pool.block_size, sequence.num_prompt + int(self._rows.sampled_R[sequence.row])
        # The keys and values of the newest token are not computed yet.
        computed = min(count - 1, int(self._rows.launched_position_R[sequence.row]))
        full = computed // size
        sequence.keys = sequence.keys[:full]  # a stop string may have taken tokens away
        if len(sequence.keys) < full:
            self._hash_blocks(sequence)
        self._file(sequence, computed, sequence.num_prompt // size)

    def _give_back(self, sequence: Sequence) -> None:
        # Last block first: of a chain, the end is the first to be reused.
        self.pool.release(*reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_computed = 0
        if sequence.row != NO_ROW:
            self._rows.leave(sequence)
            self._free_rows.append(sequence.row)
            sequence.row = NO_ROW


def _begins_after(waiting: Sequence, new: Sequence) -> bool:
    """Whether a new request overtakes one that waits. None overtakes what has begun before."""
    return waiting.sampled is None and waiting.elder is None and waiting.request.order > new.request.order
