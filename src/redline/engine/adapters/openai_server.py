"""Any OpenAI-compatible server behind the port: vLLM, SGLang, `redline serve`.

Prompts go as token ids to /v1/completions and token ids come back, so nothing is ever tokenised twice. Every completion is an
HTTP request of its own, with a seed of its own, since servers disagree on what a seed means for n > 1.

Where somebody reads a completion while it is sampled, the server streams it, and closing the connection ends it there.

A server that is trained may be started again at any moment, with the weights of its model. An answer counts where the server
says after it that it has the weights that it was left with, and has not got them back since it was asked; else everything under
way is asked again, as soon as `WeightsThere` has brought them back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, Protocol

import numpy as np

from redline.addresses import fits_header
from redline.engine.adapters.call_threads import CallThreads, in_thread
from redline.engine.adapters.json_client import Json, JsonClient
from redline.engine.adapters.limits import UNLIMITED, limits_of
from redline.engine.adapters.openai_answers import Answers
from redline.engine.adapters.openai_requests import certainties, sampling_fields
from redline.engine.adapters.openai_streams import OpenStream, StreamNews
from redline.engine.adapters.scoring import scored, wants_scores
from redline.engine.adapters.stepped import Call, Came, SteppedAdapter
from redline.errors import EngineError, EngineLostError, WeightSyncError
from redline.telemetry import span
from redline.types import Completion, GenerateRequest, SamplingParams, VersionSpan, WeightUpdate

ANSWERS_S = 0.05
"""Seconds that a step waits for an answer: for as long others wait for the engine to be between two steps."""
CERTAIN = -1e-3
"""A token that was the only choice has at least this logprob, rounding included."""
MOST_PIECE = 8
"""Tokens of a piece up to which the server streams: it sends an event for every token, which larger pieces are to spare us."""
MAX_RESTORES = 5
"""How often in a row a server may lose its weights before it has answered anything."""


class WeightsThere(Protocol):
    """The weights of a server that is trained, between two updates: `weight_sync.transports.watched_servers.WatchedServers`."""

    @property
    def num_losses(self) -> int:
        """How often the server was given weights in place of others than it was left with. Goes up right after."""
        ...

    def are_there(self) -> bool:
        """Whether the server says that it has the weights that it was left with. Blocks for its answer."""
        ...

    def restore(self) -> None:
        """Block until the server has the current version again. Raises WeightSyncError or EngineLostError where it does not
        get it."""
        ...


class OpenAIServerEngine(SteppedAdapter):
    """A client of one server. Implements `ports.Engine` and `ports.SteppedEngine`; a step waits a moment for answers."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        api_key_env: str | None = None,
        max_concurrent: int = 64,
        timeout_s: float = 600.0,
        num_retries: int = 4,
        push_weights: Callable[[WeightUpdate], None] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """`url` ends in /v1. The model is by default the first that the server lists; the key is in the variable `api_key_env`.
        `push_weights` gets an update's weights to the server before it returns. `extra` goes into every request."""
        self._client = JsonClient(url, _api_key(api_key_env), timeout_s, num_retries)
        self._answers = Answers(self._client.url)
        self._push_weights = push_weights
        self._extra = dict(extra or {})
        self._checked: set[str] = set()
        self._served = _served(self._client)
        self._model = next(iter(self._served), "") if model is None else model
        if self._model not in self._served:
            known = ", ".join(self._served) or "no model at all"
            raise EngineError(f"{url} does not serve the model {self._model!r}", f"it serves: {known}")
        limits = limits_of(self._served[self._model].get("max_model_len") or UNLIMITED)
        super().__init__(limits, max_concurrent, set(self._served) - {self._model})
        self._threads = CallThreads(max_concurrent, "openai-server")
        self._futures: dict[Future[Completion], Call] = {}
        self._streams: dict[Call, OpenStream] = {}
        """Calls that come as they are sampled. One that is made again comes whole: its parts would not follow those before."""
        self._news = StreamNews()
        self._can_stream = not self._is_sglang  # nobody has tried what that streams
        """Whether the server sends tokens with their logprobs in streams, as far as known."""
        self._newest = 0
        """The newest version that the server may sample from."""
        self._weights: WeightsThere | None = None
        self._num_losses = 0
        """What `WeightsThere` had counted before the calls that are under way began."""
        self._restoring: Future[None] | None = None
        """Ends when the server has its weights again."""
        self._again: list[Call] = []
        """Calls that wait for that."""
        self._num_restores = 0
        """Since the last answer."""

    @property
    def base_of_adapter(self) -> str | None:
        """The model whose adapter it samples from; None where it samples from a model itself."""
        return self._served[self._model].get("parent")

    # ── weights ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def watch(self, weights: WeightsThere) -> None:
        """Use answers from now on only where the server still has the weights that it was left with."""
        self._weights = weights

    def adopting(self, version: int) -> None:
        """The server may sample from this version from now on."""
        self._newest = version

    def apply(self, update: WeightUpdate) -> None:
        """A server keeps its weights unless somebody pushes new ones."""
        if update.version != self.version:
            if self._push_weights is None:
                raise EngineError(
                    f"the server cannot take over version {update.version} of the weights",
                    "give the engine a `push_weights`, or train with another engine",
                )
            with span("engine.push_weights", version=update.version):
                self._push_weights(update)
        self._newest = update.version
        super().apply(update)

    def versions_of(self, call: Call) -> VersionSpan:
        """From the version that the server had when it was asked to the newest that it may have now."""
        return VersionSpan(call.version, max(call.version, self._newest))

    # ── calls ──────────────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, request: GenerateRequest) -> None:
        """Examine the server's logprobs. One that is trained and away now is examined by the call itself, when it is back."""
        if self._restoring is not None:
            return
        try:
            self._check_logprobs(request)
        except EngineLostError:
            if self._weights is None:
                raise

    def begin(self, call: Call) -> None:
        if self._restoring is not None:
            self._again.append(call)
            return
        stream = None
        if self._is_streamed(call):
            stream = self._streams[call] = OpenStream(call, self._news)
        self._futures[self._threads.submit(lambda: self._complete(call, stream))] = call

    def _is_streamed(self, call: Call) -> bool:
        is_wanted = 0 < call.streaming <= MOST_PIECE and not call.request.sampling.top_logprobs
        return is_wanted and self._can_stream and not call.num_tokens

    def end(self, request_id: int, index: int) -> None:
        """Close the connection of one completion; what it has comes with a later step. One that is not streamed goes on."""
        for call, stream in self._streams.items():
            if (call.request_id, call.index) == (request_id, index):
                stream.end()

    def advance(self) -> list[tuple[Call, Came]]:
        """Wait a moment for an answer, and return all that are there."""
        if self._restoring is not None:
            self._begin_again(self._restoring)
            return []
        with span("engine.generate", version=self.version):
            wait(list[Future[Any]]([*self._futures, self._news.has_come]), ANSWERS_S, FIRST_COMPLETED)
        done = [future for future in self._futures if future.done()]
        came: list[tuple[Call, Came]] = [(self._futures.pop(future), _outcome(future)) for future in done]
        if self._weights is None or not self._is_lost(self._weights, came):
            self._num_restores = 0 if came else self._num_restores
            parts = self._parts()
            for call, _ in came:
                self._close(call)
            return [*parts, *came]
        self._restore(self._weights, [call for call, _ in came])
        return []

    def _parts(self) -> list[tuple[Call, Came]]:
        """What streams have brought, all that came before the end of a call included."""
        return [(stream.call, tokens) for stream, tokens in self._news.take() if self._streams.get(stream.call) is stream]

    def _restore(self, weights: WeightsThere, calls: Sequence[Call]) -> None:
        """Begin to bring the weights back. These calls and all that are under way are made again afterwards."""
        self._num_restores += 1
        if self._num_restores > MAX_RESTORES:
            why = f"{self._client.url} was lost {MAX_RESTORES} times in a row before it had answered anything"
            raise EngineLostError(why, "its log may say why; one of the requests may end it")
        self._again = [*calls, *self._futures.values()]
        self._forget(list(self._futures))
        for call in self._again:
            self._close(call)
        self._restoring = in_thread(weights.restore, "openai-server-weights")

    def _is_lost(self, weights: WeightsThere, came: Sequence[tuple[Call, Came]]) -> bool:
        """Whether the server was away, or without its weights, since calls under way began."""
        if any(isinstance(outcome, EngineLostError) for _, outcome in came):
            return True
        return (bool(came) and not weights.are_there()) or weights.num_losses != self._num_losses

    def _begin_again(self, restoring: Future[None]) -> None:
        with span("engine.generate", version=self.version):
            done, _ = wait([restoring], ANSWERS_S)
        if not done:
            return
        try:
            restoring.result()
        except (WeightSyncError, EngineLostError) as error:
            why = f"{self._client.url} has lost the weights that it was sent, and does not get them back: {error.message}"
            raise EngineLostError(why, error.hint) from error
        assert self._weights is not None
        calls, self._again, self._restoring = self._again, [], None
        self._num_losses = self._weights.num_losses
        self._checked.clear()  # it may have been started in another way
        for call in calls:
            self.begin(call)

    def cancel(self, calls: Sequence[Call]) -> None:
        """The server goes on with a call that has begun and is not streamed: OpenAI's API cannot end one."""
        self._again = [call for call in self._again if call not in calls]
        for call in calls:
            self._close(call)
        self._forget([future for future, call in self._futures.items() if call in calls])

    def _close(self, call: Call) -> None:
        """Take no more of what the call's stream brings."""
        if (stream := self._streams.pop(call, None)) is not None:
            stream.end()

    def _forget(self, futures: Sequence[Future[Completion]]) -> None:
        for future in futures:
            del self._futures[future]
            future.cancel()

    def close(self) -> None:
        """Wait for no answer any more."""
        self._threads.close()

    # ── one completion ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _complete(self, call: Call, stream: OpenStream | None) -> Completion:
        request = call.request
        self._check_logprobs(request)
        started = time.monotonic()
        call.version = self.version  # it waited for a thread until now
        body = self._body(request) | sampling_fields(request.sampling, call.index)
        sampled = stream.read(self._client, self._answers, body) if stream else None
        if stream and stream.is_unreadable:
            self._can_stream = False
        if sampled is None:
            answer = self._client.post("/completions", body)
            sampled = self._answers.completion(answer, request.sampling.max_tokens, request.sampling.top_logprobs)
        now = time.monotonic()
        first = (stream.first_token_at if stream else None) or now  # of an answer that comes whole, when we see the last
        completion = Completion(
            token_ids=sampled.token_ids,
            logprobs=sampled.logprobs,
            finish_reason=sampled.finish_reason,
            versions=self.versions_of(call),
            queue_s=started - call.began,
            prefill_s=first - started,
            decode_s=now - first,
            cached_tokens=sampled.cached_tokens,
            stop=sampled.stop,
            top_logprobs=sampled.top_logprobs,
        )
        if not wants_scores(request):
            return completion
        whole = np.concatenate([request.prompt_ids, completion.token_ids])
        return scored(completion, request, np.array([np.nan, *self._scores(self._body(request), whole.tolist())], np.float32))

    def _body(self, request: GenerateRequest) -> Json:
        return {
            "model": self._name(request.adapter or self._model),
            "prompt": request.prompt_ids.tolist(),
            "return_token_ids": True,
            # The request's own stop tokens are all there are; but SGLang heeds none of them where it ignores the model's own.
            "ignore_eos": not (self._is_sglang and request.sampling.stop_token_ids),
            **self._extra,
        }

    def _name(self, model: str) -> str:
        """A model as the server is asked for it. SGLang takes the name of an adapter alone for that of its base."""
        parent = self._served[model].get("parent")
        return f"{parent}:{model}" if self._is_sglang and parent else model

    @property
    def _is_sglang(self) -> bool:
        return self._served[self._model].get("owned_by") == "sglang"

    # ── logprobs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def prompt_logprobs(self, tokens: Sequence[int]) -> list[float]:
        """The logprob of each token after the first, as the server's model has them. Blocks until the server has answered."""
        request = GenerateRequest(np.array(tokens, np.int32), SamplingParams(max_tokens=1))
        return self._scores(self._body(request), list(tokens))

    def _scores(self, body: Json, sequence: list[int]) -> list[float]:
        """Have the sequence echoed with its logprobs, as OpenAI's API has it. SGLang echoes none where `logprobs` is 0."""
        asked = {"prompt": sequence, "echo": True, "logprobs": int(self._is_sglang), "max_tokens": 1, "temperature": 0}
        return self._answers.prompt_logprobs(self._client.post("/completions", body | asked), len(sequence))

    def _check_logprobs(self, request: GenerateRequest) -> None:
        """Once per kind of request: where only one token can come, its logprob must be 0. A server that returns the model's
        own logprobs would have us train on probabilities that nothing was sampled with."""
        for kind, fields in certainties(request):
            if kind in self._checked:
                continue
            asked = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "logprobs": 0, **fields}
            answer = self._client.post("/completions", self._body(request) | asked)
            if self._answers.certain_logprob(answer) < CERTAIN:
                raise EngineError(
                    f"the server's logprobs are not those of the distribution it samples from: they leave out {kind}",
                    "start vLLM with --logprobs-mode processed_logprobs, or sample at temperature 1 without filters",
                )
            self._checked.add(kind)


def _outcome(future: Future[Completion]) -> Completion | EngineError:
    try:
        return future.result()
    except EngineError as error:
        return error


def _served(client: JsonClient) -> dict[str, Json]:
    """The models that a server lists, by name."""
    entries = client.get("/models").get("data")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) and "id" in entry for entry in entries):
        raise EngineError(
            f"{client.url} does not list its models", "is it an OpenAI-compatible server, and does it end in /v1?"
        )
    return {str(entry["id"]): entry for entry in entries}


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise EngineError(f"the environment variable {variable} is not set", f"export {variable}=<the server's API key>")
    if not fits_header(key):
        raise EngineError(f"the key in {variable} has a character that no HTTP header takes", "has it a line break?")
    return key
