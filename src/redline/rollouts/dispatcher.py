"""The only pipeline: index → task → attempts → rewards → group with advantages.

    who               in lockstep                     beside the trainer
    begin             remembers the indices           puts them to the tasks
    pose              the caller, in `finished`       a thread "tasks": fetches the task, begins its attempts
    sample            the caller, in `finished`       the session's thread, "rollouts": steps the engine
    score             threads "score", "score-2", …   threads "rewards", "rewards-2", …: one group each
    finished          does all of it                  waits for what comes

An environment of several turns (`rollouts.environment`) samples and scores in turn: its attempts are tasks of an event loop
in a thread "environments" (`episodes/`), which asks the engine for each reply and gives back attempts that have their rewards.

Lockstep runs until all is done; an attempt is scored once it is sampled, while others are not. Beside the trainer, the
thread that steps the engine never waits for the user's code. Tasks and rewards may take long, and some never come: as many
workers score as the buffer's controller asks for, and a group that is cancelled while its task is fetched or its rewards are
computed leaves its worker behind, and another goes on with the next one. It is the same class that makes the calls in lockstep
(`user_code/limited_calls.py`).

Of the groups that are begun at one version, those that are expected to take longest begin first (`lengths.py`): in lockstep all
of them are put in order; beside the trainer, those that wait for rows of the engine.

What goes wrong with one task or one reply is a `Failure` of its attempts: they have no advantage, are stored with the reason,
and the run goes on. What goes wrong with the engine reaches the caller.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

from redline.ports import RewardWorkers, Session
from redline.rollouts.episodes.episodes import Episodes
from redline.rollouts.episodes.group import EpisodeGroup
from redline.rollouts.episodes.loop import LOOK_S
from redline.rollouts.evaluate import evaluate
from redline.rollouts.lengths import ExpectedLengths
from redline.rollouts.play import GroupPlay, SampledAttempt, asks_once
from redline.rollouts.posing import Posing, Refused
from redline.rollouts.prompts import failed_attempts
from redline.rollouts.scoring import GatheredScores, Scoring
from redline.rollouts.setup import RolloutSetup
from redline.rollouts.user_code.jobs import Job
from redline.rollouts.user_code.source import CalledSource
from redline.rollouts.workers import Workers
from redline.telemetry import span
from redline.types import Delta, Failure, Task, Trajectory, TrajectoryGroup

Posed = GroupPlay | EpisodeGroup | Refused

PATIENCE_S = 5.0
"""Seconds for the step, and then for the rewards under way, when all is to end."""


class Dispatcher:
    """Turns indices of tasks into groups. Implements `ports.Rollouts`, in lockstep and beside the trainer."""

    def __init__(
        self,
        session: Session,
        setup: RolloutSetup,
        *,
        beside: bool = False,
        prepare_thread: Callable[[], None] = lambda: None,
    ) -> None:
        """With `beside`, rollouts have threads of their own, and the session is started; `prepare_thread` is called first in
        each of them, for settings that belong to a thread."""
        self.session, self.config = session, setup.config
        self._source = CalledSource(setup)
        environment = setup.environment(self._source.score)
        self._environment = environment
        self._posing = Posing(environment, setup)
        self._scoring = Scoring(setup, self._source)
        self._lengths = ExpectedLengths()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self._begun: list[int] = []
        """Indices that lockstep attempts when it is asked for them."""
        self._version = 0
        """At which the last were begun."""
        self._sampling: dict[int, GroupPlay] = {}
        """By the session's number of each request that is under way."""
        self._under_way: dict[int, GroupPlay | EpisodeGroup] = {}
        """Groups beside the trainer, by index, from their requests to the engine until they are delivered or cancelled."""
        self._num_sampling_here = 0
        """Groups for which a caller steps the engine."""
        self._scores_here: GatheredScores | None = None
        """Scores their attempts."""
        self._finished: deque[TrajectoryGroup] = deque()
        self._error: BaseException | None = None
        self._workers = Workers(self, self._source, lock, setup.max_reward_workers, prepare_thread) if beside else None
        self._episodes = None if asks_once(environment) else Episodes(environment, setup, session, self.fail, prepare_thread)
        if self._workers:
            session.start("rollouts", prepare_thread, self._why_idle)

    # ── from the loop ──────────────────────────────────────────────────────────────────────────────────────────────────

    def begin(self, indices: Sequence[int], version: int) -> None:
        with span("rollouts.dispatch"), self._changed:
            self._source.step_begins(version)
            self._version = version
            if self._episodes:
                self._episodes.begins_at(version)
            if self._workers is None:
                self._begun += indices
                return
            for index in indices:
                self._workers.tasks.put(self._posing_job(index, version))
        self.session.wake()

    def arrived(self) -> list[TrajectoryGroup]:
        with span("rollouts.dispatch"), self._changed:
            self._raise_error()
            groups = list(self._finished)
            self._finished.clear()
            return groups

    def finished(self, patience_s: float | None = None, *, late: bool = False) -> list[TrajectoryGroup]:
        """In lockstep, attempt all that was begun, in the calling thread, however long it takes."""
        if self._workers is None:
            return self._run_until_idle()
        with span("wait.for_late_groups" if late else "wait.for_rollouts"), self._changed:
            self._wait_for_groups(patience_s)
        return self.arrived()

    def _wait_for_groups(self, patience_s: float | None) -> None:
        """Attempts of an environment that blocks its event loop cannot say so: the one that waits for them looks."""
        until = math.inf if patience_s is None else time.monotonic() + patience_s
        while not (self._finished or self._error) and (left_s := until - time.monotonic()) > 0:
            self._changed.wait(min(left_s, LOOK_S))
            if self._episodes:
                self._episodes.check_that_they_go_on()

    def cancel(self, indices: Sequence[int]) -> None:
        """Attempt these no longer, wherever they are; none of them comes any more."""
        if not indices:
            return
        with self._changed:
            cancelled = set(indices)
            self._begun = [index for index in self._begun if index not in cancelled]
            self._finished = deque(group for group in self._finished if group.index not in cancelled)
            for play in [self._under_way.pop(index) for index in cancelled if index in self._under_way]:
                self._give_back(play)
            if self._workers:
                self._workers.cancel(cancelled)
            self._changed.notify_all()
        self.session.wake()

    def evaluate(self, tasks: Sequence[Task], patience_s: float | None = None) -> list[list[Trajectory]]:
        return evaluate(self, tasks, patience_s)

    @contextmanager
    def paused(self, patience_s: float | None = None) -> Iterator[None]:
        """Inside, only this thread uses the engine or the tasks. Tasks and rewards under way are waited for, but no longer
        than `patience_s`."""
        self._raise_error()
        resting = self._episodes.resting() if self._episodes else nullcontext()
        with self.session.held("wait.for_evaluation"), self._workers.quiet() if self._workers else nullcontext(), resting:
            if self._workers:
                self._wait_for_calls(self._workers, patience_s)
            yield

    def _wait_for_calls(self, workers: Workers, patience_s: float | None) -> None:
        with span("wait.for_rewards"), self._changed:
            self._changed.wait_for(lambda: self._error or not workers.num_calling, patience_s)
            self._raise_error()

    def remember(self, earlier: Iterable[tuple[str, Sequence[int]]]) -> None:
        for task_id, lengths in earlier:
            self._lengths.learn(task_id, lengths)

    def take_over(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        made = [replace(group, expected_tokens=self._lengths.of(group.task_id)) for group in groups]
        self.remember((group.task_id, group.lengths) for group in made)
        return made

    # ── what others ask ────────────────────────────────────────────────────────────────────────────────────────────────

    @property
    def reward_workers(self) -> RewardWorkers | None:
        """Those that score beside the trainer; the buffer's controller decides how many there are."""
        return self._workers.rewards if self._workers else None

    @property
    def num_sampling_here(self) -> int | None:
        """Groups that the calling thread of `attempt` still waits for; None where an environment plays them."""
        return None if self._episodes else self._num_sampling_here

    def sampled_tokens(self, index: int) -> list[int]:
        """Tokens that each attempt of a group under way has so far; none where it has not come to the engine yet."""
        with self._changed:
            play = self._under_way.get(index)
        if play is None:
            return []
        if isinstance(play, EpisodeGroup):
            assert self._episodes is not None
            return self._episodes.sampled_tokens(play)
        found = {place: len(sampled.completion.token_ids) for place, sampled in list(play.completions.items())}
        for number, shared in play.numbers.items():
            so_far = self.session.sampled_tokens(number)
            for position, attempt in enumerate(shared.attempts):
                found.setdefault(attempt, so_far.get(position, 0))
        return [found[attempt] for attempt in range(len(play.attempts))]

    def queues(self) -> Mapping[str, float]:
        """How much waits where; does not block."""
        asked = self._episodes.queues() if self._episodes else {}
        if self._workers is None:
            return asked
        rewards = self._workers.rewards
        return {
            "rollouts: groups to score": rewards.num_to_score,
            "rollouts: workers that score": rewards.num_scoring,
            **asked,
        }

    def num_workers(self) -> Mapping[str, int]:
        found = {"environment": self._environment, "reward": self._source.scored_by}
        counts = {kind: getattr(of, "num_worker_processes", None) for kind, of in found.items()}
        return {kind: count for kind, count in counts.items() if count is not None}

    def memory(self) -> Mapping[str, int]:
        return self._scoring.memory()

    def close(self) -> None:
        """Cancel what is under way. A task or a reward that does not return is left behind, and ends with the process."""
        with self._changed:
            self._sampling.clear()  # what the session says of them now is no failure
            if self._workers:
                self._workers.close()
            self._changed.notify_all()
        if self._episodes:
            self._episodes.close(PATIENCE_S)
        self.session.close(PATIENCE_S)
        if self._workers:
            self._workers.join(PATIENCE_S)
        self._source.close()
        close = getattr(self._environment, "close", None)
        if callable(close):
            close()

    # ── in the caller's thread: lockstep and evaluation ────────────────────────────────────────────────────────────────

    def _run_until_idle(self) -> list[TrajectoryGroup]:
        indices, self._begun = self._begun, []
        self._source.try_again("train")
        posed = self._pose(indices)
        attempts = self._attempt_here(posed, self.config.group_size, self._version)
        groups = [self._grouped(p, ts) for p, ts in zip(posed, attempts, strict=True)]
        self.remember((group.task_id, group.lengths) for group in groups)
        return groups

    def attempt(self, tasks: Sequence[Task], indices: Sequence[int], n: int, temperature: float) -> list[list[Trajectory]]:
        """n scored attempts at each task, in the calling thread. The indices choose their randomness."""
        began = time.perf_counter()
        with span("rollouts.prompts"):
            posed: Sequence[Posed]
            if episodes := self._episodes:
                each = zip(tasks, indices, strict=True)
                posed = [episodes.group(task, i, n, temperature, began, is_here=True) for task, i in each]
            else:
                posed = self._posing.pose(tasks, indices, [(0, 0.0)] * len(tasks), n, temperature, began)
        return self._attempt_here(posed, n, self._version)

    def _attempt_here(self, posed: Sequence[Posed], n: int, version: int) -> list[list[Trajectory]]:
        if self._episodes:
            groups = [p for p in posed if isinstance(p, EpisodeGroup)]
            played = iter(self._episodes.play_here(groups) if groups else ())
            return [failed_attempts(p.failure, n, version) if isinstance(p, Refused) else next(played) for p in posed]
        plays = [p for p in posed if isinstance(p, GroupPlay)]
        self._source.try_again("score")
        with self._scoring.gathering() as scores:
            if plays:
                self._sample_here(plays, scores)
            scored = iter(scores.scored(plays))
        return [failed_attempts(p.failure, n, version) if isinstance(p, Refused) else next(scored) for p in posed]

    def _sample_here(self, plays: Sequence[GroupPlay], scores: GatheredScores) -> None:
        """Have the engine sample all of them, whose requests reach it together, and each attempt scored once it is."""
        self._num_sampling_here, self._scores_here = len(plays), scores
        with self.session.held():
            try:
                with span("engine.schedule"):  # as of an engine with a thread of its own
                    for play in sorted(plays, key=lambda play: play.requests[0].request.order):
                        self._submit(play)
                self.session.step_until(lambda: self._num_sampling_here == 0)
            except BaseException:  # an interrupt too: they are not wanted any more
                for play in plays:
                    self._give_back(play)
                raise
            finally:
                self._scores_here = None

    # ── the parts of the pipeline, in whichever thread ─────────────────────────────────────────────────────────────────

    def _pose(self, indices: Sequence[int]) -> list[Posed]:
        """Fetch training tasks and begin the attempts at them."""
        began = time.perf_counter()
        with span("rollouts.tasks"):
            tasks = self._source.train(indices)
        with span("rollouts.prompts"):
            return self._posed(tasks, indices, began, self._version)

    def _posed(self, tasks: Sequence[Task | Failure], indices: Sequence[int], began: float, version: int) -> list[Posed]:
        pairs = list(zip(tasks, indices, strict=True))
        fetched = [(task, index) for task, index in pairs if isinstance(task, Task)]
        groups = iter(self._groups(fetched, began, version))
        return [
            Refused(index, Task(f"train({index})", []), task, began) if isinstance(task, Failure) else next(groups)
            for task, index in pairs
        ]

    def _groups(self, fetched: Sequence[tuple[Task, int]], began: float, version: int) -> Sequence[Posed]:
        tasks, indices = [task for task, _ in fetched], [index for _, index in fetched]
        size, temperature = self.config.group_size, self.config.temperature
        orders = [self._lengths.order(task.id, version) for task in tasks]
        groups: Sequence[Posed]
        if episodes := self._episodes:
            is_here = self._workers is None
            played = [
                episodes.group(task, i, size, temperature, began, is_here=is_here, oversamples=True) for task, i in fetched
            ]
            for group, order in zip(played, orders, strict=True):
                group.begins = order
            groups = played
        else:
            groups = self._posing.pose(tasks, indices, orders, size, temperature, began)
        for posed in groups:
            if not isinstance(posed, Refused):
                posed.expected_tokens = self._lengths.of(posed.task.id)
        return groups

    def _submit(self, play: GroupPlay) -> None:
        with self._changed:  # nothing is received before its number is known
            for shared in play.requests:
                number = self.session.submit(shared.request, self)
                play.numbers[number] = shared
                self._sampling[number] = play

    def _give_back(self, play: GroupPlay | EpisodeGroup) -> None:
        """What the engine and the workers still have of a group is not wanted any more."""
        if isinstance(play, EpisodeGroup):
            assert self._episodes is not None
            self._episodes.cancel([play])
            return
        play.is_wanted = False
        for number in play.numbers:
            if self._sampling.pop(number, None) is not None:
                self.session.abort(number)

    def receive(self, pieces: Sequence[tuple[int, Delta | Exception]]) -> None:
        """Take what a step of the engine brought, in the thread that stepped it."""
        with span("rollouts.dispatch"), self._changed:
            sampled_here: list[SampledAttempt] = []
            for number, piece in pieces:
                if number in self._sampling:  # and not what is left of one that was cancelled
                    self._take(number, piece, sampled_here)
            if sampled_here and self._scores_here is not None:
                self._scores_here.add(sampled_here)

    def _take(self, number: int, piece: Delta | Exception, sampled_here: list[SampledAttempt]) -> None:
        if isinstance(piece, Exception):
            self.fail(piece)
            raise piece
        if piece.completion is None:
            return
        play = self._sampling[number]
        sampled = play.take(number, piece.index, piece.completion)
        workers = self._workers if play.index in self._under_way else None
        if workers is None:
            sampled_here.append(sampled)
        if not play.is_sampled:
            return
        for finished in play.numbers:
            del self._sampling[finished]
        if workers:
            workers.rewards.put(self._scoring.job(play, self.deliver))
        else:
            self._num_sampling_here -= 1

    def _grouped(self, posed: Posed, trajectories: Sequence[Trajectory]) -> TrajectoryGroup:
        num_cut_off = posed.num_cut_off if isinstance(posed, EpisodeGroup) else 0
        expected = None if isinstance(posed, Refused) else posed.expected_tokens
        return self._scoring.group(posed.index, posed.task, trajectories, posed.began, num_cut_off, expected)

    # ── beside the trainer ─────────────────────────────────────────────────────────────────────────────────────────────

    def _posing_job(self, index: int, version: int) -> Job:
        """Fetches a task and begins the attempts at it, in the thread of the tasks."""
        began = 0.0

        def begin() -> list[Callable[[], Task]]:
            nonlocal began
            began = time.perf_counter()
            return [self._source.fetching(index)]

        def end(tasks: Sequence[Task | Failure]) -> GroupPlay | EpisodeGroup | TrajectoryGroup:
            """A group of failed attempts where there is nothing to ask the engine for."""
            with span("rollouts.prompts"):
                [posed] = self._posed(tasks, [index], began, version)
            if isinstance(posed, Refused):
                return self._grouped(posed, failed_attempts(posed.failure, self.config.group_size, version))
            return posed

        return Job(index, begin, end, partial(self.take_posed, index))

    def take_posed(self, index: int, posed: GroupPlay | EpisodeGroup | TrajectoryGroup) -> None:
        """In the thread of the tasks, which holds the lock."""
        if isinstance(posed, TrajectoryGroup):
            self._finished.append(posed)
        elif isinstance(posed, EpisodeGroup):
            assert self._episodes is not None
            self._under_way[index] = posed
            self._episodes.begin([posed], self._episodes_ended)
        else:
            self._under_way[index] = posed
            self._submit(posed)
        self._changed.notify_all()
        self.session.wake()

    def _episodes_ended(self, group: EpisodeGroup) -> None:
        """In the thread of the environments."""
        made = self._grouped(group, group.trajectories)
        with self._changed:
            if self._under_way.get(group.index) is group:
                self.deliver(group.index, made)

    def deliver(self, index: int, group: TrajectoryGroup) -> None:
        """In a thread of the rewards or of the environments, which holds the lock."""
        self._under_way.pop(index, None)
        self._lengths.learn(group.task_id, group.lengths)
        self._finished.append(group)
        self._changed.notify_all()
        self.session.wake()

    def _why_idle(self) -> str:
        """Why the engine has nothing to do. Does not block."""
        assert self._workers is not None
        return "wait.for_environments" if self._episodes and self._under_way else self._workers.why_idle()

    def fail(self, error: BaseException | None) -> None:
        """The next call of the loop raises it."""
        with self._changed:
            self._error = self._error or self.session.failure or error
            self._changed.notify_all()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
