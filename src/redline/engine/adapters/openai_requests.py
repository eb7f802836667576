"""What a server with OpenAI's API is asked for, in the names of its fields."""

from __future__ import annotations

import math
from collections.abc import Iterator

from redline.engine.adapters.json_client import Json
from redline.engine.adapters.seeds import completion_seed
from redline.types import GenerateRequest, SamplingParams

LEAST_BIAS = -100.0
"""OpenAI's value for a token that must not come; JSON has no infinity."""


def certainties(request: GenerateRequest) -> Iterator[tuple[str, Json]]:
    """What makes the distribution sampled from another than the model's, and fields that do so in the extreme."""
    sampling = request.sampling
    if sampling.top_k or sampling.top_p < 1 or sampling.min_p:
        yield "top_k, top_p and min_p", {"top_k": 1}
    is_masked = sampling.allowed_token_ids is not None or sampling.min_tokens > 0
    if sampling.temperature not in (0, 1) or sampling.logit_bias or is_masked:
        yield "temperature and logit_bias", {"logit_bias": {str(request.prompt_ids[0]): -LEAST_BIAS}}


def sampling_fields(sampling: SamplingParams, index: int) -> Json:
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
