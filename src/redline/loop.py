"""THE LOOP.

             Task
               │
     ┌─────────▼──────────┐ TrajectoryGroup ┌──────────────┐ TrainBatch ┌─────────┐
     │ rollouts           │────────────────►│ buffer       │───────────►│ trainer │
     │ tasks, rewards     │                 │ lag ≤ max_lag│            │         │
     └─────────▲──────────┘                 └──────────────┘            └────┬────┘
               │ Completion                                                  │ WeightSet
     ┌─────────┴──────────┐               WeightUpdate              ┌────────▼────┐
     │ engine             │◄────────────────────────────────────────│ weight_sync │
     └────────────────────┘                                         └─────────────┘

stage         consumes           produces           waits for                     unblocked by
rollouts      Task               TrajectoryGroup    indices to attempt            buffer.admit
engine        GenerateRequest    Completion         requests, whole weights       engine.apply
buffer        TrajectoryGroup    TrainBatch         groups within the lag budget  buffer.offer
trainer       TrainBatch         WeightSet          a batch                       buffer.next_batch
weight_sync   WeightSet          WeightUpdate       a step of the trainer         trainer.step

There is one loop for all modes. With `buffer.max_lag: 0` a batch is attempted after the step before it, so every token is
trained on by the policy that sampled it. With more, the buffer admits the tasks of later batches while this one is trained on:
`begin` returns at once, and rollouts run beside the trainer.
"""

from __future__ import annotations

from collections.abc import Sequence

from redline.ports import Buffer, Engine, Rollouts, Trainer, Watch, WeightSync
from redline.types import TrajectoryGroup


def run(
    rollouts: Rollouts, buffer: Buffer, trainer: Trainer, weight_sync: WeightSync, engine: Engine, *, steps: int, watch: Watch
) -> None:
    """Take optimizer steps until there are `steps` of them. The version of the policy is the number taken so far."""
    engine.apply(weight_sync.publish(trainer.weights()))
    while trainer.version < steps and not watch.should_stop():
        version = trainer.version
        _take_in(rollouts.arrived(), buffer, watch)
        _dispatch(rollouts, buffer, version)
        while not buffer.has_batch(version):
            _take_in(rollouts.finished(buffer.patience_s, late=buffer.waits_for_late_groups), buffer, watch)
            _dispatch(rollouts, buffer, version)  # in place of those that were dropped, or taught nothing
        batch = buffer.next_batch(version)
        report = trainer.step(batch)
        update = weight_sync.publish(trainer.weights())
        engine.apply(update)
        buffer.trained(batch)
        watch.step_finished(batch, report, update)


def _dispatch(rollouts: Rollouts, buffer: Buffer, version: int) -> None:
    """Wait no longer for what takes too long, and begin what there is room for."""
    rollouts.cancel(buffer.cancel_late(version))
    rollouts.begin(buffer.admit(version), version)


def _take_in(groups: Sequence[TrajectoryGroup], buffer: Buffer, watch: Watch) -> None:
    for group in groups:
        watch.group_collected(group)
    buffer.offer(*groups)
