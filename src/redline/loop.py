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
rollouts      Task               TrajectoryGroup    demand of the buffer          buffer.demand
engine        GenerateRequest    Completion         requests                      rollouts.collect
buffer        TrajectoryGroup    TrainBatch         groups within the lag budget  buffer.offer
trainer       TrainBatch         WeightSet          a batch                       buffer.next_batch
weight_sync   WeightSet          WeightUpdate       a step of the trainer         trainer.step

With `buffer.max_lag: 0` each of them waits for the one before it: every token is trained on by the policy that sampled it.
"""

from __future__ import annotations

from redline.ports import Buffer, Engine, Rollouts, Trainer, Watch, WeightSync


def run(
    rollouts: Rollouts, buffer: Buffer, trainer: Trainer, weight_sync: WeightSync, engine: Engine, *, steps: int, watch: Watch
) -> None:
    """Take optimizer steps until there are `steps` of them. The version of the policy is the number taken so far."""
    engine.apply(weight_sync.publish(trainer.weights()))
    while trainer.version < steps and not watch.should_stop():
        version = trainer.version
        for group in rollouts.collect(buffer.demand(version), version):
            watch.group_collected(group)
            buffer.offer(group)
        batch = buffer.next_batch(version)
        report = trainer.step(batch)
        update = weight_sync.publish(trainer.weights())
        engine.apply(update)
        watch.step_finished(batch, report, update)
