"""What guesses would have saved a run that was sampled without them: attempts of a few of its steps are replayed with the
engine's own guesses, and every step of the engine costs what the run's steps did.

    stored attempts ──► groups of a few steps ──► engine.native.speculation.replay ──► tokens per second, beside plain steps

Twice: once with the costs that the recording says, once with dearer ones, `careful`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from redline.buffer.store.index import GroupRow
from redline.engine.native.speculation.replay import BUSY_CPU, CPU, GPU, Attempt, Limits, Machine, Replay, Replayed, Reply
from redline.errors import RunFolderError
from redline.lab.doctor.facts import Facts
from redline.lab.doctor.rules.sizes import num_engines, rows_of_an_engine
from redline.lab.simulate.costs import EngineCost
from redline.lab.simulate.recorded import engine_cost_of
from redline.runs.run import Run
from redline.runs.stored import StoredRun, StoredText
from redline.types import FinishReason

STEPS = 3
"""Steps of the run that are replayed, from its first steady one to its newest."""
MOST_TOKENS, MOST_ATTEMPTS, LONGEST = 6_000, 64, 750
"""Sampled tokens of each of them, attempts, and tokens of a reply, of which the first count."""
FEWEST_ATTEMPTS = 12
"""In all of them."""
MOST_STORED = 1_000
"""Attempts that tell what a step of the engine costs."""
LOOK_BACK = 512, 300_000
"""Groups before a step, and tokens of them, in which earlier attempts at its tasks are looked for."""
DEARER = 1.6, 3.0
"""Times that a token beyond the usual rows costs what a row does: as on two cores of a Xeon from 16 tokens to 64, and where we
are careful."""
SHARES = 0.01, 0.03
"""Parts of a step that a row costs at least, and where the recording does not tell at most: 1% of the tiny network, 3% of
SmolLM2-135M."""
WORTH_A_LOOK = 0.06
"""Share of the time that rollouts must take."""
WORTH_A_TRIAL = 1.5
"""Tokens a step that guesses must give a row on a GPU before anybody is told."""
STREAM = 3
"""Attempts for each row, where others take the place of those that end."""


@dataclass(slots=True, frozen=True)
class Pair:
    """The same attempts without guesses and with them."""

    plain: Replayed
    guessed: Replayed

    @property
    def saved(self) -> float:
        """Share of the time of decoding; below zero where guesses cost more."""
        return 1 - self.plain.tokens_per_s / self.guessed.tokens_per_s if self.guessed.tokens else 0.0


@dataclass(slots=True, frozen=True)
class Guesses:
    """What a replay of some steps of a run says."""

    likely: Sequence[Pair] = ()
    """With the costs that the recording says, a pair for each step."""
    careful: Sequence[Pair] = ()
    """With dearer ones."""
    num_attempts: int = 0
    rows: float = 0.0
    """Usual rows of a step of the engine."""
    plain_s: float = 0.0
    """Seconds of such a step."""
    cannot: str = ""
    """Why nothing was replayed, where something is missing."""

    @property
    def right(self) -> float:
        """Share of the guesses that are right."""
        return sum(pair.guessed.accepted for pair in self.likely) / max(1, sum(pair.guessed.drafted for pair in self.likely))

    @property
    def tokens_a_step(self) -> float:
        """Tokens that a step gives each row; 1 without guesses."""
        return sum(pair.guessed.tokens for pair in self.likely) / max(1, sum(pair.guessed.rows for pair in self.likely))


def may_guess(facts: Facts) -> bool:
    """Whether guesses are off, could be on, and rollouts are enough of the time for them to matter."""
    own, parallel = facts.setting("engine.kind", "native"), facts.setting("engine.tensor_parallel_size", 1)
    if own != "native" or parallel > 1 or facts.setting("engine.speculation", "off") != "off":
        return False
    if facts.bounding == "trainer":
        return False
    return float(facts.phase("generation", "rollouts").sum()) >= WORTH_A_LOOK * facts.wall_s


def replayed(run: Run, facts: Facts) -> Guesses | None:
    """Replay some steps of a run that `may_guess`. Blocks for about a second, however long the run is. None where there is
    nothing to say."""
    try:
        batches = _batches(StoredRun(run.folder.shown), facts)
        num_attempts = sum(len(batch.attempts) for batch in batches)
        if num_attempts < FEWEST_ATTEMPTS:
            return Guesses(cannot=f"{num_attempts} stored attempts are too few to guess from; longer runs store more")
        if facts.setting("run.device", "cpu") == "cuda":
            return _on_a_gpu(batches)
        cost = engine_cost_of(run, facts, MOST_STORED)
    except RunFolderError as error:
        return Guesses(cannot=f"{error.message.removeprefix(f'{run.folder.shown}: ')}; {error.hint}")
    usual = facts.mean("engine/batch_size_mean") or 1.0
    step_s, careful_s = (_step_s(cost, usual, token_s) for token_s in _token_s(cost, usual))
    likely = [batch.replayed(step_s, CPU) for batch in batches]
    pays = any(pair.saved > 0 for pair in likely)
    return Guesses(
        likely=likely,
        careful=[batch.replayed(careful_s, BUSY_CPU) for batch in batches] if pays else likely,
        num_attempts=num_attempts,
        rows=usual,
        plain_s=cost.decode_s(usual),
    )


def _on_a_gpu(batches: Sequence[_Batch]) -> Guesses | None:
    """A GPU takes several steps at once, of which the run recorded no single one: only how far guesses would reach is known."""
    found = Guesses([batch.replayed(lambda tokens: 1.0, GPU) for batch in batches])
    if found.tokens_a_step < WORTH_A_TRIAL:
        return None
    return Guesses(
        cannot=f"attempts repeat each other, so that guesses could give each row {found.tokens_a_step:.1f} tokens a step; what"
        " such a step costs on a GPU is not recorded, and a comparison with engine.speculation=auto tells"
    )


# ── what a step costs ──────────────────────────────────────────────────────────────────────────────────────────────────


def _step_s(cost: EngineCost, usual: float, token_s: float) -> Callable[[float], float]:
    """As recorded up to the usual rows; a token more costs `token_s`, and no more than a row of the fullest step on average."""
    most = max(usual, cost.rows.high)
    each = min(token_s, cost.decode_s(most) / most)
    return lambda tokens: cost.decode_s(min(tokens, usual)) + each * max(0.0, tokens - usual)


def _token_s(cost: EngineCost, usual: float) -> tuple[float, float]:
    """Seconds of one token more in a step, as they are likely to be and as careful people take them. Where all recorded steps
    had about as many rows, the fit of a row is noise: then it is likely to be within the share that rows were seen to have."""
    least, most = (share * cost.decode_s(usual) for share in SHARES)
    told = cost.row_s if cost.tells_rows else min(cost.row_s, most)
    return DEARER[0] * max(told, least), DEARER[1] * max(cost.row_s, least)


# ── which attempts ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class _Batch:
    """Attempts of one step, which stand for all of it."""

    attempts: Sequence[Attempt]
    earlier: Sequence[tuple[str, np.ndarray]]
    """Task and tokens of attempts of steps before."""
    num_rows: int
    times: float
    """Rows that each stands for."""
    to_the_end: bool
    """Whether the engine waits for the last of them before others begin."""

    def replayed(self, step_s: Callable[[float], float], limits: Limits) -> Pair:
        machine = Machine(self.num_rows, step_s, limits, self.times)
        longest = max(len(reply.token_ids) for attempt in self.attempts for reply in attempt.replies)
        plain, guessing = Replay(machine, longest, "off"), Replay(machine, longest)
        for task, token_ids in self.earlier:
            guessing.remember(task, token_ids)
        return Pair(*(each.run(self.attempts, to_the_end=self.to_the_end) for each in (plain, guessing)))


def _batches(stored: StoredRun, facts: Facts) -> list[_Batch]:
    """The batches of some steady steps, or of other steps where the store has none of those."""
    steps = stored.sampled_steps()  # trained on or not: groups without signal are those that repeat each other most
    steady = set(facts.column("step").tolist())
    chosen = _spread([step for step in steps if step in steady] or steps)
    made = (_batch(stored, stored.sampled(step), facts) for step in chosen)
    return [batch for batch in made if batch.attempts]


def _spread(steps: Sequence[int]) -> list[int]:
    """Some of the steps, the newest among them, as far apart as can be."""
    places = np.linspace(len(steps) - 1, 0, min(STEPS, len(steps))).round().astype(int)
    return sorted({steps[place] for place in places.tolist()})


def _batch(stored: StoredRun, groups: Sequence[GroupRow], facts: Facts) -> _Batch:
    """The attempts of a step, as many groups as may be replayed, with those at the same tasks that came before."""
    found = [attempts for _, texts in stored.texts(groups) if (attempts := _attempts(texts))]
    chosen = [attempt for group in _within(found) for attempt in group]
    tasks = {attempt.task for attempt in chosen}
    earlier = list(_earlier(stored, min(group.index for group in groups), tasks))
    at_once = rows_of_an_engine(facts)
    if not facts.is_lockstep:
        num_rows = max(1, len(chosen) // STREAM)
        usual = facts.mean("engine/batch_size_mean") or at_once
        return _Batch(chosen, earlier, num_rows, usual / num_rows, to_the_end=False)
    attempts = facts.setting("rollouts.groups_per_step", 1) * facts.setting("rollouts.group_size", 1) / num_engines(facts)
    times = attempts / max(1, len(chosen))
    return _Batch(chosen, earlier, max(1, math.ceil(at_once / times)), times, to_the_end=True)


def _attempts(texts: Sequence[StoredText]) -> list[Attempt]:
    """The attempts of one group that have any reply."""
    found = [
        Attempt(text.task_id, [_reply(text, turn) for turn in text.turns if turn["end"] > turn["start"]]) for text in texts
    ]
    return [attempt for attempt in found if attempt.replies]


def _reply(text: StoredText, turn: Mapping[str, Any]) -> Reply:
    begin, end = turn["start"], turn["end"]
    return Reply(text.token_ids[:begin], text.token_ids[begin:end], turn["finish_reason"] == FinishReason.STOP)


def _within(groups: Sequence[Sequence[Attempt]]) -> list[Sequence[Attempt]]:
    """Groups from all over the step that may be replayed, with the first tokens of replies that are too long."""
    if not groups:
        return []
    small = [group[:MOST_ATTEMPTS] for group in groups]
    most = min(
        MOST_TOKENS / max(1.0, float(np.mean([_work(group) for group in small]))),
        MOST_ATTEMPTS / float(np.mean([len(group) for group in small])),
    )
    count = max(1, min(len(small), int(most)))
    chosen = [small[place] for place in np.linspace(0, len(small) - 1, count).round().astype(int).tolist()]
    replies = sum(len(attempt.replies) for group in chosen for attempt in group)
    longest = LONGEST if count > 1 else max(2, min(LONGEST, MOST_TOKENS // replies))
    return [[_cut(attempt, longest) for attempt in group] for group in chosen]


def _work(group: Sequence[Attempt]) -> float:
    """Tokens that a replay of a group goes through one by one. Those of prompts are indexed all at once; the first ones of its
    attempts are the same."""
    replies = [reply for attempt in group for reply in attempt.replies]
    later = [reply for attempt in group for reply in attempt.replies[1:]]
    return sum(len(reply.token_ids) for reply in replies) + sum(len(reply.prompt_ids) for reply in later) / 32


def _cut(attempt: Attempt, most: int) -> Attempt:
    short = [
        reply if len(reply.token_ids) <= most else Reply(reply.prompt_ids, reply.token_ids[:most], False)
        for reply in attempt.replies
    ]
    return Attempt(attempt.task, short)


def _earlier(stored: StoredRun, before: int, tasks: Set[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Task and tokens of attempts at some tasks in the groups before an index, the oldest first."""
    most_groups, most_tokens = LOOK_BACK
    groups = list[GroupRow]()
    for group in islice(stored.newest(before), most_groups):
        most_tokens -= group.num_tokens
        if most_tokens < 0:
            break
        groups.append(group)
    for _, texts in stored.texts(reversed(groups)):
        yield from ((text.task_id, text.token_ids) for text in texts if text.task_id in tasks)
