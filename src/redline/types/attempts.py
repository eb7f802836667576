"""What rollouts make of completions, and hand to the buffer: turns, trajectories, groups."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from redline.types.sampling import FinishReason, VersionSpan
from redline.types.tasks import Message


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
class ReplySoFar:
    """A reply of the policy while it is sampled: what `until` of `policy.say` is asked about."""

    text: str
    """What the policy has said, decoded without special tokens. Half a character at its end is left out."""
    tool_calls: Sequence[ToolCall] = ()
    """Calls that are complete, the end of their format included; none of them while the policy thinks."""


Until = Callable[[ReplySoFar], object]
"""Whether a reply is to end where it is: any value, which counts as true or false."""


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
    routing: np.ndarray | None = None
    """uint8[tokens, layers with experts · choices], as `Completion.routing`: what the engine did when it sampled each reply.
    None where it records nothing."""

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
    expected_tokens: float | None = None
    """Mean tokens of the last attempts at its task when it began; None where there were none. In memory only, for metrics."""

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
    def lengths(self) -> list[int]:
        """Tokens that the policy chose in each attempt."""
        return [sum(t.num_completion_tokens for t in own) for own in self.attempts]

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
    """What this move is worth; the rewards of an attempt's moves, or their named parts, are added up."""
    done: bool = False
