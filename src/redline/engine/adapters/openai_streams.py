"""Completions that a server with OpenAI's API sends as they are sampled. One that is wanted no further is ended by closing its
connection: the server then samples no more of it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing, suppress

from redline.engine.adapters.json_client import Json, JsonClient
from redline.engine.adapters.openai_answers import Answers, Sampled
from redline.engine.adapters.stepped import Call, Tokens
from redline.errors import EngineError
from redline.types import FinishReason


class OpenStream:
    """One completion on its way. A thread of the adapter reads it; `end` is for any thread."""

    def __init__(self, call: Call, news: StreamNews) -> None:
        self.call, self._news = call, news
        self._is_ended = threading.Event()
        self.first_token_at: float | None = None
        """On the monotonic clock."""
        self.is_unreadable = False
        """Whether the server sent something else than tokens with their logprobs."""

    def end(self) -> None:
        """Read no further once there is a token, and let the server know."""
        self._is_ended.set()

    def read(self, client: JsonClient, answers: Answers, body: Json) -> Sampled | None:
        """Blocks until the completion is whole, or ended: then it is all that came, with the reason `abort`. Returns None where
        the server does not send its tokens so, or the stream broke: the caller asks for the whole."""
        asked = body | {"stream": True, "stream_options": {"include_usage": True}}
        parts: list[Sampled] = []
        with suppress(EngineError), closing(client.stream("/completions", asked)) as answered:
            for answer in answered:
                parts.append(self._part(answers, answer))
                self._check_count(answer, parts)
                if self._is_ended.is_set() and self.first_token_at:
                    break
        is_over = any(part.finish_reason is not FinishReason.ABORT for part in parts)
        is_ended = self._is_ended.is_set() and self.first_token_at is not None
        is_readable = (is_over or is_ended) and not self.is_unreadable
        return answers.joined(parts, body["max_tokens"]) if is_readable else None

    def _check_count(self, answer: Json, parts: Sequence[Sampled]) -> None:
        """Raise EngineError where the server has counted other tokens than it has sent: what it sends is not what was added."""
        usage = answer.get("usage")
        told = usage.get("completion_tokens") if isinstance(usage, dict) and not answer.get("choices") else None
        if told is not None and told != sum(len(part.token_ids) for part in parts):
            self.is_unreadable = True
            raise EngineError(f"a stream of {told} tokens brought another number")

    def _part(self, answers: Answers, answer: Json) -> Sampled:
        try:
            part = answers.part(answer)
        except EngineError:
            self.is_unreadable = True
            raise
        if len(part.token_ids):
            self.first_token_at = self.first_token_at or time.monotonic()
            self._news.add(self, Tokens(part.token_ids, part.logprobs))
        return part


class StreamNews:
    """Parts of streams, from the threads that read them to the one that steps."""

    def __init__(self) -> None:
        self._parts: deque[tuple[OpenStream, Tokens]] = deque()
        self.has_come: Future[None] = Future()
        """Ends when there is something to take."""

    def add(self, stream: OpenStream, tokens: Tokens) -> None:
        self._parts.append((stream, tokens))
        with suppress(Exception):  # another thread has just said so
            self.has_come.set_result(None)

    def take(self) -> list[tuple[OpenStream, Tokens]]:
        """All that has come. For the thread that steps."""
        if self.has_come.done():
            self.has_come = Future()
        taken = []
        with suppress(IndexError):
            while True:
                taken.append(self._parts.popleft())
        return taken
