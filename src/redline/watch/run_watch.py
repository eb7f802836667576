"""Everything that happens around a step: metrics, progress, checkpoints, evaluations, Ctrl-C."""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from redline.config.schema import Config
from redline.engine.stats import EngineStats, metrics_between
from redline.errors import DamagedCheckpointError, RunFolderError, boundary
from redline.ports import Trainer
from redline.rollouts.rewards.accuracy import accuracy
from redline.telemetry import MetricsLog, Progress, Recorder, RunFolder, TraceWriter, span, write_json
from redline.telemetry.console.progress import SampleAnswer
from redline.telemetry.files.failure import steps_logged
from redline.telemetry.files.set_aside import make_aside
from redline.telemetry.listeners import Listeners
from redline.telemetry.processes import ProcessRecord, read_processes, span_files, with_processes
from redline.telemetry.profiling.profiler import StepProfiler
from redline.telemetry.summary.failed_attempts import WORTH_SAYING, FailureTally, reaches_target
from redline.telemetry.summary.phases import EngineParts
from redline.telemetry.summary.timeline import step_phases
from redline.types import StepReport, Task, TrainBatch, Trajectory, TrajectoryGroup, WeightUpdate
from redline.watch.checkpoints import BEGIN_AGAIN, checkpoints
from redline.watch.rows import failures_of, reason_of, sampled, speed_beside, step_metrics

NUM_SAMPLES_SHOWN = 3
MAX_FAILED_STEPS = 3
"""Steps in a row of which every attempt may fail, once some have not."""


class RunWatch:
    """Writes a run's folder as the loop goes. Implements `ports.Watch`."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        recorder: Recorder,
        progress: Progress,
        trainer: Trainer,
        engine_stats: Callable[[], EngineStats],
        evaluate: Callable[[Sequence[Task]], list[list[Trajectory]]],
        held_out: Sequence[Task],
        flush_checkpoints: Callable[[], None] = lambda: None,
        buffer_metrics: Callable[[], Mapping[str, float]] = dict,
        listeners: Listeners | None = None,
        peak_flops: float | None = None,
        flush_store: Callable[[], None] = lambda: None,
        profiler: StepProfiler | None = None,
    ) -> None:
        """`flush_checkpoints` waits until what the trainer has saved is on the disk, `flush_store` until what became of the
        groups is: before a checkpoint, which must not know of steps that the store has not heard of. `listeners` hear of every
        row; they are started and closed by whoever made them. `peak_flops` is what the trainer's device can do in a second."""
        self._config = config
        self._folder = folder
        self._recorder = recorder
        self._progress = progress
        self._trainer = trainer
        self._engine_stats = engine_stats
        self._stats_before = engine_stats()
        self._evaluate = evaluate
        self._held_out = held_out
        self._flush_checkpoints = flush_checkpoints
        self._flush_store = flush_store
        self._buffer_metrics = buffer_metrics
        self._listeners = listeners or Listeners()
        self._peak_flops = peak_flops
        self._profiler = profiler
        self._engine_parts = EngineParts(recorder)
        self._metrics = MetricsLog(folder.metrics)
        self._evaluations = MetricsLog(folder.evaluations)
        settings = config.telemetry
        self._trace = TraceWriter(folder.trace, settings.trace_max_bytes, tell=progress.note) if settings.trace else None
        self._groups: list[TrajectoryGroup] = []
        """Those that have arrived since the last step: none, where a batch was ready before it."""
        self._taken_over_tokens = 0
        """Of these, tokens that an earlier process sampled."""
        self.num_groups_counted: int | None = 0
        """In the rows up to the checkpoint that the run was resumed from; None where some of these are missing."""
        self.failures = FailureTally()
        """Of all attempts that this process has made, evaluations apart."""
        self._num_taken_over = 0
        """The first of the groups that have arrived: an earlier process made them."""
        self._failed_in_a_row = 0
        """Steps of which every attempt failed, up to the last."""
        self._any_reward = False
        """An attempt that this process made has got one."""
        self._reward = math.nan
        """Mean of the last that arrived."""
        self._interrupted = False
        self._has_reached_target = False
        self.samples: dict[int, list[SampleAnswer]] = {}
        """Policy version → the answers to show, of the first evaluation and of the newest."""
        self.rewards: dict[int, float] = {}
        """Policy version → mean reward on held-out tasks."""
        self.accuracies: dict[int, float] = {}
        """The same of the share of right answers, where the task says which are right."""

    # ── called by the loop ─────────────────────────────────────────────────────────────────────────────────────────────

    def group_collected(self, group: TrajectoryGroup) -> None:
        self._groups.append(group)

    def step_finished(self, batch: TrainBatch, report: StepReport, update: WeightUpdate) -> None:
        version = update.version
        with span("telemetry.metrics", version=version):
            metrics = step_metrics(
                self._groups, batch, report, update, self._recorder.step_mark(), self._peak_flops, self._taken_over_tokens
            )
            metrics |= metrics_between(self._stats_before, self._engine_stats())
            metrics |= self._engine_parts.mark()
            metrics |= speed_beside(metrics)
            metrics |= self._buffer_metrics()
            failed = failures_of(self._groups[self._num_taken_over :])
            self._listeners.step(self._metrics.append(version, metrics | reason_of(self._groups)))
            if self._groups and self._listeners.want_trajectories:
                self._listeners.trajectories({"step": version, "samples": sampled(self._groups)})
            if self._groups:
                self._reward = metrics["rollouts/reward_mean"]
            self.failures.add(t for group in self._groups[self._num_taken_over :] for t in group.trajectories)
            self._groups, self._num_taken_over, self._taken_over_tokens = [], 0, 0
            speed, seconds = metrics["engine/tokens_per_s"], metrics["run/step_s"]
            self._progress.step(version, self._reward, speed, seconds, step_phases(metrics), failed.share)
            self._write_spans(version)
        self._stop_where_all_fails(failed, version)
        if self._profiler:
            self._profiler.step_ends()  # reads the spans of its step where they stand in the trace
        if self._trace:
            self._trace.bound()
        run, every = self._config.run, self._config.rollouts.evaluation.every
        if every and version % every == 0 and version < run.steps:
            self.evaluate(version)
        last = self.is_complete
        if last or (run.checkpoint_every and version % run.checkpoint_every == 0):
            self.checkpoint()
        if last:
            self._finish_checkpoints()
        if self._profiler and not last:
            self._profiler.step_begins(version + 1)
        self._mark()

    def should_stop(self) -> bool:
        return self._interrupted or self.is_complete

    @property
    def is_complete(self) -> bool:
        """All steps are taken, or an evaluation after the first step has reached `rollouts.evaluation.stop_at`."""
        return self._has_reached_target or self._trainer.version >= self._config.run.steps

    def _stop_where_all_fails(self, failed: FailureTally, version: int) -> None:
        """Nothing is learned from failures alone. The first step of a process tells of a mistake; later ones may be an outage,
        and what was trained before is saved."""
        if not failed.num_attempts:
            return
        self._failed_in_a_row = self._failed_in_a_row + 1 if failed.all_failed else 0
        self._any_reward |= not failed.all_failed
        if failed.all_failed and not self._any_reward:
            raise failed.stop(f"step {version}, the first of this process,")
        if self._failed_in_a_row == MAX_FAILED_STEPS:
            self.checkpoint()
            raise failed.stop(f"step {version}, as of the {MAX_FAILED_STEPS - 1} before it,")

    def _write_spans(self, version: int) -> None:
        spans = self._recorder.drain()
        if self._trace:
            self._trace.write(spans)
        if spans:
            self._listeners.spans({"step": version, "spans": spans})

    # ── called by the launcher ─────────────────────────────────────────────────────────────────────────────────────────

    def begin(self) -> None:
        """What came before is nobody's step."""
        if self._profiler:
            self._profiler.step_begins(self._trainer.version + 1)
        self._mark()

    def _mark(self) -> None:
        """What lies between two steps is nobody's step time, and nobody's tokens."""
        self._recorder.step_mark()
        self._engine_parts.mark()
        self._stats_before = self._engine_stats()

    @contextmanager
    def stopping_on_interrupt(self) -> Iterator[None]:
        """The first Ctrl-C, SIGTERM or SIGHUP (its terminal was closed) ends the run after the step in flight; the second ends
        it at once. A run under nohup, which ignores SIGHUP, goes on ignoring it."""

        def request_stop(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            self._progress.note("stopping after this step; once more stops at once")

        wanted = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            wanted.append(signal.SIGHUP)
        before = {number: signal.signal(number, request_stop) for number in wanted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def evaluate(self, version: int) -> None:
        """Answer the held-out tasks with the current policy."""
        if not self._held_out:
            return
        started = time.perf_counter()
        with span("run.evaluate", version=version):
            attempts = self._evaluate(self._held_out)
            answers = [t for trajectories in attempts for t in trajectories]
            failed = FailureTally()
            failed.add(answers)
            if failed.all_failed and version == 0:
                raise failed.stop("the first evaluation")
            found, rewards = accuracy(answers), [t.reward for t in answers]
            seconds = time.perf_counter() - started
            self.rewards[version] = sum(rewards) / len(rewards)
            if found is not None:
                self.accuracies[version] = found
            shown = [(task, trajectories[0]) for task, trajectories in zip(self._held_out, attempts, strict=True)]
            begun = self._config.rollouts.answer_prefix
            examples = [
                SampleAnswer(task.messages[-1]["content"], begun + first.text, first.reward)
                for task, first in shown[:NUM_SAMPLES_SHOWN]
            ]
            self._keep_samples(version, examples)
            row = {
                "evaluation/reward_mean": self.rewards[version],
                **({} if found is None else {"evaluation/accuracy": found}),
                "evaluation/num_tasks": len(attempts),
                "evaluation/num_answers": len(rewards),
                "evaluation/failures": failed.num_failed,
                "evaluation/seconds": seconds,
                "evaluation/samples": [asdict(example) for example in examples],
            }
            self._evaluations.rewind(version - 1)  # a resumed run may evaluate a version once more
            written = self._evaluations.append(version, row)
            self._has_reached_target |= reaches_target(written, self._config.rollouts.evaluation.stop_at)
            self._listeners.evaluation(written)
        self._progress.evaluation(f"held-out, step {version}", self.rewards[version], len(rewards), seconds, found)
        if failed.share > WORTH_SAYING:
            self._progress.note(f"held-out, step {version}: {failed.sentence()}")

    def _keep_samples(self, version: int, examples: list[SampleAnswer]) -> None:
        self.samples[version] = examples
        for between in sorted(self.samples)[1:-1]:
            del self.samples[between]

    def checkpoint(self) -> None:
        """Save the trainer, then let go of the oldest checkpoints. One that is still being written does not count yet."""
        version = self._trainer.version
        with span("run.checkpoint", version=version):
            self._flush_store()
            self._metrics.flush_to_disk()
            self._evaluations.flush_to_disk()
            self._trainer.save(self._folder.checkpoints / f"step-{version:06d}")
            self._prune_checkpoints()

    def _finish_checkpoints(self) -> None:
        with span("run.checkpoint"):
            self._flush_checkpoints()
            self._prune_checkpoints()

    def _prune_checkpoints(self) -> None:
        for old in checkpoints(self._folder)[self._config.run.keep_checkpoints :]:
            shutil.rmtree(old)

    def resume(self) -> None:
        """Load the newest checkpoint that is whole, and go back to it in the logs. Rows after it are cut, since their steps are
        taken again; where more is lost than a kill between two checkpoints explains, they are set aside. Raises, and changes
        nothing, where there are checkpoints and none is whole."""
        with span("run.resume"):
            damaged = self._load_newest_checkpoint()
            aside = self._make_aside(damaged)
            for partial in self._folder.checkpoints.glob(".*.partial"):
                shutil.rmtree(partial)
            self._metrics.rewind(self._trainer.version, aside)
            self.num_groups_counted = self._count_groups()
            self._evaluations.rewind(self._trainer.version, aside)
            for row in MetricsLog.read(self._folder.evaluations):
                if not {"step", "evaluation/reward_mean", "evaluation/samples"} <= row.keys():
                    continue  # damaged, or somebody else's
                self._has_reached_target |= reaches_target(row, self._config.rollouts.evaluation.stop_at)
                self.rewards[row["step"]] = row["evaluation/reward_mean"]
                if "evaluation/accuracy" in row:
                    self.accuracies[row["step"]] = row["evaluation/accuracy"]
                self._keep_samples(row["step"], [SampleAnswer(**sample) for sample in row["evaluation/samples"]])
            self._progress.continue_from(self._trainer.version)

    def _load_newest_checkpoint(self) -> list[Path]:
        """Returns the damaged checkpoints that are newer than the one that was loaded. Without any checkpoint, loads none."""
        damaged = []
        for path in checkpoints(self._folder):
            try:
                self._trainer.load(path)
            except DamagedCheckpointError as error:
                self._progress.note(f"skipping a {error.message.removeprefix(f'{path}: ')} ({path.name})")
                damaged.append(path)
            else:
                return damaged
        if damaged:
            names = ", ".join(path.name for path in damaged)
            raise RunFolderError(
                f"{self._folder.shown}: no checkpoint is whole ({names}); nothing was changed",
                BEGIN_AGAIN,
            )
        every, logged = self._config.run.checkpoint_every, steps_logged(self._folder)
        if every and logged > 2 * every:  # the second is not begun before the first is on the disk
            raise RunFolderError(
                f"{self._folder.shown}: no checkpoint is there, though {logged} steps were logged and every {every} of them"
                " leave one; nothing was changed",
                BEGIN_AGAIN,
            )
        return []

    def _count_groups(self) -> int | None:
        """Groups in the rows up to the checkpoint; None where rows are missing, so that nobody knows."""
        logged, version = steps_logged(self._folder), self._trainer.version
        if logged < version:
            self._progress.note(f"metrics.jsonl ends at step {logged}: the rows of the steps up to {version} are missing")
            return None
        return MetricsLog.total(self._folder.metrics, "rollouts/groups")

    def _make_aside(self, damaged: Sequence[Path]) -> Path | None:
        """A folder for the damaged checkpoints and for the rows that are cut because of them, or because there is no checkpoint
        at all; None where nothing has to be kept."""
        version, logged = self._trainer.version, steps_logged(self._folder)
        if not damaged and (version or not logged):
            return None
        aside = make_aside(self._folder)
        for path in damaged:  # out of the way, so that its step can be saved again
            path.rename(aside / path.name)
        lost = f"{max(0, logged - version)} steps after step {version} are lost and taken again"
        where = f"what there is of them is in {aside.name}"
        self._progress.note(
            f"using step-{version:06d} instead: {lost}, {where}" if damaged else f"no checkpoint: {lost}, {where}"
        )
        return aside

    def take_over(self, groups: Sequence[TrajectoryGroup]) -> None:
        """Groups of an earlier process that no row counts: the next one does. The engine's speed is not theirs."""
        self._groups += groups
        self._num_taken_over = len(self._groups)
        self._taken_over_tokens += sum(t.num_completion_tokens for group in groups for t in group.trajectories)

    def close(self) -> None:
        """Write the checkpoint that is under way, the ledger and everything still in memory."""
        try:
            self._finish_checkpoints()
        finally:
            self._write_spans(self._trainer.version)
            with boundary() as caught:
                ledger = with_processes(self._recorder.ledger(), self._traced(read_processes(self._folder.spans)))
                if self._trace:
                    self._trace.close()
                write_json(self._folder.ledger, ledger.to_json())  # the last: it says that the run has closed its files
            if caught.error is not None:
                self._progress.note(f"ledger.json is not written: {type(caught.error).__name__}: {caught.error}")
            self._metrics.close()
            self._evaluations.close()

    def _traced(self, processes: Iterable[ProcessRecord]) -> Iterator[ProcessRecord]:
        """The same, each written to the trace on its way."""
        share = self._trace.worker_bytes if self._trace else None
        count = len(span_files(self._folder.spans))
        for process in processes:
            if self._trace:
                self._trace.write_process(process, share and share // count)
            yield process
