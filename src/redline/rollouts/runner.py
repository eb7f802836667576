"""Single-turn rollouts: tasks → prompts → completions → rewards → groups with advantages."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from redline.config.schema import RolloutsConfig
from redline.errors import boundary
from redline.ports import Engine, TaskSource
from redline.rollouts.advantages import group_advantages
from redline.rollouts.chat import Chat
from redline.rollouts.reward_helpers import RewardHelpers
from redline.rollouts.rewards import REWARD_MODEL_PART, finite_parts, overlong_penalty, total_reward
from redline.telemetry import span
from redline.types import Completion, EngineCall, Failure, GenerateRequest, SamplingParams, Task, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from redline.rollouts.reward_model import RewardModel  # it needs torch, and most runs do not need it

EVALUATION_STREAM = 2**31
"""Added to a task's number where evaluation samples it, so that no evaluation repeats a training sample's randomness."""


class SingleTurnRollouts:
    """One prompt, G answers. Implements `ports.Rollouts`."""

    def __init__(
        self,
        tasks: TaskSource,
        engine: Engine,
        chat: Chat,
        config: RolloutsConfig,
        stop_token_ids: tuple[int, ...],
        seed: int,
        reward_model: RewardModel | None = None,
        max_reward_workers: int = 1,
    ) -> None:
        """`max_reward_workers`: threads that may score at once."""
        self._tasks = tasks
        self._engine = engine
        self._chat = chat
        self._config = config
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        self._reward_model = reward_model
        self._judging = threading.Lock()
        """The reward model is used by one thread at a time."""
        self.max_reward_workers = max_reward_workers
        self._helpers = RewardHelpers(max_reward_workers)
        self._begun: list[int] = []

    def begin(self, numbers: Sequence[int], version: int) -> None:
        self._begun += numbers

    def arrived(self) -> list[TrajectoryGroup]:
        return []  # nobody works on them meanwhile

    def abandon(self, numbers: Sequence[int]) -> None:
        self._begun = [number for number in self._begun if number not in numbers]

    def finished(self, patience_s: float | None = None, *, late: bool = False) -> list[TrajectoryGroup]:
        """All that was begun, attempted now, by the caller's own hands, however long it takes."""
        numbers, self._begun = self._begun, []
        began = time.perf_counter()
        tasks = [self.task(number) for number in numbers]
        attempts = self.attempt(tasks, self._config.group_size, self._config.temperature, streams=numbers)
        return [self.group(*parts, began) for parts in zip(numbers, tasks, attempts, strict=True)]

    # ── one group, in pieces ───────────────────────────────────────────────────────────────────────────────────────────

    def task(self, number: int) -> Task:
        with span("rollouts.tasks"):
            return self._tasks.train(number)

    def request(self, number: int, task: Task) -> GenerateRequest:
        """For all attempts of a group."""
        with span("rollouts.prompts"):
            return self._request(task, self._config.group_size, self._config.temperature, number)

    def scored(self, task: Task, request: GenerateRequest, completions: Sequence[Completion]) -> list[Trajectory]:
        with span("rollouts.reward"):
            attempts = [self._score(task, request, completions)]
        return self._judge([task], attempts)[0]

    def group(self, number: int, task: Task, trajectories: Sequence[Trajectory], began: float) -> TrajectoryGroup:
        """With the advantages that a group can know by itself. `began` is when its attempts did, on `time.perf_counter`."""
        with span("rollouts.advantages"):
            scores = np.array([t.reward for t in trajectories], dtype=np.float32)
            if self._config.overlong_fraction:
                trajectories = [self._punished_for_length(t) for t in trajectories]
            rewards = np.array([t.reward for t in trajectories], dtype=np.float32)
            failed = np.array([t.failure is not None for t in trajectories])
            advantages = group_advantages(rewards, failed, self._config.advantages, scores)
            return TrajectoryGroup(task.id, trajectories, advantages, number, time.perf_counter() - began)

    # ── many at once ───────────────────────────────────────────────────────────────────────────────────────────────────

    def attempt(self, tasks: Sequence[Task], n: int, temperature: float, streams: Sequence[int]) -> list[list[Trajectory]]:
        """n scored answers to each task, which samples from its stream of the run's seed."""
        with span("rollouts.prompts"):
            requests = [self._request(task, n, temperature, stream) for task, stream in zip(tasks, streams, strict=True)]
        with span("engine.schedule"):  # what of it is neither prefill nor decode
            answers = self._engine.generate(requests)
        with span("rollouts.reward"):
            attempts = self._score_all(tasks, requests, answers)
        return self._judge(tasks, attempts)

    def memory(self) -> dict[str, int]:
        """Bytes by kind that it holds on the device: a reward model's."""
        return self._reward_model.memory() if self._reward_model else {}

    def close(self) -> None:
        """Its helpers end."""
        self._helpers.close()

    def evaluate(self, tasks: Sequence[Task]) -> list[list[Trajectory]]:
        """Answers to held-out tasks, with the same randomness every time, so that two evaluations differ by policy alone."""
        evaluation = self._config.evaluation
        streams = range(EVALUATION_STREAM, EVALUATION_STREAM + len(tasks))
        return self.attempt(tasks, evaluation.samples_per_task, evaluation.temperature, streams)

    def _request(self, task: Task, n: int, temperature: float, stream: int) -> GenerateRequest:
        sampling = SamplingParams(
            max_tokens=self._config.max_new_tokens,
            n=n,
            temperature=temperature,
            stop_token_ids=self._stop_token_ids,
            seed=(self._seed << 32) + stream,
        )
        return GenerateRequest(self._chat.prompt_ids(task), sampling)

    def _score(self, task: Task, request: GenerateRequest, completions: Sequence[Completion]) -> list[Trajectory]:
        texts = self._chat.texts([c.token_ids for c in completions])
        return [self._trajectory(task, request, c, text) for c, text in zip(completions, texts, strict=True)]

    def _score_all(
        self, tasks: Sequence[Task], requests: Sequence[GenerateRequest], answers: Sequence[Sequence[Completion]]
    ) -> list[list[Trajectory]]:
        """As `_score` does for each task, and in that order, but perhaps with the help of others."""
        attempts = [
            (task, request, completion)
            for task, request, completions in zip(tasks, requests, answers, strict=True)
            for completion in completions
        ]
        texts = self._chat.texts([completion.token_ids for _, _, completion in attempts])
        works = [partial(self._trajectory, *attempt, text) for attempt, text in zip(attempts, texts, strict=True)]
        scored = iter(self._helpers.results(works))
        return [[next(scored) for _ in completions] for completions in answers]

    def _trajectory(self, task: Task, request: GenerateRequest, completion: Completion, text: str) -> Trajectory:
        """Can be called by any thread."""
        prompt_length = len(request.prompt_ids)
        parts: dict[str, float] = {}
        with boundary() as caught:
            parts = finite_parts(self._tasks.score(task, text))
        failure = Failure("reward", f"{type(caught.error).__name__}: {caught.error}") if caught.error else None
        return Trajectory(
            token_ids=np.concatenate([request.prompt_ids, completion.token_ids]),
            loss_mask=np.arange(prompt_length + len(completion.token_ids)) >= prompt_length,
            logprobs=np.concatenate([np.zeros(prompt_length, dtype=np.float32), completion.logprobs]),
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=text,
            # A reward model has its say later, and its part may have a weight.
            reward=0.0 if failure or self._reward_model else total_reward(parts, self._config.reward_weights),
            reward_parts=parts,
            failure=failure,
            calls=(EngineCall(completion.queue_s, completion.prefill_s, completion.decode_s, len(completion.token_ids)),),
        )

    def _judge(self, tasks: Sequence[Task], attempts: list[list[Trajectory]]) -> list[list[Trajectory]]:
        """Add the reward model's score, where there is one, to the parts of each reward; all answers are scored together."""
        if self._reward_model is None:
            return attempts
        conversations = [
            [*self._chat.messages(task), {"role": "assistant", "content": self._chat.answer_prefix + trajectory.text}]
            for task, trajectories in zip(tasks, attempts, strict=True)
            for trajectory in trajectories
        ]
        with self._alone_with_the_reward_model():
            scores = iter(self._reward_model.scores(conversations))
        return [[self._with_part(t, next(scores)) for t in trajectories] for trajectories in attempts]

    @contextmanager
    def _alone_with_the_reward_model(self) -> Iterator[None]:
        if not self._judging.acquire(blocking=False):
            with span("wait.for_reward_model"):
                self._judging.acquire()
        try:
            yield
        finally:
            self._judging.release()

    def _with_part(self, trajectory: Trajectory, score: float | Failure) -> Trajectory:
        if trajectory.failure is not None:
            return trajectory
        if isinstance(score, Failure):
            return replace(trajectory, reward=0.0, failure=score)
        parts = {**trajectory.reward_parts, REWARD_MODEL_PART: score}
        return replace(trajectory, reward=total_reward(parts, self._config.reward_weights), reward_parts=parts)

    def _punished_for_length(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.failure is not None:
            return trajectory
        length, longest = trajectory.num_completion_tokens, self._config.max_new_tokens
        penalty = overlong_penalty(length, longest, self._config.overlong_fraction)
        parts = {**trajectory.reward_parts, "overlong": penalty}
        return replace(trajectory, reward=trajectory.reward + penalty, reward_parts=parts)
