"""Several engines in processes of their own, as one engine (`replicas.py`)."""

from __future__ import annotations

from redline.engine.replicas.replicas import Replicas
from redline.engine.replicas.restarts import Recovery
from redline.engine.replicas.slots import Event, Replica

__all__ = ["Event", "Recovery", "Replica", "Replicas"]
