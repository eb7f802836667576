"""Stage 2: holding attempts for the trainer."""

from redline.buffer.buffer import GroupBuffer
from redline.buffer.store.group_store import GroupStore
from redline.buffer.store.memory_store import MemoryStore
from redline.buffer.store.trajectory_store import TrajectoryStore

__all__ = ["GroupBuffer", "GroupStore", "MemoryStore", "TrajectoryStore"]
