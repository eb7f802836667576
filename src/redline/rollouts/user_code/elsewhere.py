"""A task source whose `score` is called in worker processes, on this machine or on the nodes of a cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol, cast

from redline.ports import Score, TaskSource
from redline.rollouts.user_code.failures import defined_at
from redline.telemetry.stalls.calls import Call, current_call
from redline.types import Task

SCORER, MAKER = "redline.environments.workers.scorer:score", "redline.environments.workers.scorer:make"
"""What the processes are asked for, and what each is asked for once before."""


class ProcessPool(Protocol):
    """Calls functions in processes."""

    @property
    def num_running(self) -> int:
        """Processes that take calls now."""
        ...

    async def call(self, function: str, *arguments: Any, first: tuple[Any, ...], timed: Call | None) -> Any:
        """What the function returns. Raises CallError for what it raises, where it takes too long, and where its process is
        lost for the second time. `first` is what each process does once before, in words, and the function, with its
        arguments, that does it; the time of `timed` counts when the process has done so."""
        ...

    def close(self) -> None:
        """End all processes. Blocks for some seconds at most."""
        ...


class ScoredElsewhere:
    """Fetches tasks from a source in this process, and scores with others like it in worker processes. Implements
    `ports.TaskSource`."""

    score_is_thread_safe = True
    """Each process makes one call at a time."""

    def __init__(self, source: TaskSource, made_as: Mapping[str, Any], processes: ProcessPool) -> None:
        """`made_as` has the source's `path`, `folder` and `keywords`, by which processes make it again."""
        self.train, self.held_out = source.train, source.held_out
        self._made_as, self._processes = made_as, processes
        self._defined_at = defined_at(source.score)

    def score(self, task: Task, text: str) -> Awaitable[Score]:
        """What the source's `score` returns. The start of a process, and the import of the source there, are no part of the
        time of the call that the calling thread makes."""
        call = current_call()
        if call is not None:
            call.made_at = self._defined_at
        return self._score(task, text, call)

    async def _score(self, task: Task, text: str, timed: Call | None) -> Score:
        arguments = (self._made_as, task, text)
        first = (f"import of {self._made_as['path']}", MAKER, self._made_as)
        return cast(Score, await self._processes.call(SCORER, *arguments, first=first, timed=timed))

    @property
    def num_worker_processes(self) -> int:
        """Processes that score, or wait for something to score."""
        return self._processes.num_running

    def close(self) -> None:
        """End the processes. Blocks for some seconds at most."""
        self._processes.close()
