"""What an engine is asked for, and what it gives back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np

UNKNOWN_EXPERT = 255
"""In place of an expert, where it is not known which a token went to."""


@dataclass(slots=True, frozen=True)
class VersionSpan:
    """The policy versions a record was made with. Version v is the policy after v optimizer steps."""

    oldest: int
    newest: int

    def lag(self, version: int) -> int:
        """Steps the trainer is ahead of the oldest token: `version - oldest`."""
        return version - self.oldest


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How to sample; the names are those of the OpenAI API and vLLM where they have one."""

    max_tokens: int
    """Most new tokens, the stop token included."""
    n: int = 1
    """Completions per prompt; the prompt is prefilled once."""
    first_index: int = 0
    """Index of the first of them: the completions of one prompt may be asked for in several requests."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Keep only the k likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the likeliest tokens until their probabilities sum to this, the one that crosses it included."""
    min_p: float = 0.0
    """Keep only tokens at least this fraction as likely as the likeliest."""
    seed: int = 0
    """Completion i of a request draws from the stream (seed, i): the same in any batch."""
    stop_token_ids: tuple[int, ...] = ()
    """Generation ends after any of these; the stop token is part of the completion."""
    stop: tuple[str, ...] = ()
    """Generation ends once the text holds any of these; the token that completed it is part of the completion."""
    min_tokens: int = 0
    """No stop token is sampled, and no stop string heeded, before this many tokens."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens before temperature."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Nothing else can be sampled."""
    raw_logprobs: bool = False
    """Also return each sampled token's logprob under the model itself: no temperature, bias or filter."""
    top_logprobs: int = 0
    """Also return this many likeliest tokens at each position, with logprobs under the distribution sampled from."""
    prompt_logprobs: bool = False
    """Also return the logprob of every prompt token but the first, under the model itself."""

    @property
    def indices(self) -> range:
        """first_index, …, first_index + n - 1."""
        return range(self.first_index, self.first_index + self.n)


@dataclass(slots=True, frozen=True)
class GenerateRequest:
    """One prompt for the engine."""

    prompt_ids: np.ndarray
    """int32[prompt tokens]."""
    sampling: SamplingParams
    adapter: str | None = None
    """The name of a resident LoRA adapter; None samples from the policy itself."""
    order: tuple[int, float] = (0, 0.0)
    """Of the requests that wait in an engine the smallest begins first, and of equal ones the one that came first. Changes
    nothing of what is sampled."""
    task: str = ""
    """The id of the task that it is an attempt at, where there is one: an engine that guesses tokens looks in other attempts
    at it. Changes nothing of what is sampled."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    """The caller no longer wanted it; what was sampled until then is there."""


@dataclass(slots=True, frozen=True)
class TopLogprobs:
    """The k likeliest tokens at each position, likeliest first."""

    token_ids: np.ndarray
    """int32[tokens, k]."""
    logprobs: np.ndarray
    """float32[tokens, k]."""


@dataclass(slots=True, frozen=True)
class Completion:
    """engine → rollouts: one sampled continuation."""

    token_ids: np.ndarray
    """int32[new tokens], the stop token included."""
    logprobs: np.ndarray
    """float32[new tokens]: log-probability under the distribution actually sampled from (temperature, filters, masks)."""
    finish_reason: FinishReason
    versions: VersionSpan
    queue_s: float
    """Seconds from submission to the start of its prefill."""
    prefill_s: float
    """Seconds from there to its first token."""
    decode_s: float
    """Seconds from its first token to its last."""
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were found in the prefix cache."""
    stop: str | None = None
    """The stop string that ended it."""
    raw_logprobs: np.ndarray | None = None
    """float32[new tokens], where asked for."""
    top_logprobs: TopLogprobs | None = None
    prompt_logprobs: np.ndarray | None = None
    """float32[prompt tokens]; NaN for the first, which nothing predicts."""
    switches: Sequence[tuple[int, int]] = ()
    """(token, version) where the weights changed under way: this version sampled it and those after it, up to the next one.
    Tokens before the first are those of `versions.oldest`."""
    routing: np.ndarray | None = None
    """uint8[prompt and new tokens, layers with experts · choices], where the engine records it: the experts that each token
    went to, layer by layer, the likeliest first; `UNKNOWN_EXPERT` for the last token, which did not pass through the network,
    and for all where the completion was given up before."""

    @property
    def first_token_s(self) -> float:
        """Seconds from submission to the first token."""
        return self.queue_s + self.prefill_s

    def cut(self, count: int) -> Completion:
        """The completion as if it had stopped after `count` tokens. It keeps the seconds that it took, and both its versions
        where it is not known where they changed."""
        switches = tuple(switch for switch in self.switches if switch[0] < count)
        newest = (switches[-1][1] if switches else self.versions.oldest) if self.switches else self.versions.newest
        top, raw = self.top_logprobs, self.raw_logprobs
        return replace(
            self,
            token_ids=self.token_ids[:count],
            logprobs=self.logprobs[:count],
            finish_reason=FinishReason.STOP,
            versions=VersionSpan(self.versions.oldest, newest),
            stop=self.stop if count == len(self.token_ids) else None,
            raw_logprobs=None if raw is None else raw[:count],
            top_logprobs=None if top is None else TopLogprobs(top.token_ids[:count], top.logprobs[:count]),
            switches=switches,
            routing=None if self.routing is None else self.routing[: len(self.routing) - len(self.token_ids) + count],
        )


@dataclass(slots=True)
class Delta:
    """A piece of a streamed completion. Not frozen, which would take thrice as long to make: a step may have hundreds."""

    index: int
    """Which of the request's n completions."""
    token_ids: np.ndarray
    """int32: the tokens since the last piece; may be none in the last."""
    logprobs: np.ndarray
    """float32, of those tokens."""
    top_logprobs: TopLogprobs | None = None
    """The most likely tokens at each place, where asked for."""
    completion: Completion | None = None
    """The whole, with the last piece."""


@dataclass(slots=True, frozen=True)
class EngineStats:
    """What an engine says of itself: now, and since it was made."""

    running: int = 0
    """Sequences that hold a row."""
    waiting: int = 0
    kv_blocks_used: int = 0
    """Held by sequences; cached blocks that no sequence holds are free."""
    kv_blocks_total: int = 1
    kv_blocks_peak: int = 0
    """Most held at once since the last weight update."""
    batch_size: int = 0
    """Sequences that decoded in the last step."""
    tokens_per_s: float = 0.0
    """Sampled, over the last second or so of steps."""
    version: int = 0
    steps: int = 0
    preemptions: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    """Computed; those found in the prefix cache are not among them."""
    generated_tokens: int = 0
    requests: int = 0
    """Finished, aborted ones included."""
    adapters: int = 0
    """Resident LoRA adapters."""
    decode_steps: int = 0
    """In which sequences decoded; a launch of several counts as several."""
    decoded_rows: int = 0
    """The sum of those steps' batch sizes."""
    kv_blocks_peak_before: int = 0
    """Most held at once between the last two weight updates."""
    drafted_tokens: int = 0
    """Guessed and verified (`engine.speculation`)."""
    accepted_tokens: int = 0
    """Guessed tokens that were what was sampled."""
    speculation_saved_s: float = 0.0
    """Seconds that accepted tokens saved, less what verifying them took: an estimate from steps that were measured."""

    @property
    def kv_use(self) -> float:
        """kv_blocks_used / kv_blocks_total."""
        return self.kv_blocks_used / self.kv_blocks_total

    @property
    def prefix_hit_rate(self) -> float:
        """prefix_hit_tokens / prefix_query_tokens."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0
