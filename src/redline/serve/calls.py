"""A request of the API as work for the engine: which model, which prompts, how many tokens there is room for."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from redline.serve.protocol import ApiError, ChatRequest, CompletionRequest
from redline.serve.vocabulary import Vocabulary
from redline.types import GenerateRequest


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
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.ids) for prompt in self.prompts)


def make_call(body: ChatRequest | CompletionRequest, served: Served) -> Call:
    """Tokenise and check; raises `ApiError`."""
    model = body.model or served.name
    if model not in served.models:
        known = ", ".join(served.models)
        raise ApiError(404, f"the model {model!r} does not exist; served here: {known}", param="model", code="model_not_found")
    if isinstance(body, ChatRequest):
        prompts = [Prompt(served.vocabulary.render(body.messages).tolist(), "")]
    else:
        prompts = [_prompt(prompt, body.echo, served.vocabulary) for prompt in body.prompt]
    requests = [
        GenerateRequest(
            np.array(prompt.ids, dtype=np.int32),
            body.sampling(_max_tokens(body, len(prompt.ids), served.max_positions), served.end_token_ids),
            served.models[model],
        )
        for prompt in prompts
    ]
    return Call(body, model, prompts, requests)


def _prompt(prompt: str | list[int], echo: bool, vocabulary: Vocabulary) -> Prompt:
    if isinstance(prompt, str):
        return Prompt(vocabulary.encode(prompt).tolist(), prompt if echo else "")
    return Prompt(prompt, vocabulary.decode(prompt) if echo else "")


def _max_tokens(body: ChatRequest | CompletionRequest, num_prompt: int, max_positions: int) -> int:
    """At least one, which the engine needs; a call that asked for none drops it."""
    room, asked = max_positions - num_prompt, body.new_tokens
    needed = 1 if asked is None else max(1, asked)
    if needed > room:
        raise ApiError(
            400,
            f"this model's maximum context length is {max_positions} tokens, and a prompt of {num_prompt} tokens with"
            f" {needed} new ones exceeds it; shorten the prompt or lower max_tokens",
            param="messages" if isinstance(body, ChatRequest) else "prompt",
            code="context_length_exceeded",
        )
    return room if asked is None else needed
