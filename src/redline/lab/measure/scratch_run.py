"""The loop of `redline train` without a run to keep: its stages in a folder that is thrown away, and a watch that measures."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from redline.config import Config
from redline.launch.build import build
from redline.launch.placement import place
from redline.launch.preflight import load_tasks
from redline.launch.process import sparing_what_is_there
from redline.launch.stages import Stages
from redline.ports import SteppedEngine
from redline.telemetry import Progress, Recorder, RunFolder
from redline.types import StepReport, TrainBatch, TrajectoryGroup, WeightUpdate
from redline.watch.rows import FinishedStep


@contextmanager
def scratch_stages(
    config: Config, around_engine: Callable[[SteppedEngine], SteppedEngine] = lambda engine: engine
) -> Iterator[Stages]:
    """The connected stages of a recipe, in this process and without a word on the console. Closes them at the end of the block.
    Settings of the process are the caller's: call `prepare_process` first. Rollouts step what `around_engine` returns."""
    with tempfile.TemporaryDirectory(prefix="redline-lab-") as scratch:
        folder = RunFolder.create(Path(scratch), "scratch")
        quiet = Progress(config.run.steps, console=Console(quiet=True))
        stages = build(config, folder, quiet, place(config), load_tasks(config), around_engine)
        try:
            with sparing_what_is_there():
                yield stages
        finally:
            stages.close()


class StepWatch:
    """Hands every step that the loop finishes to a function, and never ends the loop. Implements `ports.Watch`."""

    def __init__(self, finished: Callable[[FinishedStep], None] | None = None, recorder: Recorder | None = None) -> None:
        """With a `recorder`, a step has the time of each span since the step before it."""
        self._finished = finished
        self._recorder = recorder
        self._groups: list[TrajectoryGroup] = []

    def group_collected(self, group: TrajectoryGroup) -> None:
        self._groups.append(group)

    def step_finished(self, batch: TrainBatch, report: StepReport, update: WeightUpdate) -> None:
        groups, self._groups = self._groups, []
        if self._finished is not None:
            span_ns = self._recorder.step_mark() if self._recorder else {}
            self._finished(FinishedStep(groups, batch, report, update, span_ns))

    def should_stop(self) -> bool:
        return False
