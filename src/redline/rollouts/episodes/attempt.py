"""One try at a task, and the policy as its environment sees it.

say ──► conversation: tokens ──► budget ──► broker ┄┄ the engine ┄┄ completion ──► message, tool calls ──► Turn
                                               └┄┄┄┄┄┄ pieces of it ──► until, tool calls so far
"""

from __future__ import annotations

import asyncio
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from redline.errors import BudgetError, RedlineError, TaskError
from redline.rollouts.chat import Chat
from redline.rollouts.conversation import Asked, Conversation
from redline.rollouts.episodes.broker import Ask, Broker
from redline.rollouts.episodes.group import EpisodeGroup
from redline.rollouts.episodes.sequences import SequenceUnderWay
from redline.rollouts.streamed_reply import StreamedReply
from redline.say_arguments import check_messages, check_role, check_until, checked_max_tokens, checked_stop
from redline.telemetry import span
from redline.telemetry.stalls.stacks import current_frames, place_of
from redline.types import Completion, GenerateRequest, Message, SamplingParams, Turn, Until

REFUSALS_AT_ONCE = 100
"""Asks of an attempt that are refused without a rest."""
REFUSED_S = 0.01
"""Seconds that each further one rests first."""


@dataclass(slots=True, frozen=True)
class Limits:
    """How far an attempt may go; None sets no limit."""

    max_new_tokens: int
    """Most tokens of one reply."""
    max_prompt_tokens: int | None = None
    """Most tokens that one reply goes on from."""
    max_turns: int | None = None
    max_tokens: int | None = None
    """Most tokens of all sequences of an attempt together."""


class Loop(Protocol):
    """Where attempts run."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    @property
    def is_here(self) -> bool:
        """Whether the calling thread is the loop's."""
        ...


@dataclass(slots=True, frozen=True)
class Shared:
    """What all attempts use."""

    chat: Chat
    stop_token_ids: tuple[int, ...]
    limits: Limits
    broker: Broker
    loop: Loop
    check_request: Callable[[GenerateRequest], None]
    """Raises what the engine has against a request."""


@dataclass(slots=True, eq=False)
class _Line:
    """One conversation of a role, and the sequence that it is trained as."""

    conversation: Conversation
    sequence: SequenceUnderWay | None = None
    is_asking: bool = False

    def going_on(self, asked: Asked) -> SequenceUnderWay | None:
        """The sequence that a prompt goes on from; None where it begins a new one."""
        goes_on = self.sequence is not None and not asked.starts_anew and self.sequence.goes_on_with(asked.prompt_ids)
        return self.sequence if goes_on else None


class PlayedAttempt:
    """One try at a task. Implements `ports.Policy`: for an environment whose `play` runs in a thread, `say` blocks."""

    def __init__(self, group: EpisodeGroup, index: int, retry: int, shared: Shared) -> None:
        self.group, self.index, self.retry = group, index, retry
        self._shared = shared
        self._lines: dict[str, list[_Line]] = {}
        """By role."""
        self.sequences: list[SequenceUnderWay] = []
        """In the order in which they began."""
        self._asks: list[Ask] = []
        """Those that wait for a reply."""
        self._num_asks = 0
        self._num_tokens = 0
        """Tokens of all sequences, and the most that the asks which wait for a reply may add."""
        self._num_refused = 0
        self._since = time.perf_counter()
        """When the environment's own time began: with the attempt, an ask or a reply."""
        self.refusal: Exception | None = None
        """What was wrong with a prompt."""
        self.is_truncated = False
        """Whether a budget was used up."""
        self.is_over = False
        self.thread: threading.Thread | None = None
        """The thread in which `play` runs, where it is not `async`."""

    @property
    def roles(self) -> list[str]:
        """Who has spoken."""
        return list(dict.fromkeys(sequence.role for sequence in self.sequences))

    def place(self) -> str:
        """The place in the user's code where the thread of the attempt is; empty where it has none."""
        frame = current_frames().get(self.thread.ident or 0) if self.thread else None
        return place_of(traceback.extract_stack(frame)) if frame else ""

    def end(self) -> float:
        """Nothing more is asked. Returns the seconds since the last reply."""
        self.is_over = True
        for ask in self._asks:
            ask.reply.cancel()
        if self._asks:
            self._shared.broker.take_back_what_is_over()
        return time.perf_counter() - self._since

    def fail(self, error: Exception) -> None:
        """Have every ask that waits for a reply raise this."""
        for ask in self._asks:
            if not ask.is_over:
                ask.reply.set_exception(error)

    # ── ports.Policy ───────────────────────────────────────────────────────────────────────────────────────────────────

    def say(
        self,
        messages: Sequence[Message],
        *,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        until: Until | None = None,
    ) -> Any:
        """As `ports.Policy.say`: in the event loop what it returns is awaited, in any other thread it is the turn itself.
        Raises TaskError for arguments that nothing can be made of."""
        reply = self._say(messages, role, tools, stop, max_tokens, until)
        if self._shared.loop.is_here:
            return reply
        return asyncio.run_coroutine_threadsafe(reply, self._shared.loop.loop).result()

    async def _say(
        self,
        messages: Sequence[Message],
        role: str,
        tools: Sequence[Mapping[str, Any]],
        stop: Sequence[str],
        max_tokens: int | None,
        until: Until | None,
    ) -> Turn:
        began = time.perf_counter()
        environment_s, self._since = began - self._since, began
        try:
            check_role(role)
            check_messages(messages, tools)
            check_until(until)
            stops = checked_stop(stop)
            line, asked, limit = self._begin(messages, role, tools, stops, checked_max_tokens(max_tokens))
        except RedlineError:
            await self._pause()
            raise
        asked_at = time.perf_counter()
        line.is_asking = True  # and where it is cancelled, it stays so: nothing goes on from a reply that did not come
        reserved = self._num_new(asked, line) + limit
        self._num_tokens += reserved
        streamed = self._streamed(line, tools, until)
        try:
            completion = await self._completion(asked.prompt_ids, limit, stops, streamed)
        finally:
            self._num_tokens -= reserved
        line.is_asking = False
        with span("rollouts.parse", awaits=False):
            turn = self._turn(line, completion, streamed, environment_s, asked_at - began)
            self._take(line, role, asked, completion, turn)
        self._since = time.perf_counter()
        return turn

    def _begin(
        self,
        messages: Sequence[Message],
        role: str,
        tools: Sequence[Mapping[str, Any]],
        stop: tuple[str, ...],
        max_tokens: int | None,
    ) -> tuple[_Line, Asked, int]:
        """The conversation that goes on, its prompt, and the tokens that the reply may have. Raises why there is none."""
        if self.is_over:
            raise TaskError("the attempt has ended", "ask the policy only while `play` runs")
        self._check_turns()
        line = self._line(role, messages, tools)
        with span("rollouts.prompts", awaits=False):
            asked = self._prompt(line, messages, tools)
            return line, asked, self._limit(asked, line, stop, max_tokens)

    async def _pause(self) -> None:
        """Let others run before an ask is refused: an environment that asks again whatever is raised would keep the loop for
        itself, and its time limit could not end it. After many refusals it rests, since asks are handed over only then."""
        self._num_refused += 1
        await asyncio.sleep(0 if self._num_refused <= REFUSALS_AT_ONCE else REFUSED_S)

    def _line(self, role: str, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Line:
        """The conversation of a role that goes on with these messages, or a new one: a role may have several, one after the
        other, in turns or at once."""
        lines = self._lines.setdefault(role, [])
        for line in reversed(lines):
            if not line.is_asking and line.conversation.goes_on(messages, tools):
                return line
        conversation = Conversation(self._shared.chat, self._shared.stop_token_ids, self.group.first_prompts)
        lines.append(_Line(conversation))
        return lines[-1]

    def _prompt(self, line: _Line, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> Asked:
        try:
            return line.conversation.ask(messages, tools)
        except RedlineError as error:
            self.refusal = error
            raise

    def _streamed(self, line: _Line, tools: Sequence[Mapping[str, Any]], until: Until | None) -> StreamedReply | None:
        """Reads the reply while it is sampled, where there are calls to be found or `until` may end it."""
        if not tools and until is None:
            return None
        return StreamedReply(self._shared.chat, line.conversation.reader, self._shared.stop_token_ids, until)

    async def _completion(
        self, prompt_ids: Any, limit: int, stop: tuple[str, ...], streamed: StreamedReply | None
    ) -> Completion:
        reply: asyncio.Future[Completion] = self._shared.loop.loop.create_future()
        ask = Ask(self.group, self.index, self.retry, self._num_asks, prompt_ids, limit, stop, reply, streamed)
        self._num_asks += 1
        self._asks.append(ask)
        try:
            return await self._shared.broker.completion(ask)
        finally:
            self._asks.remove(ask)

    # ── budgets ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _check_turns(self) -> None:
        most = self._shared.limits.max_turns
        if most is not None and self._num_asks >= most:
            self._out_of(f"the attempt has had its {most} turns", "raise rollouts.environment.max_turns")

    def _limit(self, asked: Asked, line: _Line, stop: tuple[str, ...], wanted: int | None) -> int:
        """Tokens that the reply may have. Raises where there is no room for any."""
        limits, length = self._shared.limits, len(asked.prompt_ids)
        if limits.max_prompt_tokens is not None and length > limits.max_prompt_tokens:
            self._too_long(length, limits.max_prompt_tokens)
        limit = limits.max_new_tokens if wanted is None else max(1, min(wanted, limits.max_new_tokens))
        if limits.max_tokens is not None:
            left = limits.max_tokens - self._num_tokens - self._num_new(asked, line)
            if left < 1:
                hint = "raise rollouts.environment.max_tokens, or show the policy less"
                self._out_of(f"the attempt has used up its {limits.max_tokens} tokens", hint)
            limit = min(limit, left)
        self._check_with_engine(asked, SamplingParams(max_tokens=limit, stop=stop))
        return limit

    def _num_new(self, asked: Asked, line: _Line) -> int:
        """Tokens of a prompt that no earlier turn of the attempt has counted."""
        sequence = line.going_on(asked)
        return len(asked.prompt_ids) - (len(sequence.token_ids) if sequence else 0)

    def _check_with_engine(self, asked: Asked, sampling: SamplingParams) -> None:
        try:
            self._shared.check_request(GenerateRequest(asked.prompt_ids, sampling))
        except RedlineError as error:
            self.refusal = error
            raise

    def _too_long(self, length: int, room: int) -> None:
        hint = "lower rollouts.max_new_tokens, or show the policy less"
        if self.sequences:
            self._out_of(f"a conversation of {length} tokens, but there is room for {room}", hint)
        self.refusal = TaskError(f"a prompt of {length} tokens, but there is room for {room}", hint)
        raise self.refusal

    def _out_of(self, reason: str, hint: str) -> None:
        self.is_truncated = True
        raise BudgetError(reason, hint)

    # ── replies ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _turn(
        self, line: _Line, completion: Completion, streamed: StreamedReply | None, environment_s: float, prompt_s: float
    ) -> Turn:
        began = time.perf_counter()
        reply = line.conversation.replied(completion.token_ids, streamed.reader if streamed else None)
        return Turn(
            text=reply.text,
            start=reply.start,
            end=reply.end,
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            queue_s=completion.queue_s,
            prefill_s=completion.prefill_s,
            decode_s=completion.decode_s,
            message=reply.message,
            tool_calls=reply.tool_calls,
            problem=reply.problem,
            environment_s=environment_s,
            prompt_s=prompt_s,
            parse_s=time.perf_counter() - began + (streamed.seconds if streamed else 0.0),
            switches=completion.switches,
        )

    def _take(self, line: _Line, role: str, asked: Asked, completion: Completion, turn: Turn) -> None:
        sequence = line.going_on(asked)
        if sequence is None:
            sequence = SequenceUnderWay(role)
            line.sequence = sequence
            self.sequences.append(sequence)
        self._num_tokens += len(asked.prompt_ids) + turn.num_tokens - len(sequence.token_ids)
        sequence.take(asked.prompt_ids, completion, turn)
        sampled = self.group.num_sampled
        sampled[self.index] = sampled.get(self.index, 0) + turn.num_tokens
