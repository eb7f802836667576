"""Single-turn rollouts: tasks → prompts → completions → rewards → groups with advantages.

What goes wrong with one task or one answer is a `Failure` of its attempts: they have no advantage, are stored with the reason,
and the run goes on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import numpy as np

from redline.config.sections.rollouts import RolloutsConfig
from redline.errors import boundary
from redline.ports import Engine, TaskSource
from redline.rollouts.advantages import group_advantages
from redline.rollouts.chat import Chat
from redline.rollouts.prompts import Posed, Prompts, failed_attempts
from redline.rollouts.rewards.parts import REWARD_MODEL_PART, overlong_penalty, reward_parts, total_reward
from redline.rollouts.tasks.checks import check_task
from redline.rollouts.user_code.calls import UserCalls, failure_of
from redline.rollouts.user_code.coroutines import EventLoop
from redline.rollouts.user_code.turns import Turns
from redline.telemetry import span
from redline.types import Completion, EngineCall, Failure, GenerateRequest, SamplingParams, Task, Trajectory, TrajectoryGroup

if TYPE_CHECKING:
    from redline.rollouts.rewards.reward_model import RewardModel  # it needs torch, and most runs do not need it

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
        max_prompt_tokens: int | None = None,
        check_request: Callable[[GenerateRequest], None] = lambda request: None,
        group_timeout_s: float | None = None,
    ) -> None:
        """`max_reward_workers`: threads that may score at once. `max_prompt_tokens`: None sets no limit. `check_request` raises
        what the engine has against a request, before it gets any. `group_timeout_s`: seconds after which a group is given up,
        and a call of `score` that lasts as long is taken for dead."""
        self._tasks = tasks
        self._engine = engine
        self._chat = chat
        self._prompts = Prompts(chat, config, max_prompt_tokens, check_request)
        self._config = config
        self._stop_token_ids = stop_token_ids
        self._seed = seed
        self._reward_model = reward_model
        self._judging = threading.Lock()
        """The reward model is used by one thread at a time."""
        self.max_reward_workers = max_reward_workers
        self._loop = EventLoop()
        self._train_turns = Turns()
        self._score_turns = Turns(1 if max_reward_workers == 1 else None, group_timeout_s)
        """Where one thread may score, no second call is made while one is under way, whoever made it."""
        self._batch_calls = self._score_calls(max_reward_workers)
        """For the rewards of a whole batch."""
        self._of_this_thread = threading.local()
        self._all_calls = [self._batch_calls]
        self._begun: list[int] = []
        self._version = 0
        """At which the last were begun."""

    def begin(self, numbers: Sequence[int], version: int) -> None:
        self._begun += numbers
        self.step_begins(version)

    def step_begins(self, version: int) -> None:
        """A new version gives calls that did not return in time another chance: some of each step, not some of each group."""
        if version != self._version:
            self._train_turns.try_again()
            self._score_turns.try_again()
        self._version = version

    def arrived(self) -> list[TrajectoryGroup]:
        return []  # nobody works on them meanwhile

    def abandon(self, numbers: Sequence[int]) -> None:
        self._begun = [number for number in self._begun if number not in numbers]

    def finished(self, patience_s: float | None = None, *, late: bool = False) -> list[TrajectoryGroup]:
        """All that was begun, attempted now, by the caller's own hands, however long it takes."""
        numbers, self._begun = self._begun, []
        began = time.perf_counter()
        self._train_turns.try_again()
        posed = self.posed(numbers)
        attempts = self._attempt(posed, self._config.group_size, self._version)
        return [self.group(n, p.task, t, began) for n, p, t in zip(numbers, posed, attempts, strict=True)]

    # ── one group, in pieces ───────────────────────────────────────────────────────────────────────────────────────────

    def posed(self, numbers: Sequence[int]) -> list[Posed]:
        """Training tasks, and what the engine is asked for each group of attempts."""
        config = self._config
        with span("rollouts.tasks"):
            tasks = self._own_calls("train").results([partial(self._train, number) for number in numbers])
        with span("rollouts.prompts"):
            return [
                Posed(Task(f"train({number})", []), task)
                if isinstance(task, Failure)
                else Posed(task, self._request(task, config.group_size, config.temperature, number))
                for number, task in zip(numbers, tasks, strict=True)
            ]

    def _train(self, number: int) -> Task:
        return check_task(self._tasks.train(number), f"train({number})")

    def scored(
        self,
        task: Task,
        request: GenerateRequest,
        completions: Sequence[Completion],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> list[Trajectory]:
        """Attempts with their rewards. Once `is_wanted` says no, `score` is called for none of the rest."""
        with span("rollouts.reward"):
            attempts = self._score_all(self._own_calls("score"), [task], [request], [completions], is_wanted)
        return self._judge([task], attempts)[0]

    def failed(self, failure: Failure, version: int) -> list[Trajectory]:
        """The attempts of a group for which the engine was not asked."""
        return failed_attempts(failure, self._config.group_size, version)

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
            posed = [Posed(t, self._request(t, n, temperature, stream)) for t, stream in zip(tasks, streams, strict=True)]
        return self._attempt(posed, n, self._version)

    def _attempt(self, posed: Sequence[Posed], n: int, version: int) -> list[list[Trajectory]]:
        tasks = [p.task for p in posed if isinstance(p.request, GenerateRequest)]
        requests = [p.request for p in posed if isinstance(p.request, GenerateRequest)]
        with span("engine.schedule"):  # what of it is neither prefill nor decode
            answers = self._engine.generate(requests) if requests else []
        self._score_turns.try_again()
        with span("rollouts.reward"):
            attempts = self._score_all(self._batch_calls, tasks, requests, answers)
        scored = iter(self._judge(tasks, attempts))
        return [failed_attempts(p.request, n, version) if isinstance(p.request, Failure) else next(scored) for p in posed]

    def memory(self) -> dict[str, int]:
        """Bytes by kind that it holds on the device: a reward model's."""
        return self._reward_model.memory() if self._reward_model else {}

    def close(self) -> None:
        """Its threads end."""
        for calls in list(self._all_calls):
            calls.close()
        self._loop.close()

    def thread_ends(self) -> None:
        """Called last in a thread that has fetched tasks or scored: those that made its calls end too."""
        for calls in vars(self._of_this_thread).values():
            self._all_calls.remove(calls)
            calls.close()

    def evaluate(self, tasks: Sequence[Task]) -> list[list[Trajectory]]:
        """Answers to held-out tasks, with the same randomness every time, so that two evaluations differ by policy alone."""
        evaluation = self._config.evaluation
        streams = range(EVALUATION_STREAM, EVALUATION_STREAM + len(tasks))
        return self.attempt(tasks, evaluation.samples_per_task, evaluation.temperature, streams)

    def _request(self, task: Task, n: int, temperature: float, stream: int) -> GenerateRequest | Failure:
        sampling = SamplingParams(
            max_tokens=self._config.max_new_tokens,
            n=n,
            temperature=temperature,
            stop_token_ids=self._stop_token_ids,
            seed=(self._seed << 32) + stream,
        )
        return self._prompts.request(task, sampling)

    # ── rewards ────────────────────────────────────────────────────────────────────────────────────────────────────────

    def _score_calls(self, most: int) -> UserCalls:
        limit_s = self._config.reward_timeout_s
        key, turns = "rollouts.reward_timeout_s", self._score_turns
        return UserCalls("reward", "score", limit_s, key, most=most, loop=self._loop, turns=turns)

    def _train_calls(self) -> UserCalls:
        limit_s = self._config.task_timeout_s
        return UserCalls("task", "train", limit_s, "rollouts.task_timeout_s", loop=self._loop, turns=self._train_turns)

    def _own_calls(self, what: Literal["train", "score"]) -> UserCalls:
        """Those of the calling thread: one that is left behind may be waiting for its own for ever."""
        calls: UserCalls | None = getattr(self._of_this_thread, what, None)
        if calls is None:
            calls = self._train_calls() if what == "train" else self._score_calls(1)
            setattr(self._of_this_thread, what, calls)
            self._all_calls.append(calls)
        return calls

    def _score_all(
        self,
        calls: UserCalls,
        tasks: Sequence[Task],
        requests: Sequence[GenerateRequest],
        answers: Sequence[Sequence[Completion]],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> list[list[Trajectory]]:
        """Of each task, in that order, but perhaps with the help of others."""
        attempts = [
            (task, request, completion)
            for task, request, completions in zip(tasks, requests, answers, strict=True)
            for completion in completions
        ]
        texts = self._chat.texts([completion.token_ids for _, _, completion in attempts])
        works = [partial(self._parts, task, text, is_wanted) for (task, _, _), text in zip(attempts, texts, strict=True)]
        outcomes = zip(attempts, texts, calls.results(works), strict=True)
        scored = (self._trajectory(request, completion, text, parts) for (_, request, completion), text, parts in outcomes)
        return [[next(scored) for _ in completions] for completions in answers]

    def _parts(self, task: Task, text: str, is_wanted: Callable[[], bool]) -> dict[str, float] | Failure:
        """Called by any thread. What is wrong with the value is the fault of the function that returned it."""
        if not is_wanted():
            return Failure("reward", "`score` was not called: the group was cancelled")
        score = self._loop.result(self._tasks.score(task, text))
        with boundary() as caught:
            parts = reward_parts(score)
            if self._reward_model is None:  # its part comes later, and may have a weight
                total_reward(parts, self._config.reward_weights)
        return parts if caught.error is None else failure_of("reward", caught.error, self._tasks.score)

    def _trajectory(
        self, request: GenerateRequest, completion: Completion, text: str, parts: dict[str, float] | Failure
    ) -> Trajectory:
        prompt_length = len(request.prompt_ids)
        failure = parts if isinstance(parts, Failure) else None
        found = {} if isinstance(parts, Failure) else parts
        return Trajectory(
            token_ids=np.concatenate([request.prompt_ids, completion.token_ids]),
            loss_mask=np.arange(prompt_length + len(completion.token_ids)) >= prompt_length,
            logprobs=np.concatenate([np.zeros(prompt_length, dtype=np.float32), completion.logprobs]),
            versions=completion.versions,
            finish_reason=completion.finish_reason,
            text=text,
            # A reward model has its say later, and its part may have a weight.
            reward=0.0 if failure or self._reward_model else total_reward(found, self._config.reward_weights),
            reward_parts=found,
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
        reward = 0.0
        with boundary() as caught:
            reward = total_reward(parts, self._config.reward_weights)
        failure = None if caught.error is None else failure_of("reward", caught.error, self._tasks.score)
        return replace(trajectory, reward=reward, reward_parts=parts, failure=failure)

    def _punished_for_length(self, trajectory: Trajectory) -> Trajectory:
        if trajectory.failure is not None:
            return trajectory
        length, longest = trajectory.num_completion_tokens, self._config.max_new_tokens
        penalty = overlong_penalty(length, longest, self._config.overlong_fraction)
        parts = {**trajectory.reward_parts, "overlong": penalty}
        return replace(trajectory, reward=trajectory.reward + penalty, reward_parts=parts)
