"""Sampled attempts → trajectories with rewards → groups with advantages.

What goes wrong with one reply is a `Failure` of its attempt: it has no advantage, is stored with the reason, and the run goes
on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from redline.errors import boundary
from redline.rollouts.advantages import advantages_of_sequences, places_of_attempts
from redline.rollouts.play import GroupPlay, SampledAttempt
from redline.rollouts.rewards.parts import (
    OVERLONG_PART,
    REWARD_MODEL_PART,
    finite,
    overlong_penalty,
    reward_parts,
    total_reward,
    with_part,
)
from redline.rollouts.setup import RolloutSetup
from redline.rollouts.user_code.failures import failure_of
from redline.rollouts.user_code.jobs import Job
from redline.rollouts.user_code.limited_calls import Gathering
from redline.rollouts.user_code.source import CalledSource
from redline.telemetry import span
from redline.types import Failure, Task, Trajectory, TrajectoryGroup, Turn

Parts = dict[str, float]


class Scoring:
    """Computes rewards, with the user's code and a reward model: of a batch, each attempt once it is sampled, for a caller that
    waits for all of them in the end, or of one group each, as a job for threads that score beside the trainer."""

    def __init__(self, setup: RolloutSetup, source: CalledSource) -> None:
        self._source = source
        self.texts = setup.chat.texts
        self._chat, self._config, self._reward_model = setup.chat, setup.config, setup.reward_model
        self._score = setup.tasks.score
        self._judging = threading.Lock()
        """The reward model is used by one thread at a time."""

    @contextmanager
    def gathering(self) -> Iterator[GatheredScores]:
        """Rewards of attempts that are given one after the other, while the engine still samples others."""
        with self._source.gathering() as calls:
            yield GatheredScores(self, calls)

    def job(self, play: GroupPlay, deliver: Callable[[int, TrajectoryGroup], None]) -> Job:
        """What makes a group of a task's attempts, in a thread that scores."""
        replies = _Replies(self, play.sampled())

        def end(outcomes: Sequence[Parts | Failure]) -> TrajectoryGroup:
            with span("rollouts.reward"):
                attempts = [replies.trajectories(outcomes)]
            [trajectories] = self.judged([play], attempts)
            return self.group(play.index, play.task, trajectories, play.began, expected_tokens=play.expected_tokens)

        return Job(play.index, replies.calls, end, partial(deliver, play.index))

    def group(
        self,
        index: int,
        task: Task,
        trajectories: Sequence[Trajectory],
        began: float,
        num_cut_off: int = 0,
        expected_tokens: float | None = None,
    ) -> TrajectoryGroup:
        """A group with the advantages that it can know by itself. `began` is when its attempts did, on `time.perf_counter`."""
        with span("rollouts.advantages", awaits=False):
            scores = [t.reward for t in trajectories]
            if self._config.overlong_fraction:
                trajectories = self._punished_for_length(trajectories)
            advantages = advantages_of_sequences(trajectories, scores, self._config.advantages)
            latency_s = time.perf_counter() - began
            return TrajectoryGroup(task.id, trajectories, advantages, index, latency_s, num_cut_off, expected_tokens)

    def memory(self) -> dict[str, int]:
        """Bytes by kind that it holds on the device: a reward model's."""
        return self._reward_model.memory() if self._reward_model else {}

    # ── the environment's score ────────────────────────────────────────────────────────────────────────────────────────

    def parts(self, sampled: SampledAttempt, turn: Turn) -> Parts | Failure:
        """The named parts of an attempt's score. Called by any thread. What is wrong with the value is the fault of the
        function that returned it."""
        if not sampled.play.is_wanted:
            return Failure("reward", "`score` was not called: the group was cancelled")
        score = sampled.attempt.end(turn)
        with boundary() as caught:
            # A reward model's part comes later: it may have a weight, and may be the only one.
            parts = {} if self._reward_model and score == {} else reward_parts(score)
            if self._reward_model is None:
                total_reward(parts, self._config.reward_weights)
        return parts if caught.error is None else failure_of("reward", caught.error, self._score)

    def trajectory(self, sampled: SampledAttempt, turn: Turn, parts: Parts | Failure) -> Trajectory:
        prompt_ids, completion = sampled.request.prompt_ids, sampled.completion
        failure = parts if isinstance(parts, Failure) else None
        found = {} if isinstance(parts, Failure) else parts
        loss_mask, logprobs = np.zeros(turn.end, dtype=np.bool_), np.zeros(turn.end, dtype=np.float32)
        loss_mask[turn.start :], logprobs[turn.start :] = True, completion.logprobs
        return Trajectory(
            token_ids=np.concatenate([prompt_ids, completion.token_ids]),
            loss_mask=loss_mask,
            logprobs=logprobs,
            versions=turn.versions,
            finish_reason=turn.finish_reason,
            text=turn.text,
            # A reward model has its say later, and its part may have a weight.
            reward=0.0 if failure or self._reward_model else total_reward(found, self._config.reward_weights),
            reward_parts=found,
            failure=failure,
            turns=(turn,),
            routing=completion.routing,
        )

    # ── a reward model's score ─────────────────────────────────────────────────────────────────────────────────────────

    def judged(self, plays: Sequence[GroupPlay], attempts: list[list[Trajectory]]) -> list[list[Trajectory]]:
        """Add the reward model's score, where there is one, to the parts of each reward; all answers are scored together."""
        if self._reward_model is None:
            return attempts
        conversations = [
            [*self._chat.messages(play.task), {"role": "assistant", "content": self._chat.answer_prefix + trajectory.text}]
            for play, trajectories in zip(plays, attempts, strict=True)
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
        parts, reward = dict(trajectory.reward_parts), 0.0
        with boundary() as caught:
            parts = with_part(parts, REWARD_MODEL_PART, score, "rollouts.reward_model's")
            reward = total_reward(parts, self._config.reward_weights)
        failure = None if caught.error is None else failure_of("reward", caught.error, self._score)
        return replace(trajectory, reward=reward, reward_parts=parts, failure=failure)

    def _punished_for_length(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """With the penalty for the longest reply of each role in each attempt, which is that of all its sequences."""
        punished = list(trajectories)
        for attempts in places_of_attempts(trajectories).values():
            for places in attempts:
                length = max(_longest_reply(trajectories[place]) for place in places)
                for place in places:
                    punished[place] = self._punished(trajectories[place], length)
        return punished

    def _punished(self, trajectory: Trajectory, length: int) -> Trajectory:
        if trajectory.failure is not None:
            return trajectory
        penalty = overlong_penalty(length, self._config.max_new_tokens, self._config.overlong_fraction)
        parts, reward = dict(trajectory.reward_parts), 0.0
        with boundary() as caught:
            parts = with_part(parts, OVERLONG_PART, penalty, "rollouts.overlong_fraction's")
            reward = finite("the reward", trajectory.reward + penalty)
        failure = None if caught.error is None else failure_of("reward", caught.error, self._score)
        return replace(trajectory, reward=reward, reward_parts=parts, failure=failure)


class GatheredScores:
    """Attempts that are scored while others are sampled."""

    def __init__(self, scoring: Scoring, calls: Gathering) -> None:
        self._scoring, self._calls = scoring, calls
        self._replies: list[_Replies] = []

    def add(self, sampled: Sequence[SampledAttempt]) -> None:
        """Have these scored. Does not wait for the user's code."""
        replies = _Replies(self._scoring, sampled)
        self._replies.append(replies)
        self._calls.add(replies.calls())

    def scored(self, plays: Sequence[GroupPlay]) -> list[list[Trajectory]]:
        """The attempts of each group with their rewards, in this order. Blocks until all are there."""
        with span("rollouts.reward"):
            outcomes = iter(self._calls.results())
            scored = {
                (sampled.play, sampled.number): trajectory
                for replies in self._replies
                for sampled, trajectory in zip(replies.sampled, replies.trajectories(outcomes), strict=True)
            }
            attempts = [[scored[play, number] for number in range(len(play.attempts))] for play in plays]
        return self._scoring.judged(plays, attempts)


class _Replies:
    """What the engine has sampled for some attempts: the calls that score it, and attempts with what came of them."""

    def __init__(self, scoring: Scoring, sampled: Sequence[SampledAttempt]) -> None:
        self._scoring, self.sampled = scoring, sampled

    def calls(self) -> list[Callable[[], Parts | Failure]]:
        """One for each attempt. The first that is made decodes the replies."""
        return [partial(self._parts, place) for place in range(len(self.sampled))]

    def trajectories(self, outcomes: Iterable[Any]) -> list[Trajectory]:
        """The attempts, given what came of the calls, of which no more are taken than there are attempts."""
        return list(map(self._scoring.trajectory, self.sampled, self._turns, outcomes))

    def _parts(self, place: int) -> Parts | Failure:
        return self._scoring.parts(self.sampled[place], self._turns[place])

    @cached_property
    def _turns(self) -> list[Turn]:
        texts = self._scoring.texts([attempt.completion.token_ids for attempt in self.sampled])
        return [_turn(attempt, text) for attempt, text in zip(self.sampled, texts, strict=True)]


def _longest_reply(trajectory: Trajectory) -> int:
    return max((turn.num_tokens for turn in trajectory.turns), default=trajectory.num_completion_tokens)


def _turn(sampled: SampledAttempt, text: str) -> Turn:
    completion, start = sampled.completion, len(sampled.request.prompt_ids)
    return Turn(
        text=text,
        start=start,
        end=start + len(completion.token_ids),
        versions=completion.versions,
        finish_reason=completion.finish_reason,
        queue_s=completion.queue_s,
        prefill_s=completion.prefill_s,
        decode_s=completion.decode_s,
        switches=completion.switches,
    )
