"""Hand-made records, and stand-ins for stages that do nothing but remember what they were asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from redline.types import (
    Completion,
    Delta,
    EngineStats,
    FinishReason,
    GenerateRequest,
    StepReport,
    Task,
    TrainBatch,
    Trajectory,
    TrajectoryGroup,
    VersionSpan,
    WeightSet,
    WeightUpdate,
)

# ── records ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def trajectory(prompt: Sequence[int], completion: Sequence[int], *, version: int = 0, **fields: Any) -> Trajectory:
    """One attempt; its logprobs are -0.5, -1, -1.5, …"""
    values: dict[str, Any] = {
        "token_ids": np.array([*prompt, *completion], dtype=np.int32),
        "loss_mask": np.array([False] * len(prompt) + [True] * len(completion)),
        "logprobs": np.array([0.0] * len(prompt) + [-(i + 1) / 2 for i in range(len(completion))], dtype=np.float32),
        "versions": VersionSpan(version, version),
        "finish_reason": FinishReason.STOP,
        "text": "".join(chr(97 + token % 26) for token in completion),
    }
    return Trajectory(**values | fields)


def group(advantages: Sequence[float], *, task_id: str = "task", version: int = 0, prompt_length: int = 3) -> TrajectoryGroup:
    """Attempts of 1, 2, 3, … tokens at one prompt."""
    prompt = range(10, 10 + prompt_length)
    attempts = [trajectory(prompt, range(20 + i, 21 + 2 * i), version=version) for i in range(len(advantages))]
    return TrajectoryGroup(task_id, attempts, np.array(advantages, dtype=np.float32))


@dataclass
class Attempt:
    """One sequence of a `TrainBatch`: each turn is (tokens, whether the policy chose them)."""

    turns: Sequence[tuple[Sequence[int], bool]]
    advantage: float
    old_logprobs: Sequence[float] | None = None
    """Of the chosen tokens, in order."""

    @property
    def tokens(self) -> list[int]:
        return [token for tokens, _ in self.turns for token in tokens]

    @property
    def mask(self) -> list[bool]:
        return [chosen for tokens, chosen in self.turns for _ in tokens]


def train_batch(
    groups: Sequence[Sequence[Attempt]], *, num_sequences_sampled: int | None = None, num_tokens_left_out: int = 0
) -> TrainBatch:
    """Laid end to end by hand, without the buffer. Attempts beyond those of the groups are a last group that is empty, and so
    are the tokens left out."""
    attempts = [attempt for group in groups for attempt in group]
    masks = [np.array(a.mask, dtype=bool) for a in attempts]
    old = [np.zeros(len(mask), dtype=np.float32) for mask in masks]
    for attempt, mask, logprobs in zip(attempts, masks, old, strict=True):
        if attempt.old_logprobs is not None:
            logprobs[mask] = attempt.old_logprobs
    empty = np.zeros(0)
    sizes = [len(group) for group in groups]
    tokens = [sum(sum(attempt.mask) for attempt in group) for group in groups]
    if num_sequences_sampled is not None:
        groups, sizes, tokens = [*groups, []], [*sizes, num_sequences_sampled - sum(sizes)], [*tokens, num_tokens_left_out]
    return TrainBatch(
        tokens=np.concatenate([empty, *(a.tokens for a in attempts)]).astype(np.int32),
        cu_seqlens=np.cumsum([0, *(len(mask) for mask in masks)], dtype=np.int64),
        group_offsets=np.cumsum([0, *(len(group) for group in groups)], dtype=np.int64),
        loss_mask=np.concatenate([empty, *masks]).astype(bool),
        old_logprobs=np.concatenate([empty, *old]).astype(np.float32),
        advantages=np.array([a.advantage for a in attempts], dtype=np.float32),
        group_sequences=np.array(sizes, dtype=np.int64),
        group_tokens=np.array(tokens, dtype=np.int64),
        versions=VersionSpan(0, 0),
        version=0,
    )


def completion(token_ids: Sequence[int], *, version: int = 0, finish_reason: FinishReason = FinishReason.STOP) -> Completion:
    """Its logprobs are -0.25, -0.5, -0.75, …"""
    return Completion(
        token_ids=np.array(token_ids, dtype=np.int32),
        logprobs=-0.25 * np.arange(1, len(token_ids) + 1, dtype=np.float32),
        finish_reason=finish_reason,
        versions=VersionSpan(version, version),
        queue_s=0.0,
        prefill_s=0.0,
        decode_s=0.0,
    )


REPORT = StepReport(
    loss=0.0,
    grad_norm=0.0,
    learning_rate=0.0,
    entropy=0.0,
    clip_fraction=0.0,
    mismatch_kl=0.0,
    max_ratio=1.0,
    num_tokens=0,
    num_trained_tokens=0,
    num_micro_batches=0,
)


# ── stages ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

Calls = list[tuple[Any, ...]]
"""What was called, in order, by all the fakes that share the list."""


@dataclass
class FakeRollouts:
    """Makes what was begun when it is asked for."""

    calls: Calls
    begun: list[TrajectoryGroup] = field(default_factory=list)

    def begin(self, indices: Sequence[int], version: int) -> None:
        self.calls.append(("rollouts.begin", len(indices), version))
        self.begun += [group([1.0, -1.0], task_id=f"{version}/{i}", version=version) for i in range(len(indices))]

    def arrived(self) -> list[TrajectoryGroup]:
        return []

    def finished(self, patience_s: float | None = None, *, late: bool = False) -> list[TrajectoryGroup]:
        self.calls.append(("rollouts.finished",))
        groups, self.begun = self.begun, []
        return groups

    def cancel(self, indices: Sequence[int]) -> None:
        if indices:
            self.calls.append(("rollouts.cancel", *indices))


@dataclass
class FakeBuffer:
    calls: Calls
    wanted: int = 2
    groups: list[TrajectoryGroup] = field(default_factory=list)
    admitted: int = 0
    """Groups under way."""
    patience_s: float | None = None
    waits_for_late_groups: bool = False

    def cancel_late(self, version: int) -> list[int]:
        return []

    def admit(self, version: int) -> list[int]:
        missing = self.wanted - len(self.groups) - self.admitted
        self.admitted += missing
        self.calls.append(("buffer.admit", version))
        return list(range(missing))

    def has_batch(self, version: int) -> bool:
        return len(self.groups) >= self.wanted

    def offer(self, *groups: TrajectoryGroup) -> None:
        for group in groups:
            self.calls.append(("buffer.offer", group.task_id))
            self.admitted -= 1
            self.groups.append(group)

    def next_batch(self, version: int) -> TrainBatch:
        self.calls.append(("buffer.next_batch", version))
        self.groups = []
        return train_batch([])

    def trained(self, batch: TrainBatch) -> None:
        self.calls.append(("buffer.trained",))


@dataclass
class FakeTrainer:
    calls: Calls
    version: int = 0

    def step(self, batch: TrainBatch) -> StepReport:
        self.calls.append(("trainer.step", self.version))
        self.version += 1
        return REPORT

    def weights(self) -> WeightSet:
        self.calls.append(("trainer.weights", self.version))
        return WeightSet(self.version, {})

    def save(self, folder: Path) -> None:
        self.calls.append(("trainer.save", folder.name))

    def load(self, folder: Path) -> None:
        self.calls.append(("trainer.load", folder.name))

    def flush(self) -> None: ...


@dataclass
class FakeWeightSync:
    calls: Calls

    def writing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def publish(self, weights: WeightSet) -> WeightUpdate:
        self.calls.append(("weight_sync.publish", weights.version))
        return WeightUpdate(weights.version, (), 0)


@dataclass
class FakeEngine:
    """Answers with what `answer` makes of the request and the number of the attempt, all that was submitted in one step."""

    calls: Calls = field(default_factory=list)
    answer: Callable[[GenerateRequest, int], Completion] = lambda request, i: completion([1 + i])
    requests: list[GenerateRequest] = field(default_factory=list)
    submitted: dict[int, GenerateRequest] = field(default_factory=dict)
    stats: EngineStats = field(default_factory=EngineStats)

    def submit(self, request: GenerateRequest, *, streaming: bool = False) -> int:
        self.requests.append(request)
        self.submitted[len(self.requests)] = request
        return len(self.requests)

    def abort(self, request_id: int) -> None:
        self.submitted.pop(request_id, None)

    def end(self, request_id: int, index: int) -> None:
        pass

    def sampled_tokens(self, request_id: int) -> dict[int, int]:
        return {}

    @property
    def has_work(self) -> bool:
        return bool(self.submitted)

    def step(self) -> list[tuple[int, Delta]]:
        self.calls.append(("engine.generate", len(self.submitted)))
        nothing = np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32)
        answers = [(number, request, i) for number, request in self.submitted.items() for i in request.sampling.indices]
        self.submitted = {}
        return [(number, Delta(i, *nothing, completion=self.answer(request, i))) for number, request, i in answers]

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        self.calls.append(("engine.generate", len(requests)))
        self.requests += requests
        return [[self.answer(request, i) for i in range(request.sampling.n)] for request in requests]

    def apply(self, update: WeightUpdate) -> None:
        self.calls.append(("engine.apply", update.version))

    def reset_prefix_cache(self) -> None:
        pass


@dataclass
class FakeWatch:
    calls: Calls
    stop_after: int | None = None
    """Steps after which to ask for a stop."""
    steps_seen: int = 0

    def group_collected(self, group: TrajectoryGroup) -> None:
        self.calls.append(("watch.group_collected", group.task_id))

    def step_finished(self, batch: TrainBatch, report: StepReport, update: WeightUpdate) -> None:
        self.calls.append(("watch.step_finished", update.version))
        self.steps_seen += 1

    def should_stop(self) -> bool:
        self.calls.append(("watch.should_stop",))
        return self.stop_after is not None and self.steps_seen >= self.stop_after


@dataclass
class FakeTasks:
    """Task i asks "question i"; the reward is whatever `scores` says."""

    scores: Callable[[Task, str], Mapping[str, float]] = lambda task, text: {"correct": 1.0}
    asked: list[int] = field(default_factory=list)

    def train(self, index: int) -> Task:
        self.asked.append(index)
        return Task(f"task/{index}", [{"role": "user", "content": f"question {index}"}])

    def held_out(self, count: int) -> list[Task]:
        return [Task(f"held/{i}", [{"role": "user", "content": f"exam {i}"}]) for i in range(count)]

    def score(self, task: Task, text: str) -> Mapping[str, float]:
        return self.scores(task, text)
