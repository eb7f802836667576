"""The records that travel between the stages, one per arrow of the pipeline.

    Task ──► rollouts ──TrajectoryGroup──► buffer ──TrainBatch──► trainer
                ▲                                                    │ WeightSet
           Completion                                                ▼
                └────── engine ◄────────WeightUpdate──────────── weight_sync

Token data is flat values plus offsets from the sampler to the device: int32 tokens laid end to end, and int64 offsets that
serve as Arrow list offsets on disk and as `cu_seqlens` in the trainer.

Letters in shapes: T packed tokens, S sequences, P prompts, G attempts per group, V vocabulary.
"""

from redline.types.attempts import Failure, Reaction, ReplySoFar, ToolCall, Trajectory, TrajectoryGroup, Turn, Until, by_attempt
from redline.types.batches import StepReport, TrainBatch
from redline.types.flat import Flat, Pieces, records, take
from redline.types.sampling import (
    UNKNOWN_EXPERT,
    Completion,
    Delta,
    EngineStats,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TopLogprobs,
    VersionSpan,
)
from redline.types.tasks import Message, Task, plain_copy
from redline.types.weights import WeightSet, WeightUpdate

__all__ = [
    "UNKNOWN_EXPERT",
    "Completion",
    "Delta",
    "EngineStats",
    "Failure",
    "FinishReason",
    "Flat",
    "GenerateRequest",
    "Message",
    "Pieces",
    "Reaction",
    "ReplySoFar",
    "SamplingParams",
    "StepReport",
    "Task",
    "ToolCall",
    "TopLogprobs",
    "TrainBatch",
    "Trajectory",
    "TrajectoryGroup",
    "Turn",
    "Until",
    "VersionSpan",
    "WeightSet",
    "WeightUpdate",
    "by_attempt",
    "plain_copy",
    "records",
    "take",
]
