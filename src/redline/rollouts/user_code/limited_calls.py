"""Calls of the user's functions, in threads of their own, each within its limit (`rollouts.reward_timeout_s`,
`rollouts.task_timeout_s`): one that hangs is given up, and its thread left behind.

    put, results ──► jobs ──► thread ──► begin ──► its calls, one after the other ──► end ──► deliver
                                │
    limit_s passes ─────────────┤  the call is a Failure, and another thread goes on with the job
    cancel ─────────────────────┘  the job is not wanted any more

In either case the thread is left behind, and another takes its place. In lockstep a caller gives the calls of one job as they
come, while it does something else, then waits for the results (`Gathering`), and all threads may make them; beside the trainer
each job is a group, with one thread at a time. One thread makes the calls until more are wanted: beside the trainer the
buffer's controller says how many (`hold`), and in lockstep others help as soon as the calls wait for something (a service, a
process, a disk): computing in Python would not become faster. Calls that compute are left until the caller does nothing else.

A thread that is not wanted at present waits like one that has nothing to do: if it ended, it would come back as another lane.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from functools import partial
from typing import Protocol, TypeVar, cast

from redline.errors import TaskError, boundary
from redline.rollouts.user_code.failures import failure_of
from redline.rollouts.user_code.jobs import Job, Load, ThreadKind, UserFunction, Work, Worker, new_thread
from redline.rollouts.user_code.permits import MAX_LATE_IN_A_ROW, MAX_STUCK, Permits
from redline.telemetry import idle_as, span
from redline.telemetry.stalls.calls import Call, calling, forget_call
from redline.telemetry.workers import forget_worker, watch_worker
from redline.types import Failure

Result = TypeVar("Result")

HELP_AFTER_S = 0.02
"""Seconds of waiting, and more than of computing, after which others help. To start them takes a millisecond."""
WAITS = 2.0
"""Calls are made while others still come if they wait for this many times as long as they compute: who gives them computes
too, on the same cores and under the same lock of the interpreter."""


class Gathering(Protocol):
    """Calls that come little by little, and at the end what came of all of them."""

    def add(self, works: Sequence[Callable[[], object]]) -> None:
        """Have these made, after those before them. Does not block."""

    def results(self) -> list[object]:
        """What came of each, in their order: the value, or why there is none, a `Failure`. Blocks until all are there. No more
        may be added."""


class UserCalls:
    """Threads that call one function of the user's. They start when they are needed, and live until `close`. Implements
    `ports.RewardWorkers`."""

    def __init__(
        self,
        function: UserFunction,
        kind: ThreadKind | None = None,
        *,
        fail: Callable[[Exception], None] | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        """`fail` is told why no more calls can be made; without it, `results` raises that. Jobs are delivered, and `fail` is
        called, with `lock` held."""
        self._function = function
        self._kind = kind or ThreadKind(function.name)
        self._busy = self._kind.busy or f"user.{function.name}"
        self.most = self._kind.most
        self._fail = fail or self._raise_in_results
        self._error: Exception | None = None
        self._permits = function.permits or Permits()
        self._changed = threading.Condition(lock or threading.RLock())
        self._jobs: list[Job] = []
        """Those that are not over, in the order in which they came."""
        self._open: deque[Job] = deque()
        """Those that want a thread, and some that no longer do."""
        self._workers: list[Worker] = []
        """Without those that were left behind."""
        self._left: list[Worker] = []
        """Those that were left behind with a call that is still within its limit: until then it keeps its permit."""
        self._num_wanted = 1
        """How many of the workers, from the first, may begin something."""
        self._num_started = 0
        self._quiet_for = 0
        self._load = Load()
        self._limits_watch: threading.Thread | None = None
        self._closed = threading.Event()

    # ── what is to be called ───────────────────────────────────────────────────────────────────────────────────────────

    def results(self, works: Sequence[Callable[[], Result]]) -> list[Result | Failure]:
        """What came of each, in their order: the value, or why there is none. Blocks until all are there. Without a limit, and
        with one thread, the caller makes the calls."""
        with self.gathering() as gathering:
            gathering.add(works)
            return cast("list[Result | Failure]", gathering.results())

    @contextmanager
    def gathering(self) -> Iterator[Gathering]:
        """The calls of one job, from now on. Without a limit, and with one thread, the caller makes them, in `results`. What is
        missing in the end, after an interrupt, is not wanted any more."""
        if self._function.permits is None:
            self._permits.try_again()
        if self._function.limit_s is None and self.most == 1:
            yield _OwnCalls(self._own_outcome)
            return
        with self._changed:
            self._num_wanted, self._error = 1, None
        calls: list[Work] = []
        ended = self._changed.notify_all
        job = Job(-1, lambda: calls, list, lambda _: ended(), self.most, is_callers=True, calls=calls, is_whole=False)
        try:
            yield _JobCalls(self, job, calls)
        finally:
            with self._changed:
                self._cancel(job)

    def _add(self, job: Job, calls: list[Work], works: Sequence[Work]) -> None:
        with self._changed:
            calls += works
            self._fail_the_rest_if_hopeless(job)
            if job in self._jobs:
                self._open_again(job)
            else:
                self.put(job)

    def _results(self, job: Job) -> list[object]:
        with self._changed:
            job.is_whole, job.for_thread = True, threading.get_ident()
            for worker in self._workers:
                if worker.job is job and worker.call:
                    worker.call.for_thread = job.for_thread
            if job in self._jobs and job.is_complete:
                self._deliver(job, None)
            elif job in self._jobs:
                self._open_again(job)
            while job in self._jobs and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            return [job.outcomes[place] for place in range(len(job.outcomes))]

    def put(self, job: Job) -> None:
        """Have it done, after those before it. Does not block."""
        with self._changed:
            self._jobs.append(job)
            self._open.append(job)
            self._start_missing()
            self._note_load()
            self._changed.notify_all()

    def cancel(self, indices: AbstractSet[int]) -> None:
        """None of them is delivered any more."""
        with self._changed:
            for job in [job for job in self._jobs if job.index in indices]:
                self._cancel(job)

    @property
    def num_scoring(self) -> int:
        """Jobs that have begun."""
        return sum(job.has_begun for job in self._jobs)

    @property
    def num_to_score(self) -> int:
        """Jobs that wait, and those that have begun."""
        return len(self._jobs)

    def be_quiet(self, *, quiet: bool) -> None:
        """Begin no job until as many have taken it back as have asked for it."""
        with self._changed:
            self._quiet_for += 1 if quiet else -1
            self._note_load()
            self._changed.notify_all()

    # ── who calls it ───────────────────────────────────────────────────────────────────────────────────────────────────

    def hold(self, count: int) -> None:
        """So many threads from now on. One too many completes the job that it is at."""
        with self._changed:
            self._num_wanted = max(1, min(count, self.most))
            self._start_missing()
            self._changed.notify_all()

    def take_load(self) -> tuple[float, ...]:
        with self._changed:
            return self._load.take()

    def close(self) -> None:
        """Threads end as soon as they can; `join` waits for them."""
        with self._changed:
            for worker in self._workers:
                forget_worker(worker.thread.name)
            self._closed.set()
            self._changed.notify_all()

    def join(self, patience_s: float) -> None:
        """Wait until all threads have ended, but no longer than this. One whose call never returns ends with the process."""
        deadline = time.monotonic() + patience_s
        watch = [self._limits_watch] if self._limits_watch else []
        for thread in [*(worker.thread for worker in list(self._workers)), *watch]:
            thread.join(max(0.0, deadline - time.monotonic()))

    # ── with the lock held ─────────────────────────────────────────────────────────────────────────────────────────────

    def _start_missing(self) -> None:
        """Have as many threads as are wanted, if there is something for them to do."""
        if self._closed.is_set() or not any(job.wants_a_thread for job in self._open):
            return
        if self._limits_watch is None and self._function.limit_s is not None:
            watch = threading.Thread(target=self._watch_limits, name=f"limits of {self._kind.name}", daemon=True)
            self._begin(watch)
            self._limits_watch = watch
        while len(self._workers) < self._num_wanted:
            worker = Worker()
            number = self._num_started + 1
            name = self._kind.name if number == 1 else f"{self._kind.name}-{number}"
            worker.thread = new_thread(name, partial(self._work, worker), partial(self._ended, worker))
            self._begin(worker.thread)
            self._num_started = number
            self._workers.append(worker)
            watch_worker(name, worker.thread)

    def _begin(self, thread: threading.Thread) -> None:
        try:
            thread.start()
        except RuntimeError as error:
            raise TaskError(
                f"no thread can be started to call `{self._function.name}`: {error}; {self._permits.num_stuck} calls were"
                " given up",
                "give what it waits for a limit of its own, so that calls end",
            ) from error

    def _open_again(self, job: Job) -> None:
        if job not in self._open:
            self._open.append(job)
        self._start_missing()
        self._changed.notify_all()

    def _cancel(self, job: Job) -> None:
        if job.is_over:
            return
        job.is_over = True
        if job in self._jobs:
            self._jobs.remove(job)
        left = [worker for worker in self._workers if worker.job is job]
        for worker in left:
            self._leave_behind(worker)
            if worker.call and job.is_callers:
                forget_call(worker.call)
        if left:
            self._start_missing()
        self._note_load()
        self._changed.notify_all()

    def _leave_behind(self, worker: Worker) -> None:
        worker.is_left = True
        self._workers.remove(worker)
        self._left.append(worker)
        forget_worker(worker.thread.name)

    def _note_load(self) -> None:
        self._load.change(Load.QUIET if self._quiet_for else len(self._jobs))

    def _raise_in_results(self, error: Exception) -> None:
        self._error = error
        self._changed.notify_all()

    def _fail_the_rest_if_hopeless(self, job: Job) -> None:
        late_in_a_row = job.late_in_a_row if job.is_callers else self._permits.late_in_a_row
        if late_in_a_row < MAX_LATE_IN_A_ROW:
            return
        assert job.calls is not None
        reason = (
            f"`{self._function.name}` was not called: the {MAX_LATE_IN_A_ROW} calls before did not return within"
            f" {self._function.limit_s:g} s"
        )
        for place in range(job.next, len(job.calls)):
            job.outcomes[place] = Failure(self._function.stage, reason, hint=self._function.hint)
        job.next = len(job.calls)

    # ── in a thread that calls ─────────────────────────────────────────────────────────────────────────────────────────

    def _work(self, worker: Worker) -> None:
        self._kind.prepare()
        idle_as(self._kind.idle)
        while (job := self._next_job(worker)) is not None:
            with span(self._busy):  # for all that it does in one go: there may be thousands of calls in a second
                is_complete = self._work_through(job, worker)
            if is_complete:
                self._end(job, worker)
        idle_as(self._kind.idle)  # books the wait until here: the lane of a thread that is gone ends with its last event

    def _next_job(self, worker: Worker) -> Job | None:
        """Block until there is a job for this thread. None ends it."""
        with self._changed:
            worker.job = None
            while not self._closed.is_set() and not worker.is_left:
                if worker in self._workers[: self._num_wanted] and (job := self._open_job()) is not None:
                    worker.job, job.has_begun = job, True
                    return job
                self._changed.wait()
            worker.call = None
            if worker in self._left:
                self._left.remove(worker)
            return None

    def _open_job(self) -> Job | None:
        while self._open and not self._open[0].wants_a_thread:
            self._open.popleft()
        if not self._open or (self._quiet_for and not self._open[0].has_begun):
            return None
        return self._open[0] if self._open[0].most > 1 else self._open.popleft()

    def _work_through(self, job: Job, worker: Worker) -> bool:
        """Make calls of a job until none is left. Returns whether this thread is to make something of their outcomes."""
        if job.calls is None:
            calls = job.begin()
            with self._changed:
                job.calls = calls
                self._fail_the_rest_if_hopeless(job)
        since_s, computing_since_s = time.perf_counter(), time.thread_time()
        with self._changed:
            work = self._next_call(job, worker)
        while work is not None:
            outcome = self._permitted_outcome(work, job, worker)
            now_s, computing_s = time.perf_counter(), time.thread_time()
            computed_s = computing_s - computing_since_s
            waited_s = now_s - since_s - computed_s
            since_s, computing_since_s = now_s, computing_s
            with self._changed:
                if worker.is_left:
                    return False
                worker.call = None
                job.outcomes[worker.place] = outcome
                self._permits.returned()
                job.late_in_a_row = 0
                self._weigh(job, computed_s, waited_s)
                work = self._next_call(job, worker)
        with self._changed:  # where more calls have come since, it is open again
            is_complete = job.wants_a_thread and job.is_complete and not worker.is_left
            job.is_ending |= is_complete
            return is_complete

    def _weigh(self, job: Job, computed_s: float, waited_s: float) -> None:
        """A call took so much more: what that says of those to come."""
        job.computed_s += computed_s
        job.waited_s += waited_s
        times = 1.0 if job.is_whole else WAITS
        if job.most > 1 and self._num_wanted < self.most and job.waited_s > max(HELP_AFTER_S, times * job.computed_s):
            self._get_help(job)
        job.computes = job.computed_s > max(HELP_AFTER_S, job.waited_s / WAITS)

    def _next_call(self, job: Job, worker: Worker) -> Work | None:
        assert job.calls is not None
        if worker.is_left or not job.has_calls:
            return None
        worker.place = job.next
        job.next += 1
        return job.calls[worker.place]

    def _get_help(self, job: Job) -> None:
        assert job.calls is not None
        self._num_wanted = min(self.most, len(self._workers) + len(job.calls) - job.next)
        self._start_missing()
        self._changed.notify_all()

    def _permitted_outcome(self, work: Work, job: Job, worker: Worker) -> object:
        permit = self._permits.take()
        try:
            with self._changed:
                worker.permit = permit
                if worker.is_left:
                    return None
            with calling(self._function.name, job.for_thread) as call:
                worker.call = call
                return self._outcome(work)
        finally:
            permit.end()

    def _own_outcome(self, work: Callable[[], Result]) -> Result | Failure:
        permit = self._permits.take()
        try:
            with calling(self._function.name):
                return self._outcome(work)
        finally:
            permit.end()

    def _outcome(self, work: Callable[[], Result]) -> Result | Failure:
        with boundary() as caught:
            result = work()
        return result if caught.error is None else failure_of(self._function.stage, caught.error)

    def _end(self, job: Job, worker: Worker) -> None:
        result = job.end([job.outcomes[place] for place in range(len(job.outcomes))])
        with self._changed:
            if worker.is_left:
                return
            worker.job = None
            self._deliver(job, result)

    def _deliver(self, job: Job, result: object) -> None:
        job.is_over = True
        self._jobs.remove(job)
        self._note_load()
        job.deliver(result)

    def _ended(self, worker: Worker, error: Exception | None) -> None:
        with self._changed:
            if not worker.is_left and error is not None:  # it stays among the workers that are to live: an alert says so
                self._workers.remove(worker)
                self._fail(error)

    # ── in the thread that watches the limit ───────────────────────────────────────────────────────────────────────────

    def _watch_limits(self) -> None:
        assert self._function.limit_s is not None
        patience_s = self._function.limit_s
        while not self._closed.wait(patience_s):
            with self._changed:
                late = [(worker, call) for worker, call in self._calls_now() if call.age_s() >= self._function.limit_s]
            if late:
                self._function.loop.leave_if_blocked()
            with self._changed, boundary() as caught:
                for worker, call in late:
                    if worker.call is call:
                        self._cancel_late(worker, call)
            with self._changed:
                if caught.error is not None:
                    self._fail(caught.error)
                ages = [call.age_s() for _, call in self._calls_now()]
            # Until the oldest is late. A call that begins meanwhile is late after that.
            patience_s = max(0.001, self._function.limit_s - max(ages, default=0.0))

    def _calls_now(self) -> list[tuple[Worker, Call]]:
        return [(worker, worker.call) for worker in (*self._workers, *self._left) if worker.call is not None]

    def _cancel_late(self, worker: Worker, call: Call) -> None:
        """A call that outlasts its limit is taken for dead: it is not waited for any more, and another may begin."""
        place = call.place()
        if worker.permit:
            worker.permit.end()
        self._permits.was_late(worker.thread)
        was_wanted = not worker.is_left
        if was_wanted:
            self._leave_behind(worker)
        self._left.remove(worker)
        forget_call(call)
        if was_wanted:
            assert worker.job is not None
            worker.job.late_in_a_row += 1
            self._go_on_without(worker.place, worker.job, place)

    def _go_on_without(self, which: int, job: Job, place: str) -> None:
        """Another thread takes the job, also where only its end is left, unless a caller waits for it. Raises where too many
        threads are stuck."""
        reason = f"`{self._function.name}` did not return within {self._function.limit_s:g} s"
        job.outcomes[which] = Failure(self._function.stage, reason, place, self._function.hint)
        self._refuse_where_too_many_are_stuck()
        self._fail_the_rest_if_hopeless(job)
        if job.is_complete and job.is_callers:
            self._deliver(job, None)
        elif job.wants_a_thread and job not in self._open:
            self._open.appendleft(job)
        self._start_missing()
        self._changed.notify_all()

    def _refuse_where_too_many_are_stuck(self) -> None:
        num_stuck = self._permits.num_stuck
        if num_stuck > MAX_STUCK:
            raise TaskError(
                f"{num_stuck} calls of `{self._function.name}` were given up after {self._function.limit_s:g} s and still run,"
                " each in a thread of its own",
                "give what it waits for a limit of its own, or compute in a process that can be ended, so that calls end",
            )


class _OwnCalls:
    """Calls that the caller makes when it wants their results."""

    def __init__(self, outcome: Callable[[Work], object]) -> None:
        self._outcome, self._works = outcome, list[Work]()

    def add(self, works: Sequence[Work]) -> None:
        self._works += works

    def results(self) -> list[object]:
        return [self._outcome(work) for work in self._works]


class _JobCalls:
    """Calls that threads make."""

    def __init__(self, user_calls: UserCalls, job: Job, calls: list[Work]) -> None:
        self._user_calls, self._job, self._calls = user_calls, job, calls

    def add(self, works: Sequence[Work]) -> None:
        if works:
            self._user_calls._add(self._job, self._calls, works)

    def results(self) -> list[object]:
        return self._user_calls._results(self._job)
