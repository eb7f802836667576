"""Stage 4: the trainer's weights, to the engine."""

from redline.weight_sync.shared import SharedWeightSync

__all__ = ["SharedWeightSync"]
