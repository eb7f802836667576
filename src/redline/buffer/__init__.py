"""Stage 2: holding attempts for the trainer."""

from redline.buffer.buffer import GroupBuffer
from redline.buffer.store import TrajectoryStore

__all__ = ["GroupBuffer", "TrajectoryStore"]
