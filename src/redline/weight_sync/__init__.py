"""Stage 4: the trainer's weights, to the engine. `protocol.py` draws who waits for whom; `transports/` move the bytes."""

from redline.weight_sync.protocol import WeightProtocol
from redline.weight_sync.transports.shared import SharedStorage

__all__ = ["SharedStorage", "WeightProtocol"]
