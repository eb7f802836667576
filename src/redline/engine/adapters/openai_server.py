"""Any OpenAI-compatible server behind the port: vLLM, SGLang, `redline serve`.

Prompts go as token ids to /v1/completions and token ids come back, so nothing is ever tokenised twice. Every completion is an
HTTP request of its own, with a seed of its own, since servers disagree on what a seed means for n > 1.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from redline.engine.adapters.json_client import Json, JsonClient
from redline.engine.adapters.limits import UNLIMITED, limits_of
from redline.engine.adapters.scoring import scored, wants_scores
from redline.engine.adapters.seeds import completion_seed
from redline.engine.adapters.stepped import Call, Came, SteppedAdapter
from redline.errors import EngineError
from redline.telemetry import span
from redline.types import Completion, FinishReason, GenerateRequest, SamplingParams, TopLogprobs, WeightUpdate

LEAST_BIAS = -100.0
"""OpenAI's value for a token that must not come; JSON has no infinity."""
ANSWERS_S = 0.05
"""Seconds that a step waits for an answer: for as long others wait for the engine to be between two steps."""
CERTAIN = -1e-3
"""A token that was the only choice has at least this logprob, rounding included."""


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
        """`url` ends in /v1. The model is by default the first that the server lists, and the key is in the environment
        variable `api_key_env`. `push_weights` gets an update's weights to the server before it returns. `extra` goes into
        every request."""
        self._client = JsonClient(url, _api_key(api_key_env), timeout_s, num_retries)
        self._push_weights = push_weights
        self._extra = dict(extra or {})
        self._checked: set[str] = set()
        served = {entry["id"]: entry for entry in self._client.get("/models").get("data", ())}
        self._model = next(iter(served), "") if model is None else model
        if self._model not in served:
            known = ", ".join(served) or "no model at all"
            raise EngineError(f"{url} does not serve the model {self._model!r}", f"it serves: {known}")
        limits = limits_of(served[self._model].get("max_model_len") or UNLIMITED)
        super().__init__(limits, max_concurrent, set(served) - {self._model})
        self._pool = ThreadPoolExecutor(max_concurrent, thread_name_prefix="openai-server")
        self._futures: dict[Future[Completion], Call] = {}

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
        super().apply(update)

    # ── one completion ─────────────────────────────────────────────────────────────────────────────────────────────────

    def prepare(self, request: GenerateRequest) -> None:
        self._check_logprobs(request)

    def begin(self, call: Call) -> None:
        self._futures[self._pool.submit(self._complete, call)] = call

    def advance(self) -> list[tuple[Call, Came]]:
        """Wait a moment for an answer, and return all that are there."""
        with span("engine.generate", version=self.version):
            done, _ = wait(self._futures, ANSWERS_S, FIRST_COMPLETED)
        return [(self._futures.pop(future), _outcome(future)) for future in done]

    def cancel(self, calls: Sequence[Call]) -> None:
        """The server goes on with a call that has begun: OpenAI's API cannot end one."""
        for future in [future for future, call in self._futures.items() if call in calls]:
            del self._futures[future]
            future.cancel()

    def close(self) -> None:
        """Wait for no answer any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _complete(self, call: Call) -> Completion:
        started, request = time.monotonic(), call.request
        body = self._body(request) | _sampling_fields(request.sampling, call.index)
        answer = self._client.post("/completions", body)
        completion = self._completion(answer, call, started - call.began, time.monotonic() - started)
        if not wants_scores(request):
            return completion
        return scored(completion, request, self._score(np.concatenate([request.prompt_ids, completion.token_ids]), request))

    def _body(self, request: GenerateRequest) -> Json:
        return {
            "model": request.adapter or self._model,
            "prompt": request.prompt_ids.tolist(),
            "return_token_ids": True,
            "ignore_eos": True,  # the request's own stop tokens are all there are
            **self._extra,
        }

    def _completion(self, answer: Json, call: Call, queue_s: float, answer_s: float) -> Completion:
        choice, top = _choice(answer), call.request.sampling.top_logprobs
        if choice["finish_reason"] not in set(FinishReason):
            raise EngineError(f"the server ended a completion with {choice['finish_reason']!r}", "its log may say why")
        token_ids = _token_ids(choice)
        cached = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        stop = choice.get("stop_reason", choice.get("matched_stop"))
        return Completion(
            token_ids=token_ids,
            logprobs=np.array(choice["logprobs"]["token_logprobs"], np.float32)[: len(token_ids)],
            finish_reason=FinishReason(choice["finish_reason"]),
            versions=self.versions_of(call),
            # The answer comes whole: we see the first token when we see the last.
            queue_s=queue_s,
            prefill_s=answer_s,
            decode_s=0.0,
            cached_tokens=cached.get("cached_tokens") or 0,
            stop=stop if isinstance(stop, str) else None,
            top_logprobs=_top_logprobs(choice, len(token_ids), top) if top else None,
        )

    # ── logprobs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _score(self, sequence: np.ndarray, request: GenerateRequest) -> np.ndarray:
        """Have the sequence echoed with its logprobs, as OpenAI's API has it."""
        asked = {"prompt": sequence.tolist(), "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
        choice = _choice(self._client.post("/completions", self._body(request) | asked))
        return np.array([np.nan, *choice["logprobs"]["token_logprobs"][1 : len(sequence)]], np.float32)

    def _check_logprobs(self, request: GenerateRequest) -> None:
        """Once per kind of request: where only one token can come, its logprob must be 0. A server that returns the model's
        own logprobs would have us train on probabilities that nothing was sampled with."""
        for kind, fields in _certainties(request):
            if kind in self._checked:
                continue
            asked = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "logprobs": 0, **fields}
            choice = _choice(self._client.post("/completions", self._body(request) | asked))
            if choice["logprobs"]["token_logprobs"][0] < CERTAIN:
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


def _certainties(request: GenerateRequest) -> Iterator[tuple[str, Json]]:
    """What makes the distribution sampled from another than the model's, and fields that do so in the extreme."""
    sampling = request.sampling
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        yield "top_k, top_p and min_p", {"top_k": 1}
    is_masked = sampling.allowed_token_ids is not None or sampling.min_tokens > 0
    if sampling.temperature not in (0, 1) or sampling.logit_bias or is_masked:
        yield "temperature and logit_bias", {"logit_bias": {str(request.prompt_ids[0]): -LEAST_BIAS}}


def _sampling_fields(sampling: SamplingParams, index: int) -> Json:
    """All that a server might otherwise take from the model's generation_config.json, and the rest where it says something."""
    fields: Json = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,  # all of them know -1 as "all", not all of them 0
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "seed": completion_seed(sampling.seed, index),
        "logprobs": sampling.top_logprobs,
    }
    optional = {
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "min_tokens": sampling.min_tokens,
        "logit_bias": {str(t): LEAST_BIAS if bias == -math.inf else bias for t, bias in sampling.logit_bias.items()},
        "return_tokens_as_token_ids": sampling.top_logprobs > 0,
    }
    if sampling.allowed_token_ids is not None:
        fields["allowed_token_ids"] = list(sampling.allowed_token_ids)
    return fields | {name: value for name, value in optional.items() if value}


def _choice(answer: Json) -> Json:
    choices = answer.get("choices") or [{}]
    if not choices[0].get("logprobs"):
        raise EngineError(
            "the server's answer has no logprobs", "use one whose /v1/completions knows `logprobs`, as vLLM's does"
        )
    return choices[0]


def _token_ids(choice: Json) -> np.ndarray:
    ids = choice.get("token_ids")
    if ids is None:
        ids = [_id_in(token) for token in choice["logprobs"]["tokens"]]
    return np.array(ids, np.int32)


def _top_logprobs(choice: Json, num_tokens: int, k: int) -> TopLogprobs:
    """The likeliest k of each position; a server adds the sampled token where it is not among them."""
    rows = [sorted(top.items(), key=lambda item: -item[1])[:k] for top in choice["logprobs"]["top_logprobs"][:num_tokens]]
    ids = [[_id_in(token) for token, _ in row] for row in rows]
    return TopLogprobs(np.array(ids, np.int32), np.array([[logprob for _, logprob in row] for row in rows], np.float32))


def _id_in(token: str) -> int:
    """The id in "token_id:123"."""
    prefix, _, number = token.partition(":")
    if prefix != "token_id" or not number.isdigit():
        raise EngineError(
            "the server names tokens by their text, which does not say which they are",
            "use one that knows return_token_ids and return_tokens_as_token_ids, as vLLM does",
        )
    return int(number)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if not (key := os.environ.get(variable)):
        raise EngineError(f"the environment variable {variable} is not set", f"export {variable}=<the server's API key>")
    return key
