"""A completion in the making, as the scheduler sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, auto

import numpy as np

from redline.engine.native.text.stop_strings import StopSearch
from redline.types import FinishReason, GenerateRequest, SamplingParams

NO_ROW = -1
NO_SLOT = -1
"""The slot of a sequence without an adapter."""


class Stage(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    """Holds nothing; tokens it had sampled before a preemption are kept."""
    PREFILL = auto()
    """Holds a row and blocks; part of its tokens may still have to go through the network."""
    FOLLOWING = auto()
    """Holds a row; takes over its leader's blocks when the shared prompt is done."""
    DECODE = auto()
    FINISHED = auto()


@dataclass(slots=True, frozen=True)
class Wants:
    """What any sequence of a batch asks for beyond a temperature; the host knows, so kernels need not look."""

    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    bias: bool = False
    min_tokens: bool = False
    raw: bool = False
    top: int = 0
    lora: bool = False
    """An adapter."""

    @property
    def is_plain(self) -> bool:
        """Whether it needs temperature alone of the sampler."""
        return not (self.top_k or self.top_p or self.min_p or self.bias or self.min_tokens or self.raw or self.top)

    @classmethod
    def of(cls, sampling: SamplingParams, *, lora: bool = False) -> Wants:
        """The same object for the same wishes, so that those of a batch are told apart without looking into them."""
        wants = cls(
            top_k=sampling.top_k > 0,
            top_p=sampling.top_p < 1,
            min_p=sampling.min_p > 0,
            bias=bool(sampling.logit_bias) or sampling.allowed_token_ids is not None,
            min_tokens=sampling.min_tokens > 0 and bool(sampling.stop_token_ids),
            raw=sampling.raw_logprobs,
            top=sampling.top_logprobs,
            lora=lora,
        )
        return _KNOWN.setdefault(wants, wants)

    def __or__(self, other: Wants) -> Wants:
        return Wants(
            self.top_k or other.top_k,
            self.top_p or other.top_p,
            self.min_p or other.min_p,
            self.bias or other.bias,
            self.min_tokens or other.min_tokens,
            self.raw or other.raw,
            max(self.top, other.top),
            self.lora or other.lora,
        )


_KNOWN: dict[Wants, Wants] = {}
_NONE = np.empty(0, np.float32)


@dataclass(slots=True, eq=False)
class Sequence:
    """One of a request's n completions. Sampled tokens live in the arrays of the row it holds; between rows, in `sampled`."""

    request_id: int
    index: int
    request: GenerateRequest
    submitted: float
    wants: Wants
    streaming: int = 0
    """Tokens of a piece at least; 0 where only the whole is wanted."""
    adapter_slot: int = NO_SLOT
    salt: bytes = b""
    """Version and adapter of the keys and values it computes."""
    stage: Stage = Stage.WAITING
    row: int = NO_ROW
    blocks: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    """Hashes of its full blocks, as far as they were needed."""
    cacheable: bool = True
    """False once its blocks mix policy versions."""
    tokens: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    """int32: what its prefill must put through the network, the prompt and whatever it sampled before a preemption."""
    num_computed: int = 0
    """How many of `tokens` have their keys and values in the cache."""
    followers: list[Sequence] = field(default_factory=list)
    elder: Sequence | None = None
    """The leader of its request, which had room before it; it begins once the elder's prompt is computed."""
    sampled: Sampled | None = None
    """What it had sampled when it was last preempted."""
    cached_tokens: int = 0
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    oldest_version: int = -1
    newest_version: int = -1
    switches: list[tuple[int, int]] = field(default_factory=list)
    """As `Completion.switches`."""
    finish_reason: FinishReason | None = None
    stop: str | None = None
    streamed: int = 0
    """Tokens already handed out in pieces."""
    stop_search: StopSearch | None = None
    """From its first token on, where the request has stop strings."""
    raw: list[float] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    prompt_logprobs: np.ndarray = field(init=False)
    """float32[prompt tokens], NaN where not computed; the sequences of a request share it once their prompt is."""

    def __post_init__(self) -> None:
        wanted = self.request.sampling.prompt_logprobs
        self.prompt_logprobs = np.full(self.num_prompt, np.nan, np.float32) if wanted else _NONE

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_sampled_before(self) -> int:
        """Tokens sampled before the current prefill: the number of its next random draw."""
        return len(self.tokens) - self.num_prompt

    def begin(self, row: int) -> None:
        self.row = row
        if not self.started:
            self.started = time.perf_counter()


@dataclass(slots=True, frozen=True)
class Sampled:
    """Tokens and logprobs taken out of a row."""

    token_ids: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def nothing(cls) -> Sampled:
        return cls(np.empty(0, np.int32), np.empty(0, np.float32))
