"""Attempts of several turns: every one is a task of one event loop, from the call of `play` to its sequences with a reward.

    begin ──► group ──► attempts ──► play ──► score ──► sequences ──► the group's `ended`
                           ▲           │
                           └─ retries ─┴── raised, took too long, or returned no score: a Failure

Beside the trainer the loop goes on by itself. In the caller's thread (lockstep, an evaluation) `play_here` takes turns with it:
the loop runs until nothing in it is ready, then the caller steps the engine.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from redline.errors import BudgetError, TaskError, boundary
from redline.ports import Environment, Session
from redline.rollouts.episodes.attempt import Limits, PlayedAttempt, Shared
from redline.rollouts.episodes.broker import Broker
from redline.rollouts.episodes.group import EpisodeGroup
from redline.rollouts.episodes.loop import EpisodeLoop
from redline.rollouts.episodes.scores import Scored, scores_of_roles, truncated_score
from redline.rollouts.first_prompts import FirstPrompts
from redline.rollouts.prompts import failed_attempts
from redline.rollouts.setup import RolloutSetup
from redline.rollouts.user_code.failures import failure_of
from redline.telemetry.stalls.calls import suspended_frames
from redline.telemetry.stalls.stacks import place_of
from redline.types import Failure, Task, Trajectory

STAGE = "environment"
"""What failures of environments are called."""
PATIENCE_S = 1.0
"""Seconds for the loop to take back what was asked, when a caller's groups are not wanted any more."""
MAX_THREADS = 256
"""Attempts at once whose `play` is not `async`: each has a thread."""


class Episodes:
    """Plays attempts in an environment."""

    def __init__(
        self,
        environment: Environment,
        setup: RolloutSetup,
        session: Session,
        fail: Callable[[BaseException | None], None],
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """`fail` gets what is wrong with the engine, or with the loop itself. `prepare_thread` is called first in the loop's
        thread."""
        self._environment, self._session, self._fail = environment, session, fail
        self._config = setup.config.environment
        self._weights = setup.config.reward_weights
        self._version = 0
        self._error: BaseException | None = None
        self._broker = Broker(
            session,
            lambda *call: self._loop.post(*call),
            self._broke,
            seed=setup.seed,
            stop_token_ids=setup.stop_token_ids,
            most=setup.max_sequences,
        )
        self._loop = EpisodeLoop(self._broker.hand_over_what_is_asked, self._broke, prepare_thread, self._config.timeout_s)
        limits = Limits(setup.config.max_new_tokens, setup.max_prompt_tokens, self._config.max_turns, self._config.max_tokens)
        self._shared = Shared(setup.chat, setup.stop_token_ids, limits, self._broker, self._loop, setup.check_request)
        self._threads = asyncio.Semaphore(MAX_THREADS)
        self._num_groups = 0
        self._rested_s = 0.0
        """Seconds in which attempts beside the trainer rested."""
        self._rests_since: float | None = None

    # ── from the pipeline ──────────────────────────────────────────────────────────────────────────────────────────────

    def group(
        self, task: Task, index: int, n: int, temperature: float, began: float, *, is_here: bool, oversamples: bool = False
    ) -> EpisodeGroup:
        """n attempts at a task, to be begun. With `oversamples`, as many more as the recipe says."""
        extra = self._config.oversample if oversamples else 0
        return EpisodeGroup(index, task, n, n + extra, temperature, began, is_here, FirstPrompts(self._shared.chat))

    def begin(self, groups: Sequence[EpisodeGroup], ended: Callable[[EpisodeGroup], None]) -> None:
        """Begin all attempts of groups, in order. Does not block. `ended` is called in the loop's thread for each group that
        ends, and for none that is cancelled."""
        for group in groups:
            group.ended, group.order = ended, (*group.begins, self._num_groups)
            self._num_groups += 1
        self._loop.post(self._begin, groups)

    def play_here(self, groups: Sequence[EpisodeGroup]) -> list[list[Trajectory]]:
        """The sequences of each group. The calling thread steps the engine until all have ended."""
        with self._session.held():
            try:
                self.begin(groups, lambda group: None)
                self._session.step_until(lambda: self._are_over(groups))
            except BaseException:  # an interrupt too: they are not wanted any more
                self.cancel(groups)
                with boundary():  # the loop itself may have ended
                    self._loop.wait_until(lambda: True, PATIENCE_S)
                self._broker.carry_out_orders()
                raise
        return [group.trajectories for group in groups]

    def _are_over(self, groups: Sequence[EpisodeGroup]) -> bool:
        """Between two steps: let the loop run until it has nothing to do. Returns whether all have ended; otherwise the engine
        has work."""

        def is_step_due() -> bool:
            return bool(self._error) or self._broker.has_orders or self._broker.is_sampling(groups) or _all_over(groups)

        while True:
            if self._broker.has_news or not self._loop.is_resting or not is_step_due():
                self._broker.has_news = False
                self._loop.wait_until(is_step_due)
            self._broker.carry_out_orders()
            if self._error is not None:
                raise self._error
            if _all_over(groups) or self._broker.is_sampling(groups):
                return _all_over(groups)

    def cancel(self, groups: Sequence[EpisodeGroup]) -> None:
        """End all attempts of groups, and abort what the engine has of them. Does not block."""
        for group in groups:
            group.is_over = True
        self._loop.post(self._cancel, groups)

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, the time of attempts beside the trainer stands still: somebody else has the engine."""
        self._rests_since = time.perf_counter()
        try:
            yield
        finally:
            self._rested_s += time.perf_counter() - self._rests_since
            self._rests_since = None

    def sampled_tokens(self, group: EpisodeGroup) -> list[int]:
        """Tokens that the policy has chosen in each attempt so far. Does not block."""
        under_way = self._broker.sampled_tokens(group)
        return [group.num_sampled.get(i, 0) + under_way.get(i, 0) for i in range(group.num_begun)]

    def check_that_they_go_on(self) -> None:
        """Raise TaskError where an environment blocks all attempts for longer than one may take. Does not block."""
        self._loop.check_that_it_answers()

    def queues(self) -> dict[str, float]:
        """How much waits where, by name. Does not block."""
        return {"rollouts: requests that wait for room in the engine": self._broker.num_waiting}

    def close(self, patience_s: float) -> None:
        """Cancel everything and end the loop. Blocks for `patience_s` at most: code that does not return is left behind."""
        self._loop.close(patience_s)

    # ── in the loop's thread ───────────────────────────────────────────────────────────────────────────────────────────

    def _begin(self, groups: Sequence[EpisodeGroup]) -> None:
        for group in groups:
            if not group.is_over:
                group.tasks = [self._loop.loop.create_task(self._attempt(group, i)) for i in range(group.num_begun)]
                for task in group.tasks:
                    task.add_done_callback(self._attempt_ended)

    def _attempt_ended(self, task: asyncio.Task[None]) -> None:
        """What is wrong with an environment is a failure of the attempt: what an attempt raises is wrong with us."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._broke(error)

    def _cancel(self, groups: Sequence[EpisodeGroup]) -> None:
        for group in groups:
            for task in group.tasks:
                task.cancel()
            group.tasks = []

    def _broke(self, error: BaseException) -> None:
        """The engine, the loop or this class cannot go on: the next call of the caller raises it."""
        self._error = self._error or error
        self._fail(error)

    async def _attempt(self, group: EpisodeGroup, index: int) -> None:
        """Play one attempt until it has a score, or has failed as often as it may."""
        trajectories = await self._try(group, index, 0)
        for retry in range(1, self._config.retries + 1):
            failure = trajectories[0].failure
            if failure is None or failure.stage != STAGE:
                break
            trajectories = await self._try(group, index, retry)
        group.outcomes[index] = trajectories
        if group.has_enough and not group.is_over:
            group.is_over = True
            self._cancel_the_rest(group)
            group.ended(group)

    async def _try(self, group: EpisodeGroup, index: int, retry: int) -> list[Trajectory]:
        group.num_sampled[index] = 0
        return await self._played(PlayedAttempt(group, index, retry, self._shared))

    def _cancel_the_rest(self, group: EpisodeGroup) -> None:
        own = asyncio.current_task()
        for task in group.tasks:
            if task is not own:
                task.cancel()
        group.tasks = []

    async def _played(self, attempt: PlayedAttempt) -> list[Trajectory]:
        """The sequences of one try, all with their reward or all with the failure."""
        play = self._loop.loop.create_task(self._result(attempt))
        try:
            done = await self._ends_in_time(play, attempt.group)
            where = "" if done else attempt.place() or _place(play)
        finally:  # also where the group is cancelled
            score_s = attempt.end()
            play.cancel()
        if not done:
            reason = f"`play` did not return within {self._config.timeout_s:g} s"
            return self._failed(attempt, Failure(STAGE, reason, where, "raise rollouts.environment.timeout_s"), score_s)
        score, error = play.result()
        if isinstance(error, BudgetError) and attempt.is_truncated and attempt.sequences:
            rewards = dict.fromkeys(attempt.roles, truncated_score(self._weights))
            return self._rewarded(attempt, rewards, score_s)
        if error is not None:
            stage = "prompt" if error is attempt.refusal else STAGE
            return self._failed(attempt, failure_of(stage, error, self._environment.play), score_s)
        with boundary() as caught:
            if not attempt.sequences:
                raise TaskError("the environment ended before it asked the policy", "let `play` await `policy.say`")
            rewards = scores_of_roles(score, attempt.roles, self._weights)
        if caught.error is not None:
            return self._failed(attempt, failure_of(STAGE, caught.error, self._environment.play), score_s)
        return self._rewarded(attempt, rewards, score_s)

    async def _ends_in_time(self, play: asyncio.Task[Any], group: EpisodeGroup) -> bool:
        """Wait for an attempt, but no longer than it may take. Time in which an evaluation has the engine does not count."""
        limit_s, began = self._config.timeout_s, self._clock(group)
        while not play.done():
            left_s = None if limit_s is None else began + limit_s - self._clock(group)
            if left_s is not None and left_s <= 0:
                return False
            await asyncio.wait({play}, timeout=left_s)
        return True

    def _clock(self, group: EpisodeGroup) -> float:
        """Seconds; those of groups beside the trainer stand still while they rest."""
        now = time.perf_counter()
        if group.is_here:
            return now
        return (now if self._rests_since is None else self._rests_since) - self._rested_s

    async def _result(self, attempt: PlayedAttempt) -> tuple[Any, Exception | None]:
        """What `play` returns or raises. One that is not `async` is called in a thread, where `policy.say` blocks."""
        value: Any = None
        with boundary() as caught:
            if inspect.iscoroutinefunction(self._environment.play):
                value = await self._environment.play(attempt.group.task.own_copy(), attempt)
            else:
                async with self._threads:
                    value = await self._in_a_thread(attempt)
                if inspect.isawaitable(value):
                    value = await value
        return value, caught.error

    async def _in_a_thread(self, attempt: PlayedAttempt) -> Any:
        ended: asyncio.Future[tuple[Any, Exception | None]] = self._loop.loop.create_future()

        def run() -> None:
            value: Any = None
            with boundary() as caught:
                value = self._environment.play(attempt.group.task.own_copy(), attempt)
            self._loop.post(lambda: None if ended.cancelled() else ended.set_result((value, caught.error)))

        attempt.thread = threading.Thread(target=run, name="play", daemon=True)
        attempt.thread.start()
        value, error = await ended
        attempt.thread = None
        if error is not None:
            raise error
        return value

    # ── sequences ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _rewarded(self, attempt: PlayedAttempt, rewards: dict[str, Scored], score_s: float) -> list[Trajectory]:
        found = []
        for sequence in attempt.sequences:
            reward, parts = rewards[sequence.role]
            trajectory = sequence.trajectory(attempt.index, attempt.retry, score_s)
            found.append(replace(trajectory, reward=reward, reward_parts=parts, truncated=attempt.is_truncated))
        return found

    def _failed(self, attempt: PlayedAttempt, failure: Failure, score_s: float) -> list[Trajectory]:
        """What was sampled, with the failure; a single token that nobody sampled where that is nothing."""
        if not attempt.sequences:
            [nothing] = failed_attempts(failure, 1, self._version)
            return [replace(nothing, attempt=attempt.index, retries=attempt.retry, score_s=score_s)]
        made = [sequence.trajectory(attempt.index, attempt.retry, score_s) for sequence in attempt.sequences]
        return [replace(trajectory, failure=failure, truncated=attempt.is_truncated) for trajectory in made]

    def begins_at(self, version: int) -> None:
        """The policy's version from now on: that of attempts which fail before they ask."""
        self._version = version


def _all_over(groups: Sequence[EpisodeGroup]) -> bool:
    return all(group.is_over for group in groups)


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task rests."""
    coroutine = task.get_coro()
    return place_of(traceback.StackSummary.extract(suspended_frames(coroutine)))
