"""Single-turn rollouts: tasks → prompts → completions → rewards → groups with advantages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from redline.config.schema import RolloutsConfig
from redline.errors import boundary
from redline.ports import Engine, TaskSource
from redline.rollouts.advantages import group_advantages
from redline.rollouts.chat import Chat
from redline.rollouts.reward_model import PART, RewardModel
from redline.rollouts.rewards import finite_parts, overlong_penalty, total_reward
from redline.telemetry import span
from redline.types import Completion, Failure, GenerateRequest, SamplingParams, Task, Trajectory, TrajectoryGroup

EVALUATION_STREAM = 2**31
"""Added to a task's number where evaluation samples it, so that no evaluation repeats a training sample's randomness."""
EXTRA_TASKS = 2**30
"""The first task of the extra rounds. They have tasks of their own, so that a step's first round never depends on how many
rounds the steps before it took."""


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
    ) -> None:
        self._tasks = tasks
        self._engine = engine
        self._chat = chat
        self._config = config
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        self._reward_model = reward_model

    def collect(self, num_groups: int, version: int) -> list[TrajectoryGroup]:
        """Step `version` attempts tasks `version · groups_per_step` and on, each with its own seed.

        Dynamic sampling: as many further tasks as there are groups without signal, again and again, but no more than
        `max_extra_rounds` times. All groups are handed on, the ones without signal too; the buffer makes the choice.
        """
        size, rounds = self._config.groups_per_step, self._config.max_extra_rounds
        groups = self._attempted(version * size, num_groups, version)
        for extra in range(rounds):
            missing = num_groups - sum(group.has_signal for group in groups)
            if not missing:
                break
            groups += self._attempted(EXTRA_TASKS + (version * rounds + extra) * size, missing, version)
        return groups

    def _attempted(self, first: int, num_groups: int, version: int) -> list[TrajectoryGroup]:
        """Groups of tasks `first` and on."""
        with span("rollouts.tasks", version=version):
            tasks = [self._tasks.train(first + i) for i in range(num_groups)]
        attempts = self.attempt(tasks, self._config.group_size, self._config.temperature, first_stream=first)
        with span("rollouts.advantages", version=version):
            return [self._group(task, trajectories) for task, trajectories in zip(tasks, attempts, strict=True)]

    def attempt(self, tasks: Sequence[Task], n: int, temperature: float, first_stream: int) -> list[list[Trajectory]]:
        """n scored answers to each task; task i samples from stream `first_stream + i` of the run's seed."""
        with span("rollouts.prompts"):
            requests = [self._request(task, n, temperature, first_stream + i) for i, task in enumerate(tasks)]
        answers = self._engine.generate(requests)
        with span("rollouts.reward"):
            attempts = [
                self._score(task, request, completions)
                for task, request, completions in zip(tasks, requests, answers, strict=True)
            ]
        return attempts if self._reward_model is None else self._judged(self._reward_model, tasks, attempts)

    def evaluate(self, tasks: Sequence[Task]) -> list[list[Trajectory]]:
        """Answers to held-out tasks, with the same randomness every time, so that two evaluations differ by policy alone."""
        evaluation = self._config.evaluation
        return self.attempt(tasks, evaluation.samples_per_task, evaluation.temperature, first_stream=EVALUATION_STREAM)

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

    def _trajectory(self, task: Task, request: GenerateRequest, completion: Completion, text: str) -> Trajectory:
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
            reward=total_reward(parts, self._config.reward_weights) if failure is None else 0.0,
            reward_parts=parts,
            failure=failure,
        )

    def _judged(
        self, model: RewardModel, tasks: Sequence[Task], attempts: Sequence[Sequence[Trajectory]]
    ) -> list[list[Trajectory]]:
        """With the reward model's score among the parts of each reward; all answers are scored together."""
        conversations = [
            [*self._chat.messages(task), {"role": "assistant", "content": trajectory.text}]
            for task, trajectories in zip(tasks, attempts, strict=True)
            for trajectory in trajectories
        ]
        scores = iter(model.scores(conversations))
        return [[self._with_part(t, next(scores)) for t in trajectories] for trajectories in attempts]

    def _with_part(self, trajectory: Trajectory, score: float | Failure) -> Trajectory:
        if trajectory.failure is not None:
            return trajectory
        if isinstance(score, Failure):
            return replace(trajectory, reward=0.0, failure=score)
        parts = {**trajectory.reward_parts, PART: score}
        return replace(trajectory, reward=total_reward(parts, self._config.reward_weights), reward_parts=parts)

    def _group(self, task: Task, trajectories: Sequence[Trajectory]) -> TrajectoryGroup:
        if self._config.overlong_fraction:
            trajectories = [self._punished_for_length(t) for t in trajectories]
        rewards = np.array([t.reward for t in trajectories], dtype=np.float32)
        failed = np.array([t.failure is not None for t in trajectories])
        return TrajectoryGroup(task.id, trajectories, group_advantages(rewards, failed, self._config.advantages))

    def _punished_for_length(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.failure is not None:
            return trajectory
        length, longest = trajectory.num_completion_tokens, self._config.max_new_tokens
        penalty = overlong_penalty(length, longest, self._config.overlong_fraction)
        parts = {**trajectory.reward_parts, "overlong": penalty}
        return replace(trajectory, reward=trajectory.reward + penalty, reward_parts=parts)
