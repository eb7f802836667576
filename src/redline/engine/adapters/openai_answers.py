"""What a server with OpenAI's API answers to /v1/completions, read with suspicion: what is not as it must be is an EngineError
that names the server, and nothing of it is trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from redline.engine.adapters.json_client import Json
from redline.errors import EngineError
from redline.types import FinishReason, TopLogprobs

ENDS = {reason.value: reason for reason in (FinishReason.STOP, FinishReason.LENGTH)}
"""How a completion may end; any other end is a failure."""
MOST_LOGPROB = 0.01
"""A logprob is at most 0, rounding included."""
MAX_TOKEN = 2**31 - 1


@dataclass(slots=True, frozen=True)
class Sampled:
    """One completion of an answer."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    stop: str | None
    """The stop string that ended it."""
    cached_tokens: int
    top_logprobs: TopLogprobs | None


class Answers:
    """Reads the answers of one server."""

    def __init__(self, url: str) -> None:
        self._url = url

    def completion(self, answer: Json, max_tokens: int, num_top: int) -> Sampled:
        """Return the one completion of an answer, with the likeliest `num_top` tokens of each position."""
        choice = self._choice(answer)
        if (end := choice.get("finish_reason")) not in ENDS:
            raise self._wrong(f"ended a completion with {end!r}", "its log may say why")
        ids, logprobs = self._sampled(choice)
        if len(ids) > max_tokens:
            raise self._wrong(f"sent {len(ids)} tokens where at most {max_tokens} were asked for")
        if not ids:
            raise self._wrong("sent a completion without a token")
        return Sampled(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish_reason=ENDS[end],
            stop=_stop(choice),
            cached_tokens=_cached_tokens(answer),
            top_logprobs=self._top_logprobs(choice, len(ids), num_top) if num_top else None,
        )

    def part(self, answer: Json) -> Sampled:
        """Return what one answer of a stream adds to a completion; its finish reason is `abort` unless it says that it ends."""
        choice = {} if answer.get("choices") == [] else self._only_choice(answer)
        end = choice.get("finish_reason")
        if end is not None and end not in ENDS:
            raise self._wrong(f"ended a completion with {end!r}", "its log may say why")
        is_without = not choice or (end is not None and not choice.get("token_ids") and not choice.get("logprobs"))
        ids, logprobs = ([], []) if is_without else self._sampled(self._choice(answer))
        return Sampled(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            finish_reason=FinishReason.ABORT if end is None else ENDS[end],
            stop=_stop(choice),
            cached_tokens=_cached_tokens(answer),
            top_logprobs=None,
        )

    def joined(self, parts: Sequence[Sampled], max_tokens: int) -> Sampled:
        """Return the completion that the parts of a stream are, which may have been ended on the way."""
        ids = np.concatenate([part.token_ids for part in parts])
        last = next((part for part in parts if part.finish_reason is not FinishReason.ABORT), parts[-1])
        if not 0 < len(ids) <= max_tokens:
            raise self._wrong(f"sent {len(ids)} tokens where 1 to {max_tokens} were asked for")
        return Sampled(
            token_ids=ids,
            logprobs=np.concatenate([part.logprobs for part in parts]),
            finish_reason=last.finish_reason,
            stop=last.stop,
            cached_tokens=max(part.cached_tokens for part in parts),
            top_logprobs=None,
        )

    def certain_logprob(self, answer: Json) -> float:
        """Return the logprob of the first token that was sampled."""
        logprobs = self._numbers(self._choice(answer)["logprobs"].get("token_logprobs"))
        if not logprobs:
            raise self._wrong("sent a completion without a token")
        return logprobs[0]

    def prompt_logprobs(self, answer: Json, num_tokens: int) -> list[float]:
        """Return the logprobs of an echoed prompt's tokens after the first."""
        logprobs = self._choice(answer)["logprobs"].get("token_logprobs")
        if not isinstance(logprobs, list) or len(logprobs) < num_tokens:
            raise self._wrong(
                "does not echo a prompt with its logprobs", "use one that does, as vLLM, SGLang and redline serve"
            )
        return self._numbers(logprobs[1:num_tokens])

    def _choice(self, answer: Json) -> Json:
        choice = self._only_choice(answer)
        if not isinstance(choice.get("logprobs"), dict):
            hint = "use one whose /v1/completions knows `logprobs`, as vLLM's does"
            raise self._wrong("sent an answer that has no logprobs", hint)
        return choice

    def _only_choice(self, answer: Json) -> Json:
        choices = answer.get("choices")
        if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
            raise self._wrong("sent an answer without its one choice")
        choice: Json = choices[0]
        return choice

    def _sampled(self, choice: Json) -> tuple[list[int], list[float]]:
        """Tokens, and their logprobs."""
        ids, logprobs = self._token_ids(choice), self._numbers(choice["logprobs"].get("token_logprobs"))
        if len(ids) != len(logprobs):
            raise self._wrong(f"sent {len(ids)} tokens with {len(logprobs)} logprobs")
        return ids, logprobs

    def _token_ids(self, choice: Json) -> list[int]:
        ids = choice.get("token_ids")
        if ids is None:
            ids = [self._id_in(token) for token in self._list(choice["logprobs"].get("tokens"), "tokens")]
        for token in self._list(ids, "token_ids"):
            if type(token) is not int or not 0 <= token <= MAX_TOKEN:
                raise self._wrong(f"sent {token!r} for a token")
        return list(ids)

    def _numbers(self, values: Any) -> list[float]:
        for value in self._list(values, "token_logprobs"):
            is_logprob = isinstance(value, int | float) and math.isfinite(value) and value <= MOST_LOGPROB
            if not is_logprob:
                raise self._wrong(f"sent {value!r} for a logprob")
        return [float(value) for value in values]

    def _top_logprobs(self, choice: Json, num_tokens: int, k: int) -> TopLogprobs:
        """The likeliest k of each position; a server adds the sampled token where it is not among them."""
        tops = self._list(choice["logprobs"].get("top_logprobs"), "top_logprobs")
        if len(tops) < num_tokens or not all(isinstance(top, dict) and len(top) >= k for top in tops[:num_tokens]):
            raise self._wrong(f"did not send the {k} likeliest tokens of every position")
        rows = [sorted(top.items(), key=lambda item: -item[1])[:k] for top in tops[:num_tokens]]
        ids = [[self._id_in(token) for token, _ in row] for row in rows]
        return TopLogprobs(np.array(ids, np.int32), np.array([[logprob for _, logprob in row] for row in rows], np.float32))

    def _id_in(self, token: Any) -> int:
        """The id in "token_id:123"."""
        prefix, _, number = str(token).partition(":")
        if prefix != "token_id" or not number.isdigit():
            raise self._wrong(
                "names tokens by their text, which does not say which they are",
                "use one that knows return_token_ids and return_tokens_as_token_ids, as vLLM does",
            )
        return int(number)

    def _list(self, values: Any, name: str) -> Sequence[Any]:
        if not isinstance(values, list):
            raise self._wrong(f"sent no {name}")
        return values

    def _wrong(self, what: str, hint: str = "is it an OpenAI-compatible server? its log may say more") -> EngineError:
        return EngineError(f"the server {self._url} {what}", hint)


def _stop(choice: Json) -> str | None:
    stop = choice.get("stop_reason", choice.get("matched_stop"))
    return stop if isinstance(stop, str) else None


def _cached_tokens(answer: Json) -> int:
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else 0
