"""Puts what many attempts ask into the engine, and brings each its reply.

    ask ──► asked ──► nothing else is ready: one request for all of a group that ask the same ──► waiting ──► the engine
                                                                                   back-pressure ┘    │
    reply ◄──────────────────────────────── once a step, in the loop's thread ◄───────────────────────┘

Attempts of a group that ask the same become one request for several completions, so that their prompt is computed once. What is
sampled follows from the run's seed, the task, the attempt and the place of the ask in it, and not from what asks came together.
Requests reach the engine in the order of their groups: of those that were begun at one version, the ones that are expected to
take longest first (`lengths.py`). No more than `most` completions are
under way at once, and the others wait here; one request always fits, so nothing waits for ever.

A reply that is read while it is sampled (`streamed_reply.py`) comes in pieces. Where the environment's `until` cuts it, the
engine is told to sample no more of it; what it sampled until it heard of that is thrown away.

For the groups of a caller that holds the engine (lockstep, an evaluation) that thread hands them over: `carry_out_orders`. They
have a quota of their own: the caller steps the engine only once it has their requests, so these must not wait for others.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from redline.errors import boundary, for_a_future
from redline.ports import Session
from redline.rollouts.episodes.group import EpisodeGroup
from redline.rollouts.streamed_reply import StreamedReply
from redline.telemetry import span
from redline.types import Completion, Delta, GenerateRequest, SamplingParams


@dataclass(slots=True, frozen=True)
class AskKey:
    """What two asks of a group must have in common to become one request."""

    prompt: bytes
    max_tokens: int
    stop: tuple[str, ...]
    retry: int
    index: int


@dataclass(slots=True, eq=False)
class Ask:
    """An attempt wants a reply."""

    group: EpisodeGroup
    attempt: int
    retry: int
    """How often the attempt was begun before."""
    index: int
    """Which of the attempt's asks it is."""
    prompt_ids: np.ndarray
    max_tokens: int
    stop: tuple[str, ...]
    reply: asyncio.Future[Completion]
    streamed: StreamedReply | None = None
    """Reads the reply while it is sampled, and may end it."""

    @property
    def key(self) -> AskKey:
        return AskKey(self.prompt_ids.tobytes(), self.max_tokens, self.stop, self.retry, self.index)

    @property
    def order(self) -> tuple[tuple[int, float, int], int, int]:
        return self.group.order, self.attempt, self.index

    @property
    def is_over(self) -> bool:
        """Whether nothing waits for the reply any more."""
        return self.reply.done()


@dataclass(slots=True, eq=False)
class BrokeredRequest:
    """One request for asks of a group that are the same, by attempts that follow each other."""

    request: GenerateRequest
    asks: Sequence[Ask]
    """In the order of the request's completions, which have the indices of the attempts."""
    num_missing: int = field(init=False)
    """Completions that are still to come."""

    def __post_init__(self) -> None:
        self.num_missing = len(self.asks)

    @property
    def group(self) -> EpisodeGroup:
        return self.asks[0].group

    @property
    def is_over(self) -> bool:
        return all(ask.is_over for ask in self.asks)

    @property
    def streaming(self) -> int:
        """Tokens of a piece; 0 where no reply is read while it is sampled."""
        return min((ask.streamed.piece for ask in self.asks if ask.streamed), default=0)

    @property
    def decides(self) -> bool:
        """Whether a piece may end a reply."""
        return any(ask.streamed.decides for ask in self.asks if ask.streamed)

    def ask_of(self, piece: Delta) -> Ask:
        return self.asks[piece.index - self.request.sampling.first_index]


@dataclass(slots=True, eq=False)
class Quota:
    """How many completions may be under way at once, and the requests that wait until there is room."""

    most: int | None
    """None sets no limit."""
    num_under_way: int = 0
    """Completions that are to come of requests that were handed over."""
    waiting: list[BrokeredRequest] = field(default_factory=list)

    def wait_for_room(self, requests: Sequence[BrokeredRequest]) -> None:
        if requests:
            self.waiting = sorted([*self.waiting, *requests], key=lambda request: request.asks[0].order)

    def take_what_fits(self) -> list[BrokeredRequest]:
        """Requests that wait no longer, in the order of their groups. Returns one at least where nothing is under way."""
        count = 0
        while count < len(self.waiting) and self._fits(self.waiting[count]):
            self.num_under_way += len(self.waiting[count].asks)
            count += 1
        found, self.waiting = self.waiting[:count], self.waiting[count:]
        return found

    def _fits(self, request: BrokeredRequest) -> bool:
        return self.most is None or not self.num_under_way or self.num_under_way + len(request.asks) <= self.most


class Broker:
    """Between the attempts of all groups and the engine. Implements `ports.Receiver`; all else is for the loop's thread, unless
    it says so."""

    def __init__(
        self,
        session: Session,
        post: Callable[..., object],
        fail: Callable[[BaseException], None],
        *,
        seed: int,
        stop_token_ids: tuple[int, ...],
        most: int | None = None,
    ) -> None:
        """`post` has the loop's thread call something; `fail` gets what is wrong with the engine. `most`: completions under way
        at once, of the caller that holds the engine and of all others each."""
        self._session, self._post, self._fail = session, post, fail
        self._seed, self._stop_token_ids = seed, stop_token_ids
        self._asked: list[Ask] = []
        self._quotas = {is_here: Quota(most) for is_here in (True, False)}
        """By whether the caller that holds the engine steps it for the group."""
        self._in_engine: dict[int, BrokeredRequest] = {}
        """By the session's number."""
        self._orders: deque[Callable[[], None]] = deque()
        """What the caller's thread is to do, which holds the engine."""
        self.has_news = False
        """Whether anything was received since the caller's thread last waited for the loop."""

    # ── attempts ask ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def completion(self, ask: Ask) -> Completion:
        """What the engine samples for an ask. Cancelling it takes the ask back."""
        self._asked.append(ask)
        try:
            return await ask.reply
        finally:
            if ask.reply.cancelled():
                self.take_back_what_is_over()

    def hand_over_what_is_asked(self) -> bool:
        """Called when nothing else is ready. Returns whether anything was handed over."""
        asked, self._asked = [ask for ask in self._asked if not ask.is_over], []
        requests = self._requests(asked)
        found = []
        for is_here, quota in self._quotas.items():
            quota.wait_for_room([request for request in requests if request.group.is_here == is_here])
            found += quota.take_what_fits()
        for request in found:
            self._order(request.group, partial(self._submit, request))
        return bool(found)

    def _requests(self, asked: Sequence[Ask]) -> list[BrokeredRequest]:
        """Each has a run of attempts, so that a completion can have its attempt's index: what is sampled for an attempt then
        depends on no other."""
        together: dict[tuple[tuple[int, float, int], AskKey], list[list[Ask]]] = {}
        for ask in sorted(asked, key=lambda ask: ask.order):
            runs = together.setdefault((ask.group.order, ask.key), [])
            if runs and runs[-1][-1].attempt == ask.attempt - 1:
                runs[-1].append(ask)
            else:
                runs.append([ask])
        return [self._request(asks) for runs in together.values() for asks in runs]

    def _request(self, asks: Sequence[Ask]) -> BrokeredRequest:
        first = asks[0]
        sampling = SamplingParams(
            max_tokens=first.max_tokens,
            n=len(asks),
            first_index=first.attempt,
            temperature=first.group.temperature,
            stop_token_ids=self._stop_token_ids,
            stop=first.stop,
            seed=seed_of((self._seed << 32) + first.group.index, first.retry, first.index),
        )
        request = GenerateRequest(first.prompt_ids, sampling, order=first.group.begins, task=first.group.task.id)
        return BrokeredRequest(request, asks)

    # ── to the engine and back ─────────────────────────────────────────────────────────────────────────────────────────

    def _order(self, group: EpisodeGroup, order: Callable[[], None]) -> None:
        """Do something with the session: in the caller's thread for its own groups, here for all others."""
        if group.is_here:
            self._orders.append(order)
        else:
            order()

    @property
    def has_orders(self) -> bool:
        return bool(self._orders)

    def carry_out_orders(self) -> None:
        """In the thread that holds the engine: hand over and take back what the loop's thread has decided."""
        while self._orders:
            self._orders.popleft()()

    def _submit(self, request: BrokeredRequest) -> None:
        if request.is_over:
            self._post(self._took_back, request)
            return
        number = self._session.submit(request.request, self, streaming=request.streaming)
        self._in_engine[number] = request

    def _took_back(self, request: BrokeredRequest) -> None:
        self._quotas[request.group.is_here].num_under_way -= request.num_missing
        request.num_missing = 0

    def receive(self, pieces: Sequence[tuple[int, Delta | Exception]]) -> None:
        """Take what a step of the engine brought, in the thread that stepped it: the loop's thread hears of it once. A piece by
        which nothing is decided is no news: no step waits until it is read."""
        self.has_news |= any(self._is_news(number, piece) for number, piece in pieces)
        self._post(self._take, pieces)

    def _is_news(self, number: int, piece: Delta | Exception) -> bool:
        request = self._in_engine.get(number)
        return isinstance(piece, Exception) or piece.completion is not None or (request is not None and request.decides)

    def _take(self, pieces: Sequence[tuple[int, Delta | Exception]]) -> None:
        for number, piece in pieces:
            request = self._in_engine.get(number)
            if request is None:  # it was taken back
                continue
            if isinstance(piece, Exception):
                self._fail(piece)
                continue
            ask = request.ask_of(piece)
            if not ask.is_over:
                self._deliver(number, ask, piece)
            if piece.completion is None:
                continue
            request.num_missing -= 1
            self._quotas[request.group.is_here].num_under_way -= 1
            if not request.num_missing:
                del self._in_engine[number]

    def _deliver(self, number: int, ask: Ask, piece: Delta) -> None:
        """Read what has come of a reply. Where it is cut there, have no more of it sampled. What the environment's `until`
        raises is raised where the environment asked."""
        whole, streamed = piece.completion, ask.streamed
        with boundary() as caught:
            if streamed is not None:
                with span("rollouts.parse", awaits=False):
                    whole = streamed.take(piece)
        if caught.error is not None:
            ask.reply.set_exception(for_a_future(caught.error))
        elif whole is not None:
            ask.reply.set_result(whole)
        if piece.completion is None and streamed is not None and (caught.error is not None or streamed.is_cut):
            self._order(ask.group, partial(self._session.end, number, piece.index))

    def take_back_what_is_over(self) -> None:
        """Abort requests for which no attempt waits any more."""
        self._asked = [ask for ask in self._asked if not ask.is_over]
        for quota in self._quotas.values():
            quota.waiting = [request for request in quota.waiting if not request.is_over]
        for number, request in [(n, r) for n, r in list(self._in_engine.items()) if r.is_over and r.num_missing]:
            del self._in_engine[number]
            self._took_back(request)
            self._order(request.group, partial(self._session.abort, number))

    # ── what others ask, from any thread ───────────────────────────────────────────────────────────────────────────────

    def is_sampling(self, groups: Sequence[EpisodeGroup]) -> bool:
        """Whether the engine has requests of these groups, all of which are the caller's own."""
        wanted = {id(group) for group in groups}
        return any(id(request.group) in wanted for request in list(self._in_engine.values()))

    def sampled_tokens(self, group: EpisodeGroup) -> dict[int, int]:
        """Attempt → tokens of the replies to it that are being sampled. Does not block."""
        found: dict[int, int] = {}
        for number, request in list(self._in_engine.items()):
            if request.group is group:
                so_far = self._session.sampled_tokens(number)
                for ask in request.asks:
                    found[ask.attempt] = found.get(ask.attempt, 0) + so_far.get(ask.attempt, 0)
        return found

    @property
    def num_waiting(self) -> int:
        """Requests that wait for room in the engine."""
        return sum(len(quota.waiting) for quota in self._quotas.values())


def seed_of(seed: int, retry: int, index: int) -> int:
    """The seed of all asks of a task that are the `index`-th of their attempt; the attempt is the index of the completion. All
    63 bits of `seed` are taken by the run and the task already, so the rest is hashed in; the first asks have the seed itself,
    as a task of a single turn has."""
    if not (retry or index):
        return seed
    digest = hashlib.blake2b(f"{seed}/{retry}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
