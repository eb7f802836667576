"""The kinds of workers there are."""

from __future__ import annotations

from redline.environments.workers.held import Workers
from redline.environments.workers.loop import LoopWorkers
from redline.environments.workers.processes import ProcessWorkers, Scale
from redline.environments.workers.threads import ThreadWorkers


def make_workers(run_in: str, count: int, limit_s: float | None, scale: Scale | None = None) -> Workers:
    """Workers of the kind that `rollouts.environment.run_in` asks for. A call may last `limit_s` seconds; None is for ever. The
    number of processes follows `scale`."""
    if run_in == "loop":
        return LoopWorkers()
    if run_in == "threads":
        return ThreadWorkers(count, limit_s)
    if run_in == "processes":
        return ProcessWorkers(count, limit_s, scale)
    raise ValueError(f"run_in = {run_in!r}")
