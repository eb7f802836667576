"""Completions as OpenAI's JSON: whole, or in the chunks of a stream."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from redline.serve.answers.detokenizer import CompletionText
from redline.serve.requests.calls import Call
from redline.serve.requests.protocol import ChatRequest, CompletionRequest
from redline.serve.vocabulary import Vocabulary
from redline.types import Completion, Delta, FinishReason, TopLogprobs

PART_LOGPROBS = 1024
"""Logprobs of an answer that are put into JSON at once: about two milliseconds of work."""
PART_ONE_BY_ONE = 64
"""Tokens whose text is looked at one by one: as much work."""
LEAST_LOGPROB = -9999.0
"""Stands for a probability of zero, which JSON's numbers cannot express."""

Json = dict[str, Any]


@dataclass(slots=True, frozen=True)
class Piece:
    """Tokens of a choice and the text they settled."""

    text: str
    token_ids: list[int]
    logprobs: np.ndarray
    """float32[tokens]."""
    top_logprobs: TopLogprobs | None
    offsets: list[int]
    """Where in the choice's text each token begins."""
    completion: Completion | None
    """The whole, with the last piece."""


class Choice:
    """One of a call's choices on its way to the client."""

    def __init__(self, call: Call, number: int, index: int, vocabulary: Vocabulary) -> None:
        sampling = call.requests[number].sampling
        self._call = call
        self._vocabulary = vocabulary
        self._index = number * sampling.n + index
        self._prompt = call.prompts[number]
        self._text = CompletionText(
            vocabulary.decode,
            self._prompt.ids,
            sampling.stop,
            sampling.stop_token_ids,
            with_offsets=isinstance(call.body, CompletionRequest) and call.body.logprobs is not None,
        )
        self._has_begun = False

    def whole(self, completion: Completion) -> Generator[None, None, Json]:
        """Returns the choice; yields now and then, since a long one takes a while."""
        parts: list[Json] = []
        for delta in _parts(completion, PART_ONE_BY_ONE if self._text.is_one_by_one else PART_LOGPROBS):
            parts.append(self._json(self._piece(delta), chat_key="message"))
            yield
        json = reduce(_joined, parts)
        if self._call.body.scores_prompt:
            json["logprobs"] = _joined((yield from self._prompt_logprobs(completion)), json["logprobs"])
        return json

    def chunk(self, delta: Delta) -> Json | None:
        """None while there is nothing to say."""
        piece, body = self._piece(delta), self._call.body
        wants_tokens = body.return_token_ids or body.num_top_logprobs is not None
        if not piece.text and not piece.completion and not (piece.token_ids and wants_tokens):
            return None
        return self._json(piece, chat_key="delta")

    def _piece(self, delta: Delta) -> Piece:
        tokens = [] if self._call.body.new_tokens == 0 else delta.token_ids.tolist()
        first = len(self._text.offsets)
        text = self._text.push(tokens)
        if delta.completion:
            text += self._text.finish(delta.completion.stop)
        return Piece(text, tokens, delta.logprobs, delta.top_logprobs, self._text.offsets[first:], delta.completion)

    def _json(self, piece: Piece, chat_key: str) -> Json:
        body, is_first, self._has_begun = self._call.body, not self._has_begun, True
        json: Json = {"index": self._index}
        if isinstance(body, ChatRequest):
            json[chat_key] = {"role": "assistant", "content": piece.text} if is_first else {"content": piece.text}
            json["logprobs"] = self._chat_logprobs(piece) if body.logprobs else None
        else:
            json["text"] = self._prompt.text + piece.text if is_first else piece.text
            json["logprobs"] = self._text_logprobs(body, piece)
            if body.return_token_ids and is_first:
                json["prompt_token_ids"] = self._prompt.ids
        json["finish_reason"] = str(piece.completion.finish_reason) if piece.completion else None
        json["stop_reason"] = self._stop_reason(piece.completion)
        if body.return_token_ids:
            json["token_ids"] = piece.token_ids
        return json

    def _stop_reason(self, completion: Completion | None) -> str | int | None:
        """The stop string or stop token of the request that ended it; None for the model's own end."""
        if completion is None or completion.finish_reason is not FinishReason.STOP:
            return None
        last = int(completion.token_ids[-1])
        return completion.stop or (last if last in self._call.body.stop_token_ids else None)

    # ── logprobs ───────────────────────────────────────────────────────────────────────────────────────────────────────

    def _token_name(self, token: int) -> str:
        return f"token_id:{token}" if self._call.body.return_tokens_as_token_ids else self._vocabulary.token_text(token)

    def _chat_logprobs(self, piece: Piece) -> Json:
        def entry(token: int, logprob: float) -> Json:
            return {"token": self._token_name(token), "logprob": logprob, "bytes": list(self._vocabulary.token_bytes(token))}

        tops = _likeliest(piece.top_logprobs, len(piece.token_ids))
        content = [
            {**entry(token, _finite(logprob)), "top_logprobs": [entry(*pair) for pair in likeliest]}
            for token, logprob, likeliest in zip(piece.token_ids, piece.logprobs.tolist(), tops, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _text_logprobs(self, body: CompletionRequest, piece: Piece) -> Json | None:
        if body.logprobs is None:
            return None
        names = [self._token_name(token) for token in piece.token_ids]
        own = [_finite(logprob) for logprob in piece.logprobs[: len(names)].tolist()]
        tops = [
            {self._token_name(token): logprob for token, logprob in likeliest}
            for likeliest in _likeliest(piece.top_logprobs, len(names))
        ]
        return {
            "tokens": names,
            "token_logprobs": own,
            "top_logprobs": [{**top, name: logprob} for top, name, logprob in zip(tops, names, own, strict=True)],
            "text_offset": [len(self._prompt.text) + offset for offset in piece.offsets],
        }

    def _prompt_logprobs(self, completion: Completion) -> Generator[None, None, dict[str, list[Any]]]:
        """The echoed prompt's; yields now and then. The engine scores the prompt's own tokens alone, so there are no likeliest
        ones to show."""
        assert completion.prompt_logprobs is not None
        text = CompletionText(self._vocabulary.decode, with_offsets=True)
        for token in self._prompt.ids:
            text.push([token])
            yield
        return {
            "tokens": [self._token_name(token) for token in self._prompt.ids],
            "token_logprobs": [None, *(_finite(logprob) for logprob in completion.prompt_logprobs[1:].tolist())],
            "top_logprobs": [None] * len(self._prompt.ids),
            "text_offset": text.offsets,
        }


def _parts(completion: Completion, most: int) -> Iterator[Delta]:
    """A whole completion as pieces of at most so many tokens, fewer where there are alternatives to them."""
    top = completion.top_logprobs
    size = min(most, PART_LOGPROBS // (1 + (top.token_ids.shape[1] if top else 0)))
    last = max(0, len(completion.token_ids) - 1) // size * size
    for begin in range(0, last + 1, size):
        here = slice(begin, begin + size)
        likeliest = TopLogprobs(top.token_ids[here], top.logprobs[here]) if top else None
        yield Delta(0, completion.token_ids[here], completion.logprobs[here], likeliest, completion if begin == last else None)


def _joined(before: Json, after: Json) -> Json:
    """Two pieces of a choice as one: texts and lists end to end, of the rest what came last."""
    joined = before | after
    for key in before.keys() & after.keys():
        first, second = before[key], after[key]
        if isinstance(first, dict) and isinstance(second, dict):
            joined[key] = _joined(first, second)
        elif (isinstance(first, list) and isinstance(second, list)) or key in ("text", "content"):
            joined[key] = first + second
    return joined


def _likeliest(top: TopLogprobs | None, num_tokens: int) -> list[list[tuple[int, float]]]:
    """Per token: (id, logprob), likeliest first."""
    if top is None:
        return [[] for _ in range(num_tokens)]
    rows = zip(top.token_ids[:num_tokens].tolist(), top.logprobs[:num_tokens].tolist(), strict=True)
    return [[(token, _finite(logprob)) for token, logprob in zip(ids, logprobs, strict=True)] for ids, logprobs in rows]


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


# ── around the choices ─────────────────────────────────────────────────────────────────────────────────────────────────


def whole(call: Call, choices: list[Json], usage: Json) -> Json:
    json = _envelope(call, choices, "chat.completion") | {"usage": usage}
    if isinstance(call.body, ChatRequest) and call.body.return_token_ids:
        json["prompt_token_ids"] = call.prompts[0].ids
    return json


def chunk(call: Call, choices: list[Json], *, usage: Json | None = None, is_first: bool = False) -> Json:
    json = _envelope(call, choices, "chat.completion.chunk")
    if call.body.stream_options.include_usage:
        json["usage"] = usage
    if is_first and isinstance(call.body, ChatRequest) and call.body.return_token_ids:
        json["prompt_token_ids"] = call.prompts[0].ids
    return json


def usage(call: Call, completions: Sequence[Sequence[Completion]]) -> Json:
    """Tokens of all prompts and completions: a prompt counts once however many completions it has."""
    sampled = 0 if call.body.new_tokens == 0 else sum(len(c.token_ids) for group in completions for c in group)
    return {
        "prompt_tokens": call.num_prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": call.num_prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": sum(group[0].cached_tokens for group in completions)},
    }


def _envelope(call: Call, choices: list[Json], chat_object: str) -> Json:
    is_chat = isinstance(call.body, ChatRequest)
    return {
        "id": f"chatcmpl-{call.id}" if is_chat else f"cmpl-{call.id}",
        "object": chat_object if is_chat else "text_completion",
        "created": call.created,
        "model": call.model,
        "choices": choices,
    }
