"""The records that travel between the stages, one per arrow of the pipeline.

    Task ──► rollouts ──TrajectoryGroup──► buffer ──TrainBatch──► trainer
                ▲                                                    │ WeightSet
           Completion                                                ▼
                └────── engine ◄────────WeightUpdate──────────── weight_sync

Token data is flat values plus offsets from the sampler to the device: int32 tokens laid end to end, and int64 offsets that
serve as Arrow list offsets on disk and as `cu_seqlens` in the trainer.

Letters in shapes: T packed tokens, S sequences, P prompts, G attempts per group, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Message = Mapping[str, Any]
"""One message of a conversation: {"role": ..., "content": ...}, and `tool_calls` where the assistant called tools."""


class Pieces:
    """A flat array that lies in several places, such as two files, and is read as one. Only what is taken of it is copied."""

    __slots__ = ("arrays", "offsets")

    def __init__(self, arrays: Sequence[np.ndarray]) -> None:
        self.arrays = tuple(arrays)
        """One-dimensional, of one dtype, at least one."""
        self.offsets = np.cumsum([0, *(len(array) for array in arrays)], dtype=np.int64)
        """int64[pieces + 1]."""

    def __len__(self) -> int:
        return int(self.offsets[-1])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.arrays[0].dtype

    def __getitem__(self, key: slice | np.ndarray) -> np.ndarray:
        """A slice that lies within one piece is a view of it, everything else a copy: slices, places, or a mask."""
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            piece = int(np.searchsorted(self.offsets, start, side="right")) - 1
            if step == 1 and start <= end and piece < len(self.arrays) and end <= self.offsets[piece + 1]:
                return self.arrays[piece][start - self.offsets[piece] : end - self.offsets[piece]]
            key = np.arange(start, end, step)
        index = np.flatnonzero(key) if key.dtype == np.bool_ else key
        out = np.empty(index.size, self.dtype)
        self.take(index.ravel(), out)
        return out.reshape(index.shape)

    def take(self, index: np.ndarray, out: np.ndarray) -> None:
        """Write the values at these places into `out`, in their order."""
        piece_N = np.searchsorted(self.offsets, index, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(piece_N)) + 1).tolist(), len(index)]
        for start, end in pairwise(cuts):
            if start < end:
                piece = int(piece_N[start])
                take(self.arrays[piece], index[start:end] - self.offsets[piece], out[start:end])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """All of it, copied together."""
        return np.concatenate(self.arrays).astype(dtype or self.dtype, copy=False)


Flat = np.ndarray | Pieces
"""One-dimensional, in one place or several."""


def take(values: Flat, index: np.ndarray, out: np.ndarray) -> None:
    """Write the values at these places straight into `out`, which has their dtype."""
    assert out.dtype == values.dtype, f"{values.dtype} cannot be written as {out.dtype} without a copy"
    if isinstance(values, Pieces):
        values.take(index, out)
    else:
        np.take(values, index, out=out, mode="clip")  # with any other mode NumPy writes to a copy first


@dataclass(slots=True, frozen=True)
class VersionSpan:
    """The policy versions a record was made with. Version v is the policy after v optimizer steps."""

    oldest: int
    newest: int

    def lag(self, version: int) -> int:
        """Steps the trainer is ahead of the oldest token: `version - oldest`."""
        return version - self.oldest


@dataclass(slots=True, frozen=True)
class Task:
    """One problem to attempt."""

    id: str
    """Unique within its source; names the task in files and logs."""
    messages: Sequence[Message]
    """The conversation so far; the chat template renders it into the prompt."""
    answer: str = ""
    """The reference answer, where the task has one."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else its reward needs."""

    def own_copy(self) -> Task:
        """The task for one try at it, which may change its messages and data. Objects in them are shared (`plain_copy`)."""
        return replace(self, messages=plain_copy(self.messages), data=plain_copy(self.data))


def plain_copy(value: Any) -> Any:
    """The value with lists, dicts, sets and tuples copied at every depth. Texts, arrays and all other objects are shared, and
    so is a tuple of nothing else."""
    kind = type(value)
    if kind is dict:
        return {key: part if type(part) is str else plain_copy(part) for key, part in value.items()}
    if kind is list:
        return [plain_copy(part) if type(part) in _COPIED else part for part in value]
    if kind is tuple:
        copied = tuple([plain_copy(part) for part in value])
        return copied if any(new is not old for new, old in zip(copied, value, strict=True)) else value
    return set(value) if kind is set else value


_COPIED = frozenset((dict, list, tuple, set))


# ── engine ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


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

    @property
    def first_token_s(self) -> float:
        """Seconds from submission to the first token."""
        return self.queue_s + self.prefill_s


@dataclass(slots=True, frozen=True)
class Delta:
    """A piece of a streamed completion."""

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

    @property
    def kv_use(self) -> float:
        """kv_blocks_used / kv_blocks_total."""
        return self.kv_blocks_used / self.kv_blocks_total

    @property
    def prefix_hit_rate(self) -> float:
        """prefix_hit_tokens / prefix_query_tokens."""
        return self.prefix_hit_tokens / self.prefix_query_tokens if self.prefix_query_tokens else 0.0


# ── rollouts → buffer ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class Failure:
    """Why an attempt has no reward; recorded, never raised into the loop."""

    stage: str
    """Where it was: "task" (the task source gave none), "prompt" (no prompt could be made of it, or the engine refused it),
    "reward" (the task's `score`, or a reward model), "environment" (its `play`)."""
    reason: str
    where: str = ""
    """The place in the user's code, where it was there: `rewards.py:7, in score: return 1 / 0`. Stored with the reason."""
    hint: str = ""
    """What to do about it, where that is known; kept in memory only."""

    def __str__(self) -> str:
        return f"{self.stage}: {self.reason}" + (f", at {self.where}" if self.where else "")


@dataclass(slots=True, frozen=True)
class ToolCall:
    """A function that the policy wants called."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(slots=True, frozen=True)
class Turn:
    """One reply of the policy inside an attempt."""

    text: str
    """What the policy said, decoded without special tokens."""
    start: int
    """The first of its tokens in the `token_ids` of its sequence."""
    end: int
    """One past the last of them."""
    versions: VersionSpan
    finish_reason: FinishReason
    queue_s: float
    """Seconds from submission to the start of its prefill."""
    prefill_s: float
    """Seconds from there to its first token."""
    decode_s: float
    """Seconds from its first token to its last."""
    message: Message = field(default_factory=dict)
    """The reply as the assistant's message. Append this very object to the conversation for the next turn: the tokens that were
    sampled then stand in the next prompt as they are."""
    tool_calls: Sequence[ToolCall] = ()
    """Calls in the reply, in the format of the model's own chat template; none where no tools were offered."""
    problem: str = ""
    """Why a call in the reply could not be read, in words that can be shown to the policy; empty where nothing is wrong."""
    environment_s: float = 0.0
    """Seconds of the environment before it asked for this reply: since the reply before, or since the attempt began."""
    prompt_s: float = 0.0
    """Seconds in which the messages became the prompt's tokens."""
    parse_s: float = 0.0
    """Seconds in which the sampled tokens became text, message and tool calls."""
    switches: Sequence[tuple[int, int]] = ()
    """(token, version) where the weights changed in the middle of it, as `Completion.switches`; tokens are counted from
    `start`."""

    def version_spans(self) -> list[tuple[int, int, int]]:
        """(first token, one past the last, version) of each run of its tokens that one version sampled, counted from the
        beginning of the sequence. Where it is not known where the weights changed, the whole turn counts as the oldest's."""
        starts = [(self.start, self.versions.oldest), *((self.start + token, version) for token, version in self.switches)]
        ends = [*(start for start, _ in starts[1:]), self.end]
        return [(start, end, version) for (start, version), end in zip(starts, ends, strict=True) if end > start]

    @property
    def num_tokens(self) -> int:
        """Tokens the policy chose: end - start."""
        return self.end - self.start

    @property
    def first_token_s(self) -> float:
        """Seconds from submission to the first token: queue + prefill."""
        return self.queue_s + self.prefill_s

    @property
    def total_s(self) -> float:
        """Seconds from submission to the last token."""
        return self.queue_s + self.prefill_s + self.decode_s


@dataclass(slots=True, frozen=True)
class Trajectory:
    """One sequence of an attempt at a task; most attempts are a single one. A new one begins for each role, and where the
    environment asks something that does not go on from what was said before."""

    token_ids: np.ndarray
    """int32[tokens]: the prompt and everything after it, as the engine saw it; a single 0 where the attempt failed before the
    engine saw anything, since no sequence is without a token."""
    loss_mask: np.ndarray
    """bool[tokens]: True where the policy chose the token."""
    logprobs: np.ndarray
    """float32[tokens]: the engine's logprob of each chosen token, 0 elsewhere."""
    versions: VersionSpan
    finish_reason: FinishReason
    text: str
    """What the policy said, decoded without special tokens."""
    reward: float = 0.0
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Named parts, before weighting; `reward` is their weighted sum."""
    failure: Failure | None = None
    turns: Sequence[Turn] = ()
    """What the policy said in this sequence, in order."""
    attempt: int | None = None
    """Which of the group's attempts it belongs to; None where it is an attempt by itself. All sequences of one attempt and role
    have one reward and one advantage, and where an attempt failed, all its sequences have the failure."""
    role: str = ""
    """Who the policy was, in a game of several roles. Attempts are compared with those of the same role."""
    score_s: float = 0.0
    """Seconds from the last reply of the attempt to its reward: the end of the game, and the scoring. The same in all sequences
    of an attempt."""
    truncated: bool = False
    """Whether the attempt had used up its turns or tokens (`rollouts.environment`). The same in all sequences of an attempt;
    kept in memory only, for metrics."""
    retries: int = 0
    """How often the attempt was begun again because it had failed. The same in all sequences of an attempt."""

    @property
    def num_completion_tokens(self) -> int:
        """Tokens the policy chose: the sum of `loss_mask`."""
        return int(np.count_nonzero(self.loss_mask))


def by_attempt(trajectories: Iterable[Trajectory], *, by_role: bool = False) -> list[list[Trajectory]]:
    """The sequences of each attempt, or with `by_role` of each role in each attempt, in the order of their first."""
    trajectories = list(trajectories)
    if all(trajectory.attempt is None for trajectory in trajectories):  # as in every run of single replies
        return [[trajectory] for trajectory in trajectories]
    found: dict[tuple[int | None, int, str], list[Trajectory]] = {}
    for place, trajectory in enumerate(trajectories):
        alone = place if trajectory.attempt is None else -1
        found.setdefault((trajectory.attempt, alone, trajectory.role if by_role else ""), []).append(trajectory)
    return list(found.values())


@dataclass(slots=True, frozen=True)
class TrajectoryGroup:
    """rollouts → buffer: the G attempts at one task, with their advantages."""

    task_id: str
    trajectories: Sequence[Trajectory]
    """S sequences of the G attempts, those of one attempt one after the other; S = G where each attempt is a single one."""
    advantages: np.ndarray
    """float32[S]; one number per sequence, 0 where its attempt failed. For an estimator that needs the whole batch or a critic
    (`rollouts.advantages`: batch, batch_baseline, gae) what it starts from: the reward, for batch_baseline less its mean."""

    index: int = 0
    """The index of its task in the run; the task and its randomness follow from it."""
    latency_s: float = math.nan
    """Seconds from when its attempts began until all had their reward; kept in memory only, for metrics."""
    num_cut_off: int = 0
    """Attempts that were begun and cut off, since enough others had ended; kept in memory only, for metrics."""

    @property
    def versions(self) -> VersionSpan:
        """The span that covers every attempt."""
        spans = [t.versions for t in self.trajectories]
        return VersionSpan(min(s.oldest for s in spans), max(s.newest for s in spans))

    @property
    def attempts(self) -> list[list[Trajectory]]:
        """The sequences of each attempt."""
        return by_attempt(self.trajectories)

    @property
    def reward(self) -> float | None:
        """Mean over the attempts that have a reward, and over their roles; None where all failed."""
        rewards = [own[0].reward for own in by_attempt(self.trajectories, by_role=True) if own[0].failure is None]
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def has_signal(self) -> bool:
        """False when every advantage is zero: a group that is its own baseline then teaches nothing."""
        return bool(np.any(self.advantages != 0))


@dataclass(slots=True, frozen=True)
class Reaction:
    """What a `ports.Game` answers to a reply of the policy."""

    observation: str | Sequence[Message] = ""
    """What the policy sees next: a text, shown as the user's, or messages to append."""
    reward: float | Mapping[str, float] = 0.0
    """Of this move; the rewards of an attempt, or their named parts, are added up."""
    done: bool = False


# ── buffer → trainer ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class TrainBatch:
    """buffer → trainer: sequences laid end to end, never padded, with the groups they came from.

    Tokens and logprobs are views of the trajectory files, in as many pieces as the groups lie in. An attempt that is not
    trained on (it failed, or has no advantage) stays in view, since leaving it out would mean to copy all others: its loss mask
    is cleared and its advantage 0, and the trainer computes no sequence without a trained token. A batch that was put together
    in memory has no such attempts, and a group of it may be empty. Either way attempts without an advantage count in the means,
    since their gradient is exactly zero; attempts that failed do not, since they say nothing about the policy.
    """

    tokens: Flat
    """int32[T]."""
    cu_seqlens: np.ndarray
    """int64[S + 1]; sequence s is `tokens[cu_seqlens[s]:cu_seqlens[s + 1]]`."""
    group_offsets: np.ndarray
    """int64[groups + 1]; group g holds the sequences from `group_offsets[g]` up to `group_offsets[g + 1]`."""
    loss_mask: np.ndarray
    """bool[T]: True where the policy chose the token and is trained on it; all False in an attempt that is not trained on."""
    old_logprobs: Flat
    """float32[T], from the engine; of no meaning where `loss_mask` is False."""
    advantages: np.ndarray
    """float32[S], of the groups; 0 in an attempt that is not trained on."""
    group_sequences: np.ndarray
    """int64[groups]: sequences of each group that count in the mean over sequences, those left out or masked for want of signal
    included, those of attempts that failed not."""
    group_tokens: np.ndarray
    """int64[groups]: tokens the policy chose in those attempts; they count in the mean over tokens."""
    versions: VersionSpan
    version: int
    """The policy version the batch was assembled for."""
    indices: tuple[int, ...] = ()
    """Indices of the groups, those without signal included."""
    lags: tuple[int, ...] = ()
    """Steps that the policy is ahead of the oldest token of each group."""
    num_attempts: int | None = None
    """Attempts that the counted sequences belong to; None where each sequence is one."""

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    @property
    def num_groups(self) -> int:
        return len(self.group_offsets) - 1

    @property
    def num_sequences_sampled(self) -> int:
        """Sequences that count in the mean over sequences: the sum of `group_sequences`."""
        return int(self.group_sequences.sum())

    @property
    def num_attempts_sampled(self) -> int:
        """Attempts that those sequences belong to."""
        return self.num_sequences_sampled if self.num_attempts is None else self.num_attempts

    @property
    def num_tokens_sampled(self) -> int:
        """Tokens that count in the mean over tokens: the sum of `group_tokens`."""
        return int(self.group_tokens.sum())

    @property
    def num_tokens_left_out(self) -> int:
        """Sampled tokens without a gradient: num_tokens_sampled less the sum of `loss_mask`."""
        return self.num_tokens_sampled - int(np.count_nonzero(self.loss_mask))

    @property
    def lag(self) -> int:
        """Steps between the policy being trained and the oldest token in the batch."""
        return self.versions.lag(self.version)


@dataclass(slots=True, frozen=True)
class StepReport:
    """What one step did; every value is a mean over trained tokens unless its name says otherwise."""

    loss: float
    """With several updates per step their mean, as is the gradient norm."""
    grad_norm: float
    """Global L2 norm before clipping."""
    learning_rate: float
    entropy: float
    """Nats, of the distribution sampled from."""
    clip_fraction: float
    mismatch_kl: float
    """Estimate of KL(engine ‖ trainer) on the sampled tokens, k3: mean of r - 1 - log r with r = π_trainer / π_engine."""
    max_ratio: float
    """Largest r over the batch."""
    num_tokens: int
    """Tokens that went through the network (a group's prompt counts once)."""
    num_trained_tokens: int
    num_micro_batches: int
    imbalance: float = 1.0
    """Cost of the dearest micro-batch over the mean."""
    num_padding_tokens: int = 0
    """Tokens that went through the network for nothing."""
    flops: int = 0
    """Operations that the policy's forward and backward passes need (`models/sizes/flops.py`): no padding, a group's prompt
    once, nothing for what is computed again."""
    skipped: bool = False
    """The loss or the gradient was not finite, and the update of it was not made."""
    extra: Mapping[str, float] = field(default_factory=dict)
    """What only some recipes have: `kl`, `masked` (share of tokens without weight), `value_loss`, …"""


# ── trainer → weight_sync → engine ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class WeightSet:
    """trainer → weight_sync: the policy's parameters as the trainer holds them."""

    version: int
    tensors: Mapping[str, torch.Tensor]
    """Name to the trainer's own storage, in the compute dtype; reading it copies nothing."""


@dataclass(slots=True, frozen=True)
class WeightUpdate:
    """weight_sync → engine: what the engine must take over before it samples again."""

    version: int
    changed: tuple[str, ...]
    """Names whose values changed."""
    bytes_moved: int
    """Bytes copied to get here; 0 when storage is shared."""
    seconds: dict[str, float] = field(default_factory=dict, compare=False)
    """Filled when it is applied: seconds of each part (`gather`, `transfer`, …), and `pause`, for which the engine that took
    longest stood still."""
