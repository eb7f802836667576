"""How much one request may ask for, and the checks of it that come before any work.

Each check looks at the parsed JSON, costs no more than a few comparisons, and comes before pydantic reads the fields: what is
too large is refused without being looked at.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping
from typing import Any, NamedTuple

from pydantic import PositiveFloat, PositiveInt

from redline.config.section import Section
from redline.serve.requests.protocol import ApiError

LARGEST = 2**63
"""Stands for any larger number: one of thousands of digits cannot even be printed."""
COUNTED_AT_ONCE = 2**16
"""Bytes; to count in 4 MB at once takes 30 ms, in which neither the event loop nor the engine gets Python's lock."""
_PIECE = re.compile(rb'"|\\.|[^"\\]{1,4096}', re.DOTALL)
"""A piece of JSON: a quotation mark, an escape, or a bounded run of neither, so that no body takes more than one pass."""


class ServeLimits(Section):
    """The section `serve` of a command line: `redline serve MODEL serve.max_stops=16`."""

    max_body_bytes: PositiveInt | None = None
    """Bytes of a request's body; by default 64 for each position of the model, at least 256 KiB and at most 4 MiB."""
    max_body_values: PositiveInt | None = None
    """Values of a body's JSON: items of lists and fields of objects. A prompt of token ids has one for each. By default two for
    each position of the model, at least 16,384 and at most 131,072."""
    max_messages: PositiveInt = 1024
    """Messages of a conversation, and parts of their contents."""
    max_choices: PositiveInt | None = None
    """Choices of a request: prompts times n; by default `engine.max_num_seqs`."""
    max_new_tokens: PositiveInt | None = None
    """Tokens of a choice; by default as many as the model has positions for."""
    max_stops: PositiveInt = 4
    """Stop strings of a request, as in OpenAI's API."""
    max_stop_chars: PositiveInt = 256
    """Characters of a stop string."""
    max_biases: PositiveInt = 4096
    """Entries of `logit_bias`, and of `allowed_token_ids`."""
    max_logprobs: PositiveInt = 200_000
    """Logprobs of an answer: choices times tokens times one more than `top_logprobs`, and those of echoed prompts."""
    max_queued_choices: PositiveInt = 1024
    """Choices of all requests that may wait for a place in the batch; a request beyond them is answered 429."""
    max_uploads: PositiveInt = 512
    """Bodies that may be on their way at once. Beyond them the one that was begun first is given up with 408, so that slow
    clients keep no other out."""
    max_weights_bytes: PositiveInt = 2**32
    """Bytes of a body with weights (`--weights-token-env`). Other bodies keep their own limit."""
    client_timeout_s: PositiveFloat = 60.0
    """Seconds a client may take to send a request, or to read what was written to it; then its connection ends."""
    step_timeout_s: PositiveFloat = 120.0
    """Seconds a step of the engine may last. /health says 503 while one lasts longer, and a tensor-parallel one fails."""


class BodyLimits(NamedTuple):
    """What a body may be before it is parsed. A parse holds Python's lock all the while, and nobody gets a token
    meanwhile, so that a body for which the model has no positions is not parsed."""

    max_bytes: int
    max_values: int


def body_limits(limits: ServeLimits, max_positions: int) -> BodyLimits:
    return BodyLimits(
        limits.max_body_bytes or min(max(64 * max_positions, 2**18), 2**22),
        limits.max_body_values or min(max(2 * max_positions, 2**14), 2**17),
    )


def check_values(values: Mapping[str, Any], limits: ServeLimits, rows: int) -> int:
    """Refuse a request that asks for too much of an engine with so many rows; returns how many choices it asks for."""
    _check_count(values, "messages", limits.max_messages)
    parts = sum(len(m["content"]) for m in _list(values, "messages") if isinstance(m, dict) and _is_list(m.get("content")))
    if parts > limits.max_messages:
        raise _too_many("messages", "parts of contents", parts, limits.max_messages, "serve.max_messages")
    _check_count(values, "logit_bias", limits.max_biases)
    _check_count(values, "allowed_token_ids", limits.max_biases)
    _check_stops(values.get("stop"), limits)
    choices = _num_choices(values, limits, rows)
    _check_logprobs(values, choices, limits)
    return choices


def check_structure(body: bytes, max_values: int) -> Generator[None]:
    """Refuse JSON of very many values before it is parsed; yields now and then. Commas in strings separate nothing, but to look
    is not for free."""
    count = 0
    for start in range(0, len(body), COUNTED_AT_ONCE):
        count += _num_separators(body[start : start + COUNTED_AT_ONCE])
        yield
    if count <= max_values:
        return
    count, in_string = 0, False
    for number, piece in enumerate(_PIECE.finditer(body)):
        if piece[0] == b'"':
            in_string = not in_string
        elif not in_string:
            count += _num_separators(piece[0])
        if count > max_values:
            raise ApiError(
                413,
                f"the body has more than {max_values} values; send less at once (serve.max_body_values is the limit)",
                code="request_too_large",
            )
        if number % 64 == 0:
            yield


def _num_separators(body: bytes) -> int:
    return len(body) - len(body.translate(None, b",[{"))


def _num_choices(values: Mapping[str, Any], limits: ServeLimits, rows: int) -> int:
    """A prompt's n choices share a step, so that none may have more than there are rows; and a request that the waiting room
    could never hold is told so, rather than to come again."""
    most = min(limits.max_choices or rows, rows + limits.max_queued_choices)
    prompt, n = values.get("prompt"), values.get("n")
    prompts = len(prompt) if _is_list(prompt) and prompt and not isinstance(prompt[0], int) else 1
    n = min(n, LARGEST) if isinstance(n, int) and n > 1 else 1
    if prompts * n > most or n > rows:
        asked = f"n = {n}" if prompts == 1 else f"{prompts} prompts with n = {n}"
        allowed = f"a request may have {most}" if prompts * n > most else f"a prompt may have {rows}"
        raise ApiError(
            400,
            f"{asked} asks for {prompts * n} choices, and {allowed}; send several requests, or lower n (serve.max_choices,"
            " serve.max_queued_choices and engine.max_num_seqs are the limits)",
            param="n" if n > 1 else "prompt",
            code="too_many_choices",
        )
    return prompts * n


def _check_stops(stop: Any, limits: ServeLimits) -> None:
    stops = stop if _is_list(stop) else [stop]
    if len(stops) > limits.max_stops:
        raise _too_many("stop", "stop strings", len(stops), limits.max_stops, "serve.max_stops")
    if any(isinstance(text, str) and len(text) > limits.max_stop_chars for text in stops):
        raise ApiError(
            400,
            f"a stop string is longer than {limits.max_stop_chars} characters; shorten it (serve.max_stop_chars is the limit)",
            param="stop",
            code="string_above_max_length",
        )


def _check_logprobs(values: Mapping[str, Any], choices: int, limits: ServeLimits) -> None:
    """Only where the number of tokens is known; else the model's context bounds it, and `make_call` looks again."""
    wanted = values.get("top_logprobs") if "messages" in values else values.get("logprobs")
    if not values.get("logprobs") or isinstance(wanted, bool) or not isinstance(wanted, int):
        return
    tokens = values.get("max_completion_tokens") or values.get("max_tokens")
    if isinstance(tokens, int):
        refuse_many_logprobs(min(choices * tokens * (1 + wanted), LARGEST), limits)


def refuse_many_logprobs(count: int, limits: ServeLimits) -> None:
    if count > limits.max_logprobs:
        raise ApiError(
            400,
            f"the answer could have {count} logprobs, and may have {limits.max_logprobs}; lower max_tokens, n or the number of"
            " logprobs (serve.max_logprobs is the limit)",
            param="logprobs",
            code="too_many_logprobs",
        )


def _check_count(values: Mapping[str, Any], name: str, most: int) -> None:
    value = values.get(name)
    if isinstance(value, list | dict) and len(value) > most:
        key = "serve.max_messages" if name == "messages" else "serve.max_biases"
        raise _too_many(name, "entries", len(value), most, key)


def _too_many(param: str, what: str, count: int, most: int, key: str) -> ApiError:
    return ApiError(
        400,
        f"{param}: {count} {what}, and there may be {most} ({key} is the limit)",
        param=param,
        code="array_above_max_length",
    )


def _list(values: Mapping[str, Any], name: str) -> list[Any]:
    value = values.get(name)
    return value if isinstance(value, list) else []


def _is_list(value: Any) -> bool:
    return isinstance(value, list)
