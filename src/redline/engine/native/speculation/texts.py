"""What was sampled before, found by its last few tokens.

A text is a prompt or a completion, finished or still growing. Texts of one scope answer the same question: the siblings of a
group, and earlier attempts at the same task. An n-gram leads to a place of its scope that follows on it: the newest of those
that go on with the most frequent token.

    last tokens of a row ──hash with the scope──► table ──► (text, place) ──compare──► what follows there

Memory is bounded twice. The table has a fixed number of places. Finished texts are kept up to a number of tokens and of texts:
those of the scope that was asked for longest ago go first, and of one scope the oldest. A scope is indexed when a row of it
first asks, so that texts that nobody continues cost nothing but their tokens.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from redline.engine.native.running.rows import Rows
from redline.engine.native.sequence import NO_ROW, Stage
from redline.engine.native.sequence import Sequence as Sequence_

ORDERS = (6, 3)
"""Lengths of the n-grams that are looked up, the longest first."""
MAX_TOKENS = 1 << 21
"""Tokens of finished texts that are kept: 8 MiB."""
MAX_SCOPE_TOKENS = 1 << 17
"""The same of one scope: of a task that comes again and again, the newest attempts."""
MAX_TEXTS = 1 << 15
"""Texts that are kept, of which each takes about a kilobyte beside its tokens."""
SCOPES = 16
"""One scope has at most one in so many of all texts, and of all tokens."""
MAX_PROMPT_TOKENS = 1 << 12
"""The end of a prompt that is kept; every turn of a conversation has one."""
TABLE_SIZE = 1 << 20
"""N-grams that can be found: 13 MiB."""
PIECE = 2
"""New tokens of a growing text that are worth indexing."""
MOST_VOTES = 3
"""For what follows on an n-gram: as often as this, and once more, something else must follow before it is forgotten."""
_OFFSET_BITS = 24
_FACTORS = np.array([0x9E3779B97F4A7C15 * (2 * i + 1) ** 3 % 2**64 for i in range(max(ORDERS))], np.uint64)
_MULTIPLIER = np.uint64(0xBF58476D1CE4E5B9)


@dataclass(slots=True, eq=False)
class Text:
    """A completion with the end of its prompt in front, or a whole prompt."""

    number: int
    scope: Scope
    lead: np.ndarray
    """int32: the end of the prompt, so that the first tokens have something to follow on."""
    tokens: np.ndarray
    """int32, without the lead; of a growing text, what it had when it last lost its row."""
    sequence: Sequence_ | None = None
    """What it grows with; None once it is finished."""
    num_indexed: int = 0
    """Tokens, the lead included, up to which its n-grams are in the table."""

    def read(self, rows: Rows) -> np.ndarray:
        """int32: lead and tokens."""
        return np.concatenate([self.lead, self.sampled(rows)])

    def sampled(self, rows: Rows) -> np.ndarray:
        """int32: the tokens, as far as the host has heard."""
        sequence = self.sequence
        if sequence is None:
            return self.tokens
        if sequence.stage is Stage.DECODE:
            return rows.tokens_RN[sequence.row, : rows.sampled_R[sequence.row]]
        return self.tokens if sequence.sampled is None else sequence.sampled.token_ids

    def num_tokens(self, rows: Rows) -> int:
        return len(self.lead) + len(self.sampled(rows))

    @property
    def num_kept(self) -> int:
        """Tokens, once it grows no more."""
        return len(self.lead) + len(self.tokens)


@dataclass(slots=True, eq=False)
class Scope:
    """Texts that answer the same question."""

    hash: int
    texts: dict[int, Text] = field(default_factory=dict)
    """By number, the oldest first."""
    pending: dict[int, Text] = field(default_factory=dict)
    """Those whose n-grams are not all in the table, and all that grow."""
    num_tokens: int = 0
    """Tokens of the texts that grow no more."""
    num_growing: int = 0
    prompt_ids: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """The newest prompt among the texts."""
    indexed_at: int = 0
    """Entries that the table had taken when it was last indexed from the start."""


@dataclass(slots=True)
class Place:
    """Where a row's text is found again."""

    text: Text
    offset: int
    """Where the next token is in what `Text.read` returns."""


class Texts:
    """What the engine has sampled, and where the tokens of a row occurred before."""

    def __init__(
        self,
        rows: Rows,
        max_tokens: int = MAX_TOKENS,
        max_scope_tokens: int = MAX_SCOPE_TOKENS,
        table_size: int = TABLE_SIZE,
        max_texts: int = MAX_TEXTS,
    ) -> None:
        assert table_size & (table_size - 1) == 0
        self._rows, self._max_tokens, self._max_scope_tokens, self._max_texts = rows, max_tokens, max_scope_tokens, max_texts
        self._table = np.full(table_size, -1, np.int64)
        """Number of a text and an offset in it; -1 where no n-gram is."""
        self._next = np.full(table_size, -1, np.int32)
        """The token there."""
        self._votes = np.zeros(table_size, np.int8)
        self._table_size = table_size
        self._num_entries = 0
        self._scopes: OrderedDict[bytes, Scope] = OrderedDict()
        self._texts: dict[int, Text] = {}
        self._num_texts = 0
        self.num_kept_tokens = 0
        """Tokens of finished texts, prompts included."""

    # ── what there is ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, key: bytes, sequence: Sequence_) -> Text:
        """A completion begins to grow, in the scope of this key."""
        scope, request = self._scope(key), sequence.request
        if sequence.index == request.sampling.first_index:  # the others of the request have the same prompt
            self._add_prompt(scope, request.prompt_ids[-MAX_PROMPT_TOKENS:])
        scope.num_growing += 1
        return self._add(scope, _lead(request.prompt_ids), np.empty(0, np.int32), sequence)

    def end(self, text: Text) -> None:
        """It grows no more; what it has is kept."""
        text.tokens, text.sequence = text.sampled(self._rows), None
        text.scope.num_growing -= 1
        self._keep(text)

    def remember(self, key: bytes, token_ids: np.ndarray) -> None:
        """A completion with its prompt that was sampled elsewhere, or in an earlier run."""
        tokens = token_ids.astype(np.int32)
        self._keep(self._add(self._scope(key), tokens[:0], tokens))

    def _scope(self, key: bytes) -> Scope:
        scope = self._scopes.get(key)
        if scope is None:
            scope = self._scopes[key] = Scope(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little"))
        self._scopes.move_to_end(key)
        return scope

    def _add_prompt(self, scope: Scope, prompt_ids: np.ndarray) -> None:
        if not np.array_equal(prompt_ids, scope.prompt_ids):
            scope.prompt_ids = prompt_ids.copy()
            self._keep(self._add(scope, scope.prompt_ids[:0], scope.prompt_ids))

    def _add(self, scope: Scope, lead: np.ndarray, tokens: np.ndarray, sequence: Sequence_ | None = None) -> Text:
        text = Text(self._num_texts, scope, lead, tokens, sequence)
        self._num_texts += 1
        self._texts[text.number] = scope.texts[text.number] = scope.pending[text.number] = text
        return text

    def _keep(self, text: Text) -> None:
        scope = text.scope
        scope.num_tokens += text.num_kept
        self.num_kept_tokens += text.num_kept
        while scope.num_tokens > self._max_scope_tokens or len(scope.texts) - scope.num_growing > self._max_texts // SCOPES:
            self._forget(next(other for other in scope.texts.values() if other.sequence is None))
        while self.num_kept_tokens > self._max_tokens or len(self._texts) > self._max_texts:
            idle = next((key for key, scope in self._scopes.items() if not scope.num_growing), None)
            if idle is None:
                return
            for forgotten in list(self._scopes.pop(idle).texts.values()):
                self._forget(forgotten)

    def _forget(self, text: Text) -> None:
        del self._texts[text.number], text.scope.texts[text.number]
        text.scope.pending.pop(text.number, None)
        text.scope.num_tokens -= text.num_kept
        self.num_kept_tokens -= text.num_kept

    # ── the index ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def index(self, scopes: Sequence[Scope]) -> None:
        """Bring the n-grams of these scopes up to date."""
        grown: list[Text] = []
        for scope in scopes:
            if self._num_entries - scope.indexed_at > self._table_size // 2:  # others may have taken its places since
                scope.indexed_at, scope.pending = self._num_entries, scope.texts.copy()
                for text in scope.texts.values():
                    text.num_indexed = 0
            grown += [text for text in scope.pending.values() if text.sequence and self._has_piece(text)]
            for text in [text for text in scope.pending.values() if text.sequence is None]:
                self._index(text)
                del scope.pending[text.number]
        self._index_grown(grown)

    def _has_piece(self, text: Text) -> bool:
        return text.num_tokens(self._rows) - text.num_indexed >= PIECE

    def _index_grown(self, texts: Sequence[Text]) -> None:
        """All at once where they are in their rows and their n-grams begin behind the prompt: as in most steps."""
        longest, fast = max(ORDERS), list[tuple[Text, int]]()
        for text in texts:
            sequence = text.sequence
            if sequence and sequence.stage is Stage.DECODE and text.num_indexed >= len(text.lead) + longest:
                fast.append((text, sequence.row))
            else:
                self._index(text)
        if not fast:
            return
        rows_B = np.array([row for _, row in fast])
        begins_B, ends_B = np.array([text.num_indexed - len(text.lead) for text, _ in fast]), self._rows.sampled_R[rows_B]
        counts_B = ends_B - begins_B
        which_T = np.repeat(np.arange(len(fast)), counts_B)
        places_T = np.arange(counts_B.sum()) - (np.cumsum(counts_B) - counts_B - begins_B)[which_T]
        hashes_T = np.array([text.scope.hash for text, _ in fast], np.uint64)[which_T]
        entries_T = np.array([(text.number << _OFFSET_BITS) + len(text.lead) for text, _ in fast])[which_T] + places_T
        for order in reversed(ORDERS):
            grams_TO = self._rows.tokens_RN[rows_B[which_T, None], places_T[:, None] + np.arange(-order, 0)]
            self._file(self._slots(grams_TO, hashes_T), entries_T, self._rows.tokens_RN[rows_B[which_T], places_T])
        for (text, _), end in zip(fast, ends_B.tolist(), strict=True):
            text.num_indexed = len(text.lead) + end

    def _index(self, text: Text) -> None:
        """Every n-gram that a token follows on."""
        tokens = text.read(self._rows)
        for order in reversed(ORDERS):
            first = max(order, text.num_indexed)
            if first >= len(tokens):
                continue
            offsets = np.arange(first, len(tokens))
            grams = np.lib.stride_tricks.sliding_window_view(tokens[first - order : -1], order)
            entries = (text.number << _OFFSET_BITS) + offsets
            self._file(self._slots(grams, np.uint64(text.scope.hash)), entries, tokens[first:])
        text.num_indexed = len(tokens)

    def _file(self, slots_N: np.ndarray, entries_N: np.ndarray, tokens_N: np.ndarray) -> None:
        """N-grams are followed by these tokens at these entries. Of what follows on the same n-gram, the most frequent stays,
        at its newest place."""
        votes_N = self._votes[slots_N] + np.where(self._next[slots_N] == tokens_N, 1, -1)
        new_N = (votes_N < 0) | (self._next[slots_N] == tokens_N)
        self._table[slots_N[new_N]], self._next[slots_N[new_N]] = entries_N[new_N], tokens_N[new_N]
        self._votes[slots_N] = votes_N.clip(0, MOST_VOTES)
        self._num_entries += len(slots_N)

    def _slots(self, grams_NO: np.ndarray, hashes: np.ndarray | np.uint64) -> np.ndarray:
        """int64[N]: where n-grams have their places in the table; `hashes` are those of their scopes."""
        factors = _FACTORS[: grams_NO.shape[1]]
        sums = (grams_NO.astype(np.uint64) * factors).sum(axis=1, dtype=np.uint64) ^ hashes
        return ((sums * _MULTIPLIER) >> np.uint64(32)).astype(np.int64) & (self._table_size - 1)

    def find(self, texts: Sequence[Text]) -> list[Place | None]:
        """A place in its scope that follows on the last tokens of each text, as many of them as are known."""
        found: list[Place | None] = [None] * len(texts)
        if not texts:
            return found
        last_BO, counts_B = self._last(texts)
        hashes_B = np.array([text.scope.hash for text in texts], np.uint64)
        for order in ORDERS:
            entries_B = self._table[self._slots(last_BO[:, -order:], hashes_B)]
            for b in np.flatnonzero((entries_B >= 0) & (counts_B >= order)).tolist():
                if found[b] is None:
                    found[b] = self._place(int(entries_B[b]), last_BO[b, -order:].tolist())
        return found

    def _place(self, entry: int, gram: list[int]) -> Place | None:
        """What an entry of the table says, unless its text is forgotten or it was made for another n-gram."""
        text, offset = self._texts.get(entry >> _OFFSET_BITS), entry & ((1 << _OFFSET_BITS) - 1)
        if text is None or self.slice(text, offset - len(gram), offset) != gram:
            return None
        return Place(text, offset)

    def _last(self, texts: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
        """The last tokens of each text, as many as the longest n-gram has, and how many of them there are."""
        longest = max(ORDERS)
        last_BO, counts_B = np.zeros((len(texts), longest), np.int32), np.full(len(texts), longest)
        rows_B = np.array([text.sequence.row if text.sequence else NO_ROW for text in texts])
        sampled_B = self._rows.sampled_R[rows_B]
        old_B = (rows_B != NO_ROW) & (sampled_B >= longest)
        last_BO[old_B] = self._rows.tokens_RN[rows_B[old_B, None], sampled_B[old_B, None] + np.arange(-longest, 0)]
        for b in np.flatnonzero(~old_B).tolist():  # the end of the prompt is among them
            tokens = texts[b].read(self._rows)[-longest:]
            counts_B[b] = len(tokens)
            last_BO[b, longest - len(tokens) :] = tokens
        return last_BO, counts_B

    def slice(self, text: Text, begin: int, end: int) -> list[int]:
        """Tokens [begin, end) of what `Text.read` returns, or as many as there are."""
        lead = len(text.lead)
        sampled = text.sampled(self._rows)
        if begin >= lead:
            return sampled[begin - lead : end - lead].tolist()
        return [*text.lead[begin:end].tolist(), *sampled[: max(0, end - lead)].tolist()]


def _lead(prompt_ids: np.ndarray) -> np.ndarray:
    return prompt_ids[-max(ORDERS) :].copy()  # not a view: that would keep the whole prompt
