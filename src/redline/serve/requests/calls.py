"""A request of the API as work for the engine: which model, which prompts, how many tokens there is room for."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from redline.serve.requests.limits import ServeLimits, refuse_many_logprobs
from redline.serve.requests.protocol import ApiError, ChatRequest, CompletionRequest
from redline.serve.vocabulary import TooLongError, Vocabulary
from redline.types import GenerateRequest

LONGEST_NAME = 200
"""Characters of a model's name that an error repeats."""


@dataclass(slots=True, frozen=True)
class Served:
    """The model as clients see it."""

    name: str
    vocabulary: Vocabulary
    end_token_ids: tuple[int, ...]
    """What ends an answer unless a request says `ignore_eos`."""
    max_positions: int
    """Most tokens of prompt and answer together."""
    adapters: tuple[str, ...] = ()
    """Names of the resident LoRA adapters; each is a model to clients."""
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds."""
    rows: int = 256
    """Choices that the engine samples at once."""

    @property
    def models(self) -> Mapping[str, str | None]:
        """Name → the engine's adapter."""
        return {self.name: None} | {name: name for name in self.adapters}


@dataclass(slots=True, frozen=True)
class Prompt:
    """One prompt of a call."""

    ids: list[int]
    text: str
    """To echo; empty unless asked for."""


@dataclass(slots=True, frozen=True)
class Call:
    """One request of the API with its prompts in the engine's terms; `requests[i]` belongs to `prompts[i]`."""

    body: ChatRequest | CompletionRequest
    model: str
    prompts: list[Prompt]
    requests: list[GenerateRequest]
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))
    """Unix seconds."""

    @property
    def num_shown(self) -> int:
        """Most tokens, and alternatives to them, that the answer may show: Σ n · max_tokens · (1 + top_logprobs), and n times
        the prompt where every choice shows it."""
        each = 1 + (self.body.num_top_logprobs or 0)
        sampled = each * sum(request.sampling.n * request.sampling.max_tokens for request in self.requests)
        return sampled + self.num_prompt_shown

    @property
    def num_prompt_shown(self) -> int:
        """Tokens of prompts that the answer shows."""
        return self.body.n * self.num_prompt_tokens if self.body.shows_prompt else 0

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


def check_model(model: str, served: Served) -> str:
    """The model's name, or an `ApiError` that says which there are."""
    if model not in served.models:
        known = ", ".join(served.models)
        raise ApiError(
            404,
            f"the model {model[:LONGEST_NAME]!r} does not exist; served here: {known}",
            param="model",
            code="model_not_found",
        )
    return model


def make_call(body: ChatRequest | CompletionRequest, served: Served, limits: ServeLimits) -> Call:
    """Tokenise and check; raises `ApiError`. From any thread."""
    model = check_model(body.model or served.name, served)
    try:
        prompts = _tokenised(body, served)
    except TooLongError as error:
        raise _no_room(body, str(error), served.max_positions) from error
    requests = [
        GenerateRequest(
            np.array(prompt.ids, dtype=np.int32),
            body.sampling(_max_tokens(body, len(prompt.ids), served.max_positions, limits), served.end_token_ids),
            served.models[model],
        )
        for prompt in prompts
    ]
    call = Call(body, model, prompts, requests)
    if body.num_top_logprobs is not None:
        refuse_many_logprobs(call.num_shown, limits)
    return call


def num_characters(body: ChatRequest | CompletionRequest) -> int:
    """Characters of all its prompts; a token id counts as one."""
    if isinstance(body, ChatRequest):
        return sum(len(message.role) + len(message.content) for message in body.messages)
    return sum(map(len, body.prompt))


def _tokenised(body: ChatRequest | CompletionRequest, served: Served) -> list[Prompt]:
    if isinstance(body, ChatRequest):
        return [Prompt(served.vocabulary.render(body.messages, served.max_positions).tolist(), "")]
    return [_prompt(prompt, body.echo, served) for prompt in body.prompt]


def _prompt(prompt: str | list[int], echo: bool, served: Served) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(served.vocabulary.encode(prompt, served.max_positions).tolist(), prompt if echo else "")
    if len(prompt) > served.max_positions:
        raise TooLongError(f"of {len(prompt)} tokens")
    return Prompt(prompt, served.vocabulary.decode(prompt) if echo else "")


def _max_tokens(body: ChatRequest | CompletionRequest, num_prompt: int, max_positions: int, limits: ServeLimits) -> int:
    """At least one, which the engine needs; a call that asked for none drops it."""
    room, asked = max_positions - num_prompt, body.new_tokens
    needed = 1 if asked is None else max(1, asked)
    if needed > room:
        raise _no_room(body, f"of {num_prompt} tokens with {needed} new ones", max_positions)
    most = limits.max_new_tokens or room
    if needed > most:
        raise ApiError(
            400,
            f"max_tokens = {needed}, and a choice may have {most} tokens (serve.max_new_tokens is the limit)",
            param="max_tokens",
            code="integer_above_max_value",
        )
    return min(room, most) if asked is None else needed


def _no_room(body: ChatRequest | CompletionRequest, what: str, max_positions: int) -> ApiError:
    return ApiError(
        400,
        f"this model's maximum context length is {max_positions} tokens, and a prompt {what} exceeds it; shorten the prompt or"
        " lower max_tokens",
        param="messages" if isinstance(body, ChatRequest) else "prompt",
        code="context_length_exceeded",
    )
