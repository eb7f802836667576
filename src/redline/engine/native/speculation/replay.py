"""What guesses would have made of texts that were sampled without them: the engine's own texts, drafts and choices, and no
network.

    attempts ──► rows that are free ──► drafts ──► as many as pay ──► compared with what was sampled ──► learnt from

The clock is that of the steps' costs, which the caller knows, so that the same texts give the same answer on any machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from redline.config.sections.engine import SpeculationMode
from redline.engine.native.running.rows import Rows
from redline.engine.native.running.verification import MAX_SLOTS
from redline.engine.native.sequence import Sequence as Sequence_
from redline.engine.native.sequence import Stage, Wants
from redline.engine.native.speculation.costs import ENOUGH, size_bin
from redline.engine.native.speculation.speculation import MAX_DRAFT, MAX_ROWS, Speculation
from redline.types import GenerateRequest, SamplingParams


@dataclass(slots=True, frozen=True)
class Reply:
    """Something that was sampled in one piece."""

    prompt_ids: np.ndarray
    """int32: everything before it."""
    token_ids: np.ndarray
    """int32."""
    has_stopped: bool = True
    """Whether its last token ended it, and no limit."""


@dataclass(slots=True, frozen=True)
class Attempt:
    """Replies that followed each other."""

    task: str
    replies: Sequence[Reply]


@dataclass(slots=True, frozen=True)
class Limits:
    """What guesses are held to by what computes them."""

    most: int
    """Tokens that a verifying step takes, the rows' newest ones included."""
    rows: int
    """With more rows nothing is guessed."""
    look_s: tuple[float, float]
    """Seconds of the host for a look for drafts, and for each row in it."""
    verify_s: tuple[float, float]
    """The same for a verifying step beyond a plain one of as many tokens: the look, and what is learnt of it."""
    fastest_s: tuple[float, float]
    """The same of the fastest of some such steps, by which an engine decides."""
    begin_s: float
    """For each row that a look sees for the first time: its prompt is indexed."""


CPU = Limits(128, MAX_ROWS, look_s=(300e-6, 30e-6), verify_s=(1.5e-3, 100e-6), fastest_s=(0.7e-3, 60e-6), begin_s=250e-6)
"""In float32, with one core of a Xeon at 2.5 GHz for the host."""
BUSY_CPU = replace(CPU, look_s=(600e-6, 60e-6), verify_s=(3e-3, 200e-6), fastest_s=(1.4e-3, 120e-6), begin_s=500e-6)
"""The same with a host that takes twice as long."""
GPU = Limits(512, MAX_SLOTS, look_s=(0.0, 0.0), verify_s=(0.0, 0.0), fastest_s=(0.0, 0.0), begin_s=0.0)
"""The device looks by itself, and by a rule of its own (`kernels/decode/guesses.py`): about as much is found."""


@dataclass(slots=True, frozen=True)
class Machine:
    """What attempts are replayed on."""

    num_rows: int
    """Decoded at once."""
    step_s: Callable[[float], float]
    """Seconds of a step by the tokens that go through the network."""
    limits: Limits = CPU
    times: float = 1.0
    """Rows that each row stands for: they cost what so many do."""


@dataclass(slots=True)
class Replayed:
    """What came of it. The first token of each reply comes with its prompt, and is in none of these figures."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    rows: int = 0
    """Rows of all steps together."""
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(slots=True, eq=False)
class _Row:
    """A reply under way."""

    reply: Reply
    sequence: Sequence_
    later: deque[Reply] = field(default_factory=deque)
    """The other replies of its attempt."""


class Replay:
    """Rows that get the tokens which were sampled, as many at a time as guesses give them."""

    def __init__(self, machine: Machine, longest: int, mode: SpeculationMode = "auto") -> None:
        """`longest` is the longest reply."""
        self._machine, self._now = machine, 0.0
        self._rows = Rows(machine.num_rows, longest, 1)
        self._speculation = Speculation(self._rows, mode, clock=lambda: self._now)
        self._free = list(range(machine.num_rows))
        self._num_new = 0
        """Rows that no look has seen."""
        self._most = int(machine.limits.most / machine.times)
        self._tell_costs()

    def remember(self, task: str, token_ids: np.ndarray) -> None:
        """An earlier attempt at a task, prompt included."""
        self._speculation.remember(task, token_ids)

    def run(self, attempts: Iterable[Attempt], *, to_the_end: bool = True) -> Replayed:
        """Replay attempts that are all there at the beginning. Without `to_the_end`, until none of them waits for a row."""
        waiting, playing, done = deque(attempts), list[_Row](), Replayed()
        while True:
            while waiting and self._free:
                attempt = waiting.popleft()
                playing += self._begun(attempt.task, deque(attempt.replies))
            if not (playing if to_the_end else waiting):
                return done
            self._step(playing, done)
            playing = [row for now in playing for row in self._goes_on(now)]

    def _tell_costs(self) -> None:
        """An engine that has measured steps of all sizes."""
        costs, sizes = self._speculation.costs, sorted({size_bin(size) for size in range(1, self._most + 1)})
        for size in sizes * ENOUGH:
            host_s = self._host_s(self._machine.limits.fastest_s, min(size, self._machine.num_rows))
            costs.add_verifying(size, self._plain_s(size) + host_s)
        for size in sizes * ENOUGH:
            costs.add_plain(size, self._plain_s(size))

    def _plain_s(self, num_rows: int) -> float:
        return self._machine.step_s(num_rows * self._machine.times)

    def _verifying_s(self, num_rows: int, num_tokens: int) -> float:
        return self._plain_s(num_tokens) + self._host_s(self._machine.limits.verify_s, num_rows)

    def _host_s(self, cost: tuple[float, float], num_rows: int) -> float:
        return cost[0] + cost[1] * num_rows * self._machine.times

    # ── rows ───────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _begun(self, task: str, replies: deque[Reply]) -> list[_Row]:
        """The first of these replies that has more than the token that comes with its prompt, in a row; none where none has."""
        while replies:
            reply = replies.popleft()
            if len(reply.token_ids) > 1:
                return [_Row(reply, self._enter(task, reply), replies)]
        return []

    def _enter(self, task: str, reply: Reply) -> Sequence_:
        most = len(reply.token_ids) + (MAX_DRAFT if reply.has_stopped else 0)
        request = GenerateRequest(reply.prompt_ids, SamplingParams(most), task=task)
        sequence = Sequence_(0, 0, request, 0.0, Wants.of(request.sampling), stage=Stage.DECODE, row=self._free.pop())
        self._rows.enter(sequence)
        self._advance(sequence.row, reply, 1)
        self._speculation.begin([sequence])
        self._num_new += 1
        return sequence

    def _advance(self, row: int, reply: Reply, count: int) -> None:
        rows, begin = self._rows, int(self._rows.sampled_R[row])
        rows.tokens_RN[row, begin : begin + count] = reply.token_ids[begin : begin + count]
        rows.sampled_R[row] += count
        rows.launched_R[row] += count

    def _goes_on(self, now: _Row) -> list[_Row]:
        """The row, the next reply of its attempt where this one is over, or nothing."""
        sequence = now.sequence
        if self._rows.sampled_R[sequence.row] < len(now.reply.token_ids):
            return [now]
        sequence.sampled, sequence.stage = self._rows.take(sequence.row), Stage.FINISHED
        self._speculation.end(sequence)
        self._free.append(sequence.row)
        return self._begun(sequence.request.task, now.later)

    # ── steps ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _step(self, playing: Sequence[_Row], done: Replayed) -> None:
        before, num_rows = self._now, len(playing)
        drafts = self._drafts([row.sequence for row in playing])
        accepted = {}
        for row in playing:
            draft = drafts.get(row.sequence, [])
            begin = int(self._rows.sampled_R[row.sequence.row])
            left = row.reply.token_ids[begin:]
            right = _num_alike(draft, left[: len(draft)].tolist())
            count = min(right + 1, len(left))
            accepted[row.sequence] = min(right, count - 1) if draft else 0
            self._advance(row.sequence.row, row.reply, count)
            done.tokens += count
        if drafts:
            self._speculation.learn(drafts, {sequence: accepted[sequence] for sequence in drafts})
        drafted = sum(map(len, drafts.values()))
        self._now += self._verifying_s(num_rows, num_rows + drafted) if drafted else self._plain_s(num_rows)
        done.seconds += self._now - before
        done.steps += 1
        done.rows += num_rows
        done.drafted += drafted
        done.accepted += sum(accepted.values())

    def _drafts(self, sequences: Sequence[Sequence_]) -> dict[Sequence_, list[int]]:
        """As the engine asks for them before a step. To look takes time, which a verifying step counts as its own."""
        num_rows = len(sequences)
        if num_rows * self._machine.times > self._machine.limits.rows:
            return {}
        if not self._speculation.may_draft(num_rows, self._most):
            return {}
        drafts, limits = self._speculation.drafts(sequences, self._most), self._machine.limits
        begin_s, self._num_new = limits.begin_s * self._num_new * self._machine.times, 0
        self._now += begin_s
        if not drafts:
            look_s = self._host_s(limits.look_s, num_rows)
            self._now += look_s
            self._speculation.looked_in_vain(begin_s + look_s)
        return drafts


def _num_alike(draft: Sequence[int], sampled: Sequence[int]) -> int:
    """How many tokens are alike before the first that is not."""
    return next(
        (place for place, (a, b) in enumerate(zip(draft, sampled, strict=False)) if a != b), min(len(draft), len(sampled))
    )
