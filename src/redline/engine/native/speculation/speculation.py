"""Which tokens to guess for which rows, and what came of it.

    rows that decode ──► their texts ──► drafts ──► as many as pay ──► a verifying step ──► accepted, learnt from
    on a GPU         ──► how many pay ──► texts to the device ──► steps that find and verify drafts there ──► learnt from

A token is a function of logits, seed, completion and position, so a draft is right exactly when it is the token that is sampled
in its place. A verifying step samples after the newest token of a row and after each of its drafts; the samples up to and
including the first that differs from its draft are what steps one by one would have sampled.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from redline.config.sections.engine import SpeculationMode
from redline.engine.native.running.rows import Rows
from redline.engine.native.running.verification import MAX_GUESSES, MAX_SLOTS, MAX_TOKENS, TextWrites
from redline.engine.native.sequence import Sequence as Sequence_
from redline.engine.native.speculation.costs import Costs, size_bin
from redline.engine.native.speculation.references import References
from redline.engine.native.speculation.texts import TABLE_SIZE, Place, Text, Texts
from redline.types import GenerateRequest, SamplingParams

MAX_DRAFT = 12
"""Tokens guessed for one row at most."""
MAX_ROWS = 64
"""More rows that decode at once keep the device busy without guesses."""
PRIOR = 2.0, 3.0
"""Tokens accepted, and tried, that a row begins with: what nobody has tried is worth a try."""
MEMORY = 0.9
"""What is left of a row's tries after another one."""
LEAST_CHANCE = 0.05
"""That a draft is right with which it is still worth a thought."""
LOOK_SHARE = 0.02
"""Share of the time that may go into looking for drafts that are not found."""
FORGETS = 0.01, 0.0005
"""Share by which the usual rate of guesses goes back to where it began with each launch that was not worth one, at most and at
least. Guesses that fail are tried again after about a hundred launches, and after more of them each time that they fail."""
LESS_OFTEN = 0.7
"""What is left of that share after each launch whose guesses failed."""
FAILED = 0.2
"""Share of right ones below which guesses have failed."""
LEAST_GAIN = 1.03
"""How many times the tokens per second of a plain step a verifying one must promise."""


@dataclass(slots=True)
class SpeculationCounts:
    """Since the engine was made."""

    steps: int = 0
    """That verified drafts."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    saved_s: float = 0.0
    """Tokens gained per row, each worth a plain step of as many rows, less what verifying takes longer than one; of both the
    fastest of the last few that were measured: a plain step would have been held up as well."""


@dataclass(slots=True, eq=False)
class _Row:
    """What is known of one sequence."""

    text: Text
    place: Place | None = None
    """Where its text was last found again, for as long as it goes on like that."""
    count: int = 0
    """Tokens it had then."""
    accepted: float = PRIOR[0]
    tried: float = PRIOR[1]

    @property
    def rate(self) -> float:
        """Share of its drafts that turn out right, the newer the weightier."""
        return self.accepted / self.tried

    def learn(self, num_accepted: int, num_tried: int) -> None:
        """Drafts behind the first wrong one were not tried: what was sampled after them is nobody's."""
        fade = MEMORY**num_tried
        self.accepted = self.accepted * fade + num_accepted
        self.tried = self.tried * fade + num_tried

    def rest(self, usual: float = PRIOR[0] / PRIOR[1]) -> None:
        """It had a draft that was not worth a try. Forgets slowly, so that it gets another one; `usual` is the rate of
        others."""
        self.accepted += (PRIOR[1] * usual - self.accepted) * 0.02
        self.tried += (PRIOR[1] - self.tried) * 0.02


class Speculation:
    """Drafts for the rows of one engine."""

    def __init__(self, rows: Rows, mode: SpeculationMode, clock: Callable[[], float] = time.perf_counter) -> None:
        """`clock` gives seconds."""
        self.counts = SpeculationCounts()
        self.costs = Costs()
        self._mode, self._clock = mode, clock
        self._book = rows
        self._texts = Texts(rows, table_size=TABLE_SIZE if mode != "off" else 1)
        self._rows: dict[Sequence_, _Row] = {}
        self._looks_again = 0.0
        """Not before this moment of the clock."""
        self._last = 0, 0
        """Tokens drafted and accepted in the last verifying step."""
        self._references = References(rows)
        self._usual = PRIOR[0] / PRIOR[1]
        """Share of what devices guessed that was right, of all rows, the newer the weightier: what a row begins with."""
        self._forgets = FORGETS[0]

    @property
    def is_on(self) -> bool:
        return self._mode != "off"

    # ── sequences come and go ──────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, sequences: Sequence[Sequence_]) -> None:
        """Sequences were given rows, for the first time or again."""
        if not self.is_on:
            return
        for sequence in sequences:
            if sequence not in self._rows:
                text = self._texts.begin(_key(sequence.request), sequence)
                self._rows[sequence] = _Row(text, accepted=PRIOR[1] * self._usual)

    def remember(self, task: str, token_ids: np.ndarray) -> None:
        """An attempt at a task, prompt included, that another engine has sampled, or an earlier run."""
        if self.is_on:
            self._texts.remember(_key(GenerateRequest(token_ids, SamplingParams(1), task=task)), token_ids)

    def end(self, sequence: Sequence_) -> None:
        """A sequence has left the engine."""
        row = self._rows.pop(sequence, None)
        if row is not None:
            self._texts.end(row.text)

    # ── a step ─────────────────────────────────────────────────────────────────────────────────────────────────────────

    def may_draft(self, num_rows: int, most: int) -> bool:
        """Whether it is worth looking for drafts, where a verifying step takes `most` tokens: not where the batch is large, or
        where a plain step is to be measured."""
        if not self.is_on or not 0 < num_rows <= min(MAX_ROWS, most - 1):
            return False
        if self._mode == "always":
            return True
        return self._clock() >= self._looks_again and not self.costs.needs_plain(num_rows)

    def drafts(self, sequences: Sequence[Sequence_], most: int) -> dict[Sequence_, list[int]]:
        """Tokens that each of these may sample next, for those where that pays, as far as the host has heard of them; no more
        than make `most` tokens with the newest ones."""
        began = self._clock()
        drafts = self._drafts(sequences, most)
        if not drafts:
            self.looked_in_vain(self._clock() - began)
        return drafts

    def looked_in_vain(self, seconds: float) -> None:
        """A look for drafts took so long and found none: the next one waits."""
        self._looks_again = self._clock() + seconds / LOOK_SHARE

    def _drafts(self, sequences: Sequence[Sequence_], most: int) -> dict[Sequence_, list[int]]:
        rows = [self._rows[sequence] for sequence in sequences]
        self._texts.index(list({row.text.scope: None for row in rows}))
        places = [self._go_on(row) for row in rows]
        lost = [index for index, place in enumerate(places) if place is None]
        for index, place in zip(lost, self._texts.find([rows[index].text for index in lost]), strict=True):
            places[index] = place
        found = [self._draft(*each) for each in zip(rows, sequences, places, strict=True)]
        counts = self._how_many(rows, [len(draft) for draft in found], most)
        for row, draft, count in zip(rows, found, counts, strict=True):
            if draft and not count:
                row.rest()
        return {s: draft[:count] for s, draft, count in zip(sequences, found, counts, strict=True) if count}

    def _draft(self, row: _Row, sequence: Sequence_, place: Place | None) -> list[int]:
        """What follows at a place, as much as the sequence may still sample."""
        book, sampling = self._book, sequence.request.sampling
        row.place, row.count = place, int(book.sampled_R[sequence.row])
        left = int(book.limit_R[sequence.row] - book.launched_R[sequence.row]) - 1
        if place is None or left <= 0:
            return []
        wanted = min(MAX_DRAFT, left)
        draft = self._texts.slice(place.text, place.offset, place.offset + wanted)
        if place.text is row.text and len(draft) < wanted:  # it repeats itself, and goes on to
            draft = (draft * wanted)[:wanted]
        # The token that ends it is sampled, never guessed: nothing comes after it.
        ends = [index for index, token in enumerate(draft) if token in sampling.stop_token_ids]
        return draft[: ends[0]] if ends else draft

    def _go_on(self, row: _Row) -> Place | None:
        """The place after the one of the last draft, where everything sampled since is as it was there."""
        if row.place is None:
            return None
        place, fresh = row.place, row.text.sampled(self._book)[row.count :].tolist()
        end = place.offset + len(fresh)
        if self._texts.slice(place.text, place.offset, end) != fresh or end >= place.text.num_tokens(self._book):
            return None
        return Place(place.text, end)

    def _how_many(self, rows: Sequence[_Row], longest: Sequence[int], most: int) -> list[int]:
        """How much of each row's draft to verify."""
        if self._mode == "always":
            return _within(longest, most - len(rows))
        return best_counts([row.rate for row in rows], longest, self.costs, most)

    # ── a launch of steps that find their drafts by themselves ─────────────────────────────────────────────────────────

    def guesses(self, sequences: Sequence[Sequence_], most: int) -> dict[Sequence_, int]:
        """How many tokens a device is to guess for each of these in every step, where that pays: no more than make `most`
        with the newest ones."""
        count = len(sequences)
        if not self.is_on or not 0 < count <= min(MAX_SLOTS, most - 1):
            return {}
        rows, longest = [self._rows[sequence] for sequence in sequences], [MAX_GUESSES] * count
        if self._mode == "always":
            each = min(MAX_GUESSES, (most - count) // count)
            return dict.fromkeys(sequences, each)
        if self.costs.needs_plain(count):
            return {}
        counts = best_counts([row.rate for row in rows], longest, self.costs, most)
        for row, guessed in zip(rows, counts, strict=True):
            if not guessed:
                row.rest(self._usual)
        if not any(counts):
            self._usual += (PRIOR[0] / PRIOR[1] - self._usual) * self._forgets
        return {sequence: guessed for sequence, guessed in zip(sequences, counts, strict=True) if guessed}

    def measures_plain(self, num_rows: int) -> bool:
        """Whether guesses wait for a plain step of as many rows to be measured: fewer of those are enough."""
        return self._mode == "auto" and 0 < num_rows <= MAX_SLOTS and self.costs.needs_plain(num_rows)

    def writes(self, sequences: Sequence[Sequence_]) -> TextWrites:
        """What the device must be told before it guesses for these."""
        return self._references.writes(sequences, [self._rows[sequence].text.scope for sequence in sequences])

    def leave_places(self) -> None:
        """The rows sample without guesses now."""
        self._references.leave()

    def forget_references(self) -> None:
        """The device has lost what it was told."""
        self._references.forget()

    def learn_guesses(
        self, sequences: Sequence[Sequence_ | None], accepted_B: np.ndarray, tried_B: np.ndarray, drafted: int
    ) -> None:
        """Note for each sequence how many of its tries were right; where there was nothing to guess, that is a try too. None is
        a sequence that has left."""
        for sequence, accepted, tried in zip(sequences, accepted_B.tolist(), tried_B.tolist(), strict=True):
            row = self._rows.get(sequence) if sequence is not None else None
            if row is not None and tried:
                row.learn(accepted, tried)
        accepted, tried = int(accepted_B.sum()), int(tried_B.sum())
        if tried:
            self._usual += (accepted / tried - self._usual) * (1 - 0.98**tried)
            has_failed = accepted < FAILED * tried
            self._forgets = max(FORGETS[1], self._forgets * LESS_OFTEN) if has_failed else FORGETS[0]
        self._last = drafted, accepted
        self.counts.steps += 1
        self.counts.drafted_tokens += drafted
        self.counts.accepted_tokens += accepted

    # ── what came of it ────────────────────────────────────────────────────────────────────────────────────────────────

    def learn(self, drafted: dict[Sequence_, list[int]], accepted: dict[Sequence_, int]) -> None:
        """These drafts were verified, and so many of each were right."""
        for sequence, draft in drafted.items():
            self._rows[sequence].learn(accepted[sequence], min(accepted[sequence] + 1, len(draft)))
        self._last = sum(map(len, drafted.values())), sum(accepted.values())
        self.counts.steps += 1
        self.counts.drafted_tokens += self._last[0]
        self.counts.accepted_tokens += self._last[1]

    def took(self, seconds: float, num_rows: int, num_steps: int, num_verified: int = 0) -> None:
        """The last step of the engine, or several in one launch, took so long and did nothing else. `num_verified` are the
        tokens that went through a verifying one, 0 for plain ones."""
        if not self.is_on:
            return
        if not num_verified:
            self.costs.add_plain(num_rows, seconds / num_steps)
            return
        (_, gained), plain = self._last, self.costs.plain(num_rows)
        self.costs.add_verifying(num_verified, seconds / num_steps, num_steps)
        if plain is not None:
            longer = self.costs.fastest_verifying(num_verified) - plain
            self.counts.saved_s += gained / num_rows * plain - num_steps * longer


def best_counts(rates: Sequence[float], longest: Sequence[int], costs: Costs, most: int = MAX_TOKENS) -> list[int]:
    """How many tokens of each row's draft to verify, so that the step samples most tokens per second. The n-th token of a
    draft is reached with the rate to the power of n; the likeliest are added one by one, until the step has `most` tokens.
    Zeros where nothing pays."""
    num_rows, plain = len(rates), costs.plain(len(rates))
    if plain is None:
        return [0] * num_rows
    nth_N = np.arange(1, max(longest, default=0) + 1)
    chance_BN = np.asarray(rates)[:, None] ** nth_N * (nth_N <= np.asarray(longest)[:, None])
    row_C, nth_C = np.nonzero(chance_BN >= LEAST_CHANCE)
    chance_C = chance_BN[row_C, nth_C]
    likeliest = np.argsort(-chance_C, kind="stable")[: most - num_rows]
    if not len(likeliest):
        return [0] * num_rows
    num_tokens_C = num_rows + np.arange(1, len(likeliest) + 1)
    sizes_C = np.array([size_bin(count) for count in num_tokens_C.tolist()])
    seconds = {size: costs.verifying(num_rows, size) for size in np.unique(sizes_C).tolist()}
    seconds_C = np.array([seconds[size] for size in sizes_C.tolist()])
    speed_C = (num_rows + np.cumsum(chance_C[likeliest])) / seconds_C
    best = int(speed_C.argmax())
    if speed_C[best] <= LEAST_GAIN * num_rows / plain:
        return [0] * num_rows
    return np.bincount(row_C[likeliest[: best + 1]], minlength=num_rows).tolist()


def _within(longest: Sequence[int], room: int) -> list[int]:
    """As much of each as there is room for in all, the first ones first."""
    counts = []
    for length in longest:
        counts.append(max(0, min(length, room)))
        room -= counts[-1]
    return counts


def _key(request: GenerateRequest) -> bytes:
    """The key of a request's scope: its task, or its prompt where it names none."""
    asked = request.task.encode() or np.ascontiguousarray(request.prompt_ids).tobytes()
    return hashlib.blake2b(asked, digest_size=16, person=b"task" if request.task else b"prompt").digest()
