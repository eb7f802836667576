"""Stage 4: the trainer's weights, to the engines. `protocol.py` draws who waits for whom; `transports/` move the bytes, and
`receiver.py` is what an engine of another process answers them with."""

from redline.weight_sync.asked import Sending
from redline.weight_sync.protocol import WeightProtocol
from redline.weight_sync.receiver import WeightReceiver
from redline.weight_sync.transports.broadcast import Broadcast
from redline.weight_sync.transports.checkpoint_engine import CheckpointEngine
from redline.weight_sync.transports.cuda_ipc import CudaIpc
from redline.weight_sync.transports.shared import SharedStorage

__all__ = ["Broadcast", "CheckpointEngine", "CudaIpc", "Sending", "SharedStorage", "WeightProtocol", "WeightReceiver"]
