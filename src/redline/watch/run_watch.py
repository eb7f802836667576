"""What happens around a step of a run.

step_finished ──► row of metrics ──► spans ──► evaluation, if due ──► checkpoint, if due
should_stop   ◄── an interrupt, the last step, a target that an evaluation has reached
"""

from __future__ import annotations

from collections.abc import Sequence

from redline.config.schema import Config
from redline.telemetry import span
from redline.telemetry.delays import Delays
from redline.telemetry.profiling.profiler import StepProfiler
from redline.telemetry.summary.failed_attempts import FailureTally
from redline.types import StepReport, TrainBatch, TrajectoryGroup, WeightUpdate
from redline.watch.checkpoints import Checkpoints
from redline.watch.evaluation import Evaluations
from redline.watch.interrupts import Interrupts
from redline.watch.outputs import Outputs
from redline.watch.rows import StepRows
from redline.watch.spans import SpanFiles
from redline.watch.watched import Watched

MAX_FAILED_STEPS = 3
"""Steps in a row of which every attempt may fail, once some have not."""


class RunWatch:
    """Writes a run's folder as the loop goes. Implements `ports.Watch`."""

    def __init__(
        self,
        config: Config,
        outputs: Outputs,
        stages: Watched,
        *,
        peak_flops: float | None = None,
        profiler: StepProfiler | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """`peak_flops` is what the trainer's devices can do in a second; without it no step has an MFU. `checkpoints` may have
        loaded one already."""
        self._config = config
        self._outputs = outputs
        self._stages = stages
        self._profiler = profiler
        self._spans = SpanFiles(config.telemetry, outputs)
        self._checkpoints = checkpoints or Checkpoints(config.run, outputs.folder, stages.trainer, outputs.progress.note)
        self._delays = Delays(outputs.folder, outputs.progress.note)
        self.rows = StepRows(outputs, stages, peak_flops, self._delays)
        self.evaluations = Evaluations(config.rollouts, outputs, stages)
        self.interrupts = Interrupts(outputs.progress.note)
        self._failed_in_a_row = 0
        """Steps of which every attempt failed, up to the last."""
        self._finished: int | None = None
        """The version whose step is written down whole; None before the first step of this process."""
        self._any_reward = False
        """Whether an attempt that this process made has got one."""

    # ── called by the loop ─────────────────────────────────────────────────────────────────────────────────────────────

    def group_collected(self, group: TrajectoryGroup) -> None:
        self.rows.collect(group)

    def step_finished(self, batch: TrainBatch, report: StepReport, update: WeightUpdate) -> None:
        version = update.version
        with span("telemetry.metrics", version=version):
            failed = self.rows.write(batch, report, update)
            self._spans.write(version)
        self._stop_where_all_fails(failed, version)
        if self._profiler:
            self._profiler.step_ends()  # reads the spans of its step where they stand in the trace
        self._spans.bound()
        if self.evaluations.is_due(version) and version < self._config.run.steps:
            self.evaluate(version)
        last = self.is_complete
        if last or self._checkpoints.is_due(version):
            self.checkpoint()
        if last:
            self._finish_checkpoints()
        if not last:
            self._step_begins(version + 1)
        self.rows.mark()
        self._finished = version

    def should_stop(self) -> bool:
        return self.interrupts.requested or self.is_complete

    @property
    def is_complete(self) -> bool:
        """All steps are taken, or an evaluation after the first step has reached `rollouts.evaluation.stop_at`."""
        return self.evaluations.has_reached_target or self._stages.trainer.version >= self._config.run.steps

    def _stop_where_all_fails(self, failed: FailureTally, version: int) -> None:
        """Raise where steps make failures only, from which nothing is learned. The first step of a process tells of a mistake;
        later ones may be an outage, and what was trained before is saved."""
        if not failed.num_attempts:
            return
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed.all_failed else 0
        self._any_reward |= not failed.all_failed
        if failed.all_failed and not self._any_reward:
            raise failed.stop(f"step {version}, the first of this process,")
        if self._failed_in_a_row == MAX_FAILED_STEPS:
            self.checkpoint()
            raise failed.stop(f"step {version}, as of the {MAX_FAILED_STEPS - 1} before it,")

    # ── called by the launcher ─────────────────────────────────────────────────────────────────────────────────────────

    def resume(self) -> None:
        """Load the newest checkpoint that is whole, unless one is loaded, and go back to it in the logs. Rows after it are cut,
        since their steps are taken again; where more is lost than a kill between two checkpoints explains, they are set aside.
        Raises, and changes nothing, where there are checkpoints and none is whole."""
        with span("run.resume"):
            aside = self._checkpoints.go_back()
            version = self._stages.trainer.version
            self.rows.rewind(version, aside)
            self.evaluations.rewind(version, aside)
            self._outputs.progress.continue_from(version)

    def take_over(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Count groups of an earlier process, which no row has counted, in the next row."""
        self.rows.take_over(groups)

    def begin(self) -> None:
        """Begin the first step here: the time up to now belongs to no step."""
        self._step_begins(self._stages.trainer.version + 1)
        self.rows.mark()

    def _step_begins(self, step: int) -> None:
        """Take up what somebody has asked of the run meanwhile: a profile, delays."""
        if self._profiler:
            self._profiler.step_begins(step)
        self._delays.step_begins()

    def evaluate(self, version: int) -> None:
        """Block until the current policy has attempted the held-out tasks."""
        self.evaluations.run(version)

    def checkpoint(self) -> None:
        """Save the trainer, once the disk has everything that happened before this version."""
        with span("run.checkpoint", version=self._stages.trainer.version):
            self._stages.flush_store()
            self.rows.flush()
            self.evaluations.flush()
            self._checkpoints.save()

    def keep(self) -> None:
        """Save what this process has trained, before an error that is not the trainer's ends the run. Does nothing where the
        last step was not finished, or its checkpoint is there."""
        version = self._stages.trainer.version
        if self._finished == version and not self._checkpoints.has(version):
            self.checkpoint()
            self._finish_checkpoints()

    def _finish_checkpoints(self) -> None:
        with span("run.checkpoint"):
            self._checkpoints.finish()

    def close(self) -> None:
        """Write the checkpoint that is under way, the ledger and everything still in memory."""
        self._delays.close()
        try:
            self._finish_checkpoints()
        finally:
            self._spans.write(self._stages.trainer.version)
            self._spans.close()
            self.rows.close()
            self.evaluations.close()
