"""Logprobs under the model itself, from engines that return only those of the distribution they sample from.

The whole sequence goes through the network once more, this time as a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from redline.errors import EngineError
from redline.types import Completion, GenerateRequest

Scorer = Callable[[list[np.ndarray], list[GenerateRequest]], list[np.ndarray]]
"""Token sequences, and for each the request it comes from → float32[tokens] each; NaN for the first token."""


def check_room(request: GenerateRequest, max_len: int) -> None:
    """Raise EngineError where the whole sequence has no room as a prompt, after which an engine samples one token more."""
    needed = len(request.prompt_ids) + request.sampling.max_tokens + 1
    if wants_scores(request) and needed > max_len:
        raise EngineError(
            f"raw_logprobs and prompt_logprobs need {needed} positions here, and the model has {max_len}",
            "lower max_tokens by one",
        )


def add_scores(
    requests: Sequence[GenerateRequest], completions: list[list[Completion]], score: Scorer
) -> list[list[Completion]]:
    """Return the same completions, with `raw_logprobs` and `prompt_logprobs` where they were asked for."""
    wanted = [(r, c) for r, group in zip(requests, completions, strict=True) if wants_scores(r) for c in group]
    if not wanted:
        return completions
    wholes = [np.concatenate([request.prompt_ids, completion.token_ids]) for request, completion in wanted]
    scores = iter(score(wholes, [request for request, _ in wanted]))
    return [
        [scored(completion, request, next(scores)) for completion in group] if wants_scores(request) else group
        for request, group in zip(requests, completions, strict=True)
    ]


def wants_scores(request: GenerateRequest) -> bool:
    """Whether a request asks for logprobs under the model itself."""
    return request.sampling.raw_logprobs or request.sampling.prompt_logprobs


def scored(completion: Completion, request: GenerateRequest, logprobs: np.ndarray) -> Completion:
    """The completion with its part of the logprobs of its whole sequence."""
    num_prompt, sampling = len(request.prompt_ids), request.sampling
    return replace(
        completion,
        raw_logprobs=logprobs[num_prompt:] if sampling.raw_logprobs else None,
        prompt_logprobs=logprobs[:num_prompt] if sampling.prompt_logprobs else None,
    )
