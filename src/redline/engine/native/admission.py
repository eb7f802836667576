"""What a request must satisfy before the engine takes it. A refusal names the fix and harms no other request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from redline.config.sections.rollouts import COLDEST, HOTTEST
from redline.errors import EngineError
from redline.types import GenerateRequest, SamplingParams

MAX_BIAS = 1e30
"""Still a number after division by the lowest temperature."""


@dataclass(slots=True, frozen=True)
class Limits:
    """What one engine can serve."""

    vocab_size: int
    max_len: int
    max_num_seqs: int
    cache_tokens: int
    """Tokens the whole KV cache holds."""
    max_stops: int
    max_top_logprobs: int
    has_tokenizer: bool
    block_size: int = 1
    """Tokens per block of that cache."""


def smallest(limits: Sequence[Limits | None]) -> Limits | None:
    """What each of several engines can serve; None where one does not say."""
    known = [each for each in limits if each is not None]
    if len(known) < len(limits):
        return None
    fewest = {name: min(getattr(each, name) for each in known) for name in ("max_len", "max_num_seqs", "cache_tokens")}
    return replace(known[0], **fewest)


def check_request(request: GenerateRequest, limits: Limits, adapters: Collection[str]) -> None:
    """Raises EngineError."""
    _check_prompt(request, limits)
    _check_sampling(request.sampling, limits)
    _check_tokens(request.sampling, limits)
    if request.adapter is not None and request.adapter not in adapters:
        resident = ", ".join(sorted(adapters)) or "none"
        raise EngineError(f"unknown adapter {request.adapter!r}; resident: {resident}", "load it first, or leave `adapter` out")


def check_room(prompt: int, new: int, cache_tokens: int) -> None:
    """Raises EngineError where the KV cache is too small for one completion."""
    if prompt + new > cache_tokens:
        raise EngineError(
            f"a prompt of {prompt} tokens and {new} new ones exceed the KV cache of {cache_tokens} tokens",
            "raise engine.kv_cache_memory_bytes or engine.gpu_memory_utilization, or lower max_tokens",
        )


def _check_prompt(request: GenerateRequest, limits: Limits) -> None:
    prompt, new = len(request.prompt_ids), request.sampling.max_tokens
    if prompt == 0:
        raise EngineError("a prompt has no tokens", "give at least one token")
    if prompt + new > limits.max_len:
        raise EngineError(
            f"a prompt of {prompt} tokens and {new} new ones exceed the model's {limits.max_len} positions",
            "ask for fewer new tokens (rollouts.max_new_tokens of a recipe), or shorten the prompt",
        )
    check_room(prompt, new, limits.cache_tokens)
    # Where the prompt ends inside a block, each further completion continues it in a copy of its own.
    copies = request.sampling.n - 1 if prompt % limits.block_size else 0
    if (-(-prompt // limits.block_size) + copies) * limits.block_size > limits.cache_tokens:
        raise EngineError(
            f"n = {request.sampling.n} after a prompt of {prompt} tokens exceeds the KV cache of {limits.cache_tokens} tokens",
            "raise engine.kv_cache_memory_bytes or engine.gpu_memory_utilization, or lower n",
        )
    if not are_tokens(request.prompt_ids, limits.vocab_size):
        raise EngineError("a prompt holds an id outside the vocabulary", "tokenize it with the model's own tokenizer")


def are_tokens(ids: np.ndarray, vocab_size: int) -> bool:
    """Whether all of them, of which there are some, are in the vocabulary. Every prompt is asked: int32 is read once."""
    if ids.dtype == np.int32:
        return bool(ids.view(np.uint32).max() < vocab_size)  # a negative one is larger than any vocabulary
    return bool(0 <= ids.min() <= ids.max() < vocab_size)


def _check_sampling(sampling: SamplingParams, limits: Limits) -> None:
    if sampling.max_tokens < 1:
        raise EngineError(f"max_tokens = {sampling.max_tokens}: nothing to generate", "ask for at least one token")
    if not 1 <= sampling.n <= limits.max_num_seqs:
        raise EngineError(
            f"n = {sampling.n} does not fit engine.max_num_seqs = {limits.max_num_seqs}", "raise engine.max_num_seqs"
        )
    s = sampling
    in_range = {
        "temperature": s.temperature == 0 or COLDEST <= s.temperature <= HOTTEST,
        "seed": -(2**63) <= s.seed < 2**63,
        "top_k": 0 <= s.top_k < 2**31,
        "top_p": 0 < s.top_p <= 1,
        "min_p": 0 <= s.min_p <= 1,
        "min_tokens": 0 <= s.min_tokens <= s.max_tokens,
        "top_logprobs": 0 <= s.top_logprobs <= limits.max_top_logprobs,
    }
    if all(in_range.values()):
        return
    allowed = {
        "temperature": f"0, or between {COLDEST:g} and {HOTTEST:g}",
        "seed": "a signed 64-bit integer",
        "top_k": "0 (all) or more",
        "top_p": "above 0 and at most 1",
        "min_p": "between 0 and 1",
        "min_tokens": "between 0 and max_tokens",
        "top_logprobs": f"between 0 and {limits.max_top_logprobs}",
    }
    name = next(name for name, ok in in_range.items() if not ok)
    raise EngineError(f"{name} = {getattr(sampling, name)} makes no sense", f"{name} is {allowed[name]}")


def _check_tokens(sampling: SamplingParams, limits: Limits) -> None:
    if len(sampling.stop_token_ids) > limits.max_stops:
        raise EngineError(
            f"{len(sampling.stop_token_ids)} stop tokens are more than the {limits.max_stops} we keep", "use stop strings"
        )
    if sampling.stop and not limits.has_tokenizer:
        raise EngineError("stop strings need a tokenizer", "give the engine one, or use stop_token_ids")
    if any(not stop for stop in sampling.stop):
        raise EngineError("a stop string is empty", "leave it out")
    if any(not -(2**31) <= token < 2**31 for token in sampling.stop_token_ids):
        raise EngineError("stop_token_ids hold a number that is no token", "use the tokenizer's own ids")
    named = [*sampling.logit_bias, *(sampling.allowed_token_ids or ())]
    if named and not 0 <= min(named) <= max(named) < limits.vocab_size:
        raise EngineError("logit_bias or allowed_token_ids name an id outside the vocabulary", "use the tokenizer's own ids")
    if any(not (bias == -np.inf or abs(bias) <= MAX_BIAS) for bias in sampling.logit_bias.values()):
        raise EngineError("logit_bias holds a value that makes no sense", f"a bias is at most {MAX_BIAS:g} in size, or -inf")
    _check_mask(sampling, limits)


def _check_mask(sampling: SamplingParams, limits: Limits) -> None:
    """Something must be left to sample."""
    if not (sampling.logit_bias or sampling.allowed_token_ids is not None or sampling.min_tokens):
        return
    allowed = range(limits.vocab_size) if sampling.allowed_token_ids is None else sampling.allowed_token_ids
    forbidden = {token for token, bias in sampling.logit_bias.items() if bias == -np.inf}
    if all(token in forbidden for token in allowed):
        raise EngineError("the mask allows no token", "allow at least one token, without a bias of -inf")
    forbidden.update(sampling.stop_token_ids if sampling.min_tokens else ())
    if all(token in forbidden for token in allowed):
        raise EngineError("only stop tokens are allowed, and min_tokens forbids them", "allow another token or drop min_tokens")
