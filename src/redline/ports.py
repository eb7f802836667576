"""The five stages as the loop sees them. A stage implements its own port and is handed the ports it needs; it never
imports another stage."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from redline.errors import EngineError
from redline.types import (
    Completion,
    Delta,
    EngineStats,
    GenerateRequest,
    Message,
    Reaction,
    StepReport,
    Task,
    TrainBatch,
    Trajectory,
    TrajectoryGroup,
    Turn,
    Until,
    WeightSet,
    WeightUpdate,
)

Score = Mapping[str, float] | float
"""What an answer is worth: the named parts of the reward, or one number."""


class Engine(Protocol):
    """Samples from the policy."""

    def generate(self, requests: Sequence[GenerateRequest]) -> list[list[Completion]]:
        """All n completions of every request, in the order asked."""
        ...

    def apply(self, update: WeightUpdate) -> None:
        """Sample from this version from now on."""
        ...


class SteppedEngine(Protocol):
    """An engine that advances when it is told to, and takes requests at any time between two steps."""

    def submit(self, request: GenerateRequest, *, streaming: int = 0) -> int:
        """Queue a request and return its number. Raises EngineError where it cannot be served as asked. `streaming`: pieces
        of about so many tokens come as they are sampled; 1 brings every token as soon as it is there, 0 the whole alone. Where
        an engine is lost under way, what has come in pieces of more than one token may differ from the whole, which counts."""
        ...

    def abort(self, request_id: int) -> None:
        """End a request. Unknown and finished ones are ignored."""
        ...

    def end(self, request_id: int, index: int) -> None:
        """Sample no more of one completion of a request: what it has, at least all that came in pieces, comes as its whole with
        a later step. An engine that cannot samples it to its end. Unknown and finished ones are ignored."""
        ...

    def sampled_tokens(self, request_id: int) -> Mapping[int, int]:
        """Index of each completion that is not finished → tokens it has so far. Any thread may ask."""
        ...

    def step(self) -> Sequence[tuple[int, Delta | EngineError]]:
        """Advance every request by one step. Returns pieces of requests by their numbers, the last of a completion with the
        whole, or why one failed."""
        ...

    def apply(self, update: WeightUpdate) -> None:
        """Sample from this version from now on."""
        ...

    def reset_prefix_cache(self) -> None:
        """Find no prompt again that was computed before: what is sampled next does not depend on what came earlier."""
        ...

    @property
    def has_work(self) -> bool:
        """Whether a step would bring anything forward."""
        ...

    @property
    def stats(self) -> EngineStats: ...


class Receiver(Protocol):
    """Gets what comes of the requests that it submitted."""

    def receive(self, pieces: Sequence[tuple[int, Delta | Exception]]) -> None:
        """Take what one step of the engine brought: pieces by the number of their request, or why one failed. Called in the
        thread that steps the engine, which waits for it."""
        ...


class Session(Protocol):
    """Owns an engine: takes requests from any thread, and lets one thread at a time step the engine."""

    failure: BaseException | None
    """Why the stepping thread ended, where it was not asked to."""

    def start(self, name: str, prepare_thread: Callable[[], None], why_idle: Callable[[], str]) -> None:
        """Step the engine in a thread of this name from now on. `prepare_thread` is called first in it; `why_idle` names the
        span in which it waits while there is nothing to compute, and must not block."""
        ...

    def submit(self, request: GenerateRequest, receiver: Receiver, *, streaming: int = 0) -> int:
        """Queue a request and return its number; the receiver gets its pieces, or why it failed. `streaming` as
        `SteppedEngine.submit`."""
        ...

    def abort(self, number: int) -> None:
        """Give a request up; nothing more of it is delivered."""
        ...

    def end(self, number: int, index: int) -> None:
        """Sample no more of one completion of a request, as `SteppedEngine.end`; its whole is delivered as ever."""
        ...

    def sampled_tokens(self, number: int) -> Mapping[int, int]:
        """Index of each completion that is not finished → tokens it has so far. Any thread may ask; does not block."""
        ...

    def wake(self) -> None:
        """Have a thread that waits ask again what it waits for."""
        ...

    def hold(self, why: str = ...) -> None:
        """Block until the engine is between two steps. It stays there, for this thread alone, until `resume`. `why` names the
        span in which the engine's own thread waits meanwhile; unless it is given, that is for weights."""
        ...

    def resume(self) -> None:
        """Let the engine go on."""
        ...

    def held(self, why: str = ...) -> AbstractContextManager[None]:
        """`hold`, and `resume` when the block ends."""
        ...

    def reset_prefix_cache(self) -> None:
        """Find no prompt again that was computed before. For the thread that holds the engine."""
        ...

    def step_until(self, done: Callable[[], bool]) -> None:
        """Step the engine in the calling thread, which holds it meanwhile, until `done()`."""
        ...

    def close(self, patience_s: float = ...) -> None:
        """Abort what is under way and end the thread. Blocks until its step has ended, or for `patience_s`."""
        ...


class RewardWorkers(Protocol):
    """What computes rewards beside the trainer."""

    @property
    def most(self) -> int:
        """Workers that there may be."""
        ...

    def hold(self, count: int) -> None:
        """Have so many from now on."""
        ...

    def take_load(self) -> Sequence[float]:
        """Seconds for which 0, 1, 2, … groups were sampled and had no reward yet, since this was last asked."""
        ...


class Rollouts(Protocol):
    """Turns tasks into scored attempts: when it is asked for them, or beside the trainer."""

    def begin(self, indices: Sequence[int], version: int) -> None:
        """Attempt these tasks from now on; a task and its randomness follow from its index alone. Does not block."""
        ...

    def arrived(self) -> Sequence[TrajectoryGroup]:
        """Groups that were completed meanwhile. Does not block."""
        ...

    def finished(self, patience_s: float | None = None, *, late: bool = False) -> Sequence[TrajectoryGroup]:
        """Block until at least one group is complete, or make it now. Returns an empty sequence after `patience_s` seconds.
        With `late`, the wait is booked as one for late groups: enough others are ready."""
        ...

    def cancel(self, indices: Sequence[int]) -> None:
        """Attempt these no longer; they will not come any more."""
        ...

    def evaluate(self, tasks: Sequence[Task], patience_s: float | None = None) -> list[list[Trajectory]]:
        """Attempts at held-out tasks, scored. Blocks; groups under way rest meanwhile, and the user's calls for them are waited
        for first, but no longer than `patience_s`."""
        ...

    def remember(self, earlier: Iterable[tuple[str, Sequence[int]]]) -> None:
        """Expect attempts at tasks to be as long as these were: the ids of tasks, and the tokens of each attempt of a group at
        it, oldest group first."""
        ...

    def take_over(self, groups: Sequence[TrajectoryGroup]) -> list[TrajectoryGroup]:
        """Remember groups that an earlier process sampled at the version that a resumed run goes on from. Returns them as they
        were, with the lengths that were expected of them."""
        ...

    @property
    def reward_workers(self) -> RewardWorkers | None:
        """Those that score beside the trainer; None where the caller of `finished` does."""
        ...

    def sampled_tokens(self, index: int) -> Sequence[int]:
        """Tokens that each attempt of a group under way has so far; none where that is not known."""
        ...

    def queues(self) -> Mapping[str, float]:
        """How much waits where, by name. Does not block."""
        ...

    def num_workers(self) -> Mapping[str, int]:
        """Worker processes that there are now, by what they do; empty where there can be none. Does not block."""
        ...

    def memory(self) -> Mapping[str, int]:
        """Bytes by kind that it holds on the device."""
        ...

    def close(self) -> None:
        """Cancel what is under way and end all threads. Blocks for some seconds at most."""
        ...


class Buffer(Protocol):
    """Decides what is attempted, and holds attempts until the trainer wants them, no longer than the lag budget allows."""

    def admit(self, version: int) -> Sequence[int]:
        """Indices of the tasks to begin now that the trainer is at `version`."""
        ...

    def cancel_late(self, version: int) -> Sequence[int]:
        """Indices of groups under way that were begun too long ago: others take their place."""
        ...

    @property
    def patience_s(self) -> float | None:
        """How long to wait for groups before it is time to `cancel_late` some; None is for ever."""
        ...

    def offer(self, *groups: TrajectoryGroup) -> None: ...

    def has_batch(self, version: int) -> bool: ...

    @property
    def waits_for_late_groups(self) -> bool:
        """Whether the last `has_batch` said no only because groups under way would grow too old."""
        ...

    def next_batch(self, version: int) -> TrainBatch: ...

    def trained(self, batch: TrainBatch) -> None:
        """The weights hold what the batch taught."""
        ...


class Trainer(Protocol):
    """Improves the policy."""

    @property
    def version(self) -> int:
        """Optimizer steps taken."""
        ...

    def step(self, batch: TrainBatch) -> StepReport: ...

    def weights(self) -> WeightSet: ...

    def save(self, folder: Path) -> None:
        """Everything needed to continue bit for bit."""
        ...

    def load(self, folder: Path) -> None: ...

    def flush(self) -> None:
        """Block until every checkpoint that `save` has begun is on the disk."""
        ...


class WeightSync(Protocol):
    """Carries the trainer's weights to the engine."""

    def writing(self) -> AbstractContextManager[None]:
        """Open while the trainer overwrites its weights. Blocks until no engine that reads them is in a step; such an engine
        goes on when it has applied the next update."""
        ...

    def publish(self, weights: WeightSet) -> WeightUpdate:
        """Bring the weights to the engine. Blocks until it is proven that the engine has them; returns what it must apply to
        sample from them."""
        ...


class TaskSource(Protocol):
    """Where tasks come from. User code may implement it and name it by import path."""

    def train(self, index: int) -> Task:
        """Training task number `index`, counted from 0 without end; the same index always gives the same task."""
        ...

    def held_out(self, count: int) -> Sequence[Task]:
        """At most `count` distinct tasks that `train` never returns."""
        ...

    def score(self, task: Task, text: str) -> Score | Awaitable[Score]:
        """The reward for an answer to `task`: a number, or its named parts; may be `async def`. A part called `correct` or
        `accuracy` that is always 0 or 1 is shown as an accuracy. A source that several threads may ask at once says so by an
        attribute `score_is_thread_safe = True`. One that reads data, and an environment that does, may have a method
        `fingerprint() -> str`: a run is not resumed where it returns another text than when the run began."""
        ...


class Policy(Protocol):
    """The policy as an environment sees it."""

    async def say(
        self,
        messages: Sequence[Message],
        *,
        role: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        until: Until | None = None,
    ) -> Turn:
        """The policy's reply to a conversation, sampled under the recipe's settings.

        Append `turn.message` to the messages to go on from a reply. `role` names the player in a game of several: each has a
        conversation, rewards and advantages of its own. `tools` are JSON schemas of functions, shown to the model as its chat
        template does; `turn.tool_calls` has what it called. A reply also ends at any text of `stop`. `max_tokens` may lower
        the recipe's limit for this reply, not raise it.

        `until` is asked about the reply while it is sampled, after each token that adds text or completes a call, and ends it
        there once it returns something true: that token is the last of the reply, whichever engine samples it. It runs in
        the event loop and must not block. Raises `errors.BudgetError` where the attempt has no turns or tokens
        left; one that is not caught ends the attempt, with the part `truncated` of its reward."""
        ...


class Environment(Protocol):
    """Plays attempts at tasks. Each attempt is a call of `play`; thousands are under way at once, in one event loop.

    An environment may bring its own tasks with the methods `train` and `held_out` of a `TaskSource`. One whose `play` is not
    `async` is called in a thread, where `policy.say` blocks. An `async` one must not block: all attempts share its thread. One
    that awaits a single `policy.say(messages)` and nothing else may say so by an attribute `asks_once = True`: it is then
    played without an event loop. `close()`, where there is one, is called when the run ends."""

    async def play(self, task: Task, policy: Policy) -> Score | Mapping[str, Score]:
        """Let the policy attempt the task. Returns the reward: a number, or its named parts; in a game of several roles, that
        of each role by its name."""
        ...


class Game(Protocol):
    """A game in steps, for those who prefer that to writing `Environment.play`: one object plays one attempt at a time. Calls
    may block: they are made in a pool, with a time limit. A game may have `snapshot() -> bytes` and `restore(state: bytes)`."""

    def reset(self, task: Task) -> str | Sequence[Message]:
        """Begin an attempt. Returns what the policy sees first: a text, shown as the user's, or messages."""
        ...

    def step(self, reply: str) -> Reaction:
        """Take the policy's reply."""
        ...


class Watch(Protocol):
    """Sees what the loop does, and may end it. Metrics, checkpoints and evaluations hang here, not in the loop."""

    def group_collected(self, group: TrajectoryGroup) -> None: ...

    def step_finished(self, batch: TrainBatch, report: StepReport, update: WeightUpdate) -> None: ...

    def should_stop(self) -> bool:
        """True ends the run before the next step; everything up to here is kept."""
        ...
