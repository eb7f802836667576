"""What a run leaves behind, and how it accounts for its time. Loads no torch.

span() ──► Recorder ──┬──► Ledger        every nanosecond of a lane has one owner; the rest is `unaccounted`
                      ├──► MetricsLog    the same sums, per step
                      └──► TraceWriter   spans, for ui.perfetto.dev
"""

from __future__ import annotations

from redline.telemetry.durable import write_json
from redline.telemetry.environment import describe_environment
from redline.telemetry.ledger import Ledger
from redline.telemetry.metrics import MetricsLog
from redline.telemetry.progress import Progress
from redline.telemetry.run_folder import RunFolder
from redline.telemetry.spans import Recorder, idle_as, process_start_ns, recording, span
from redline.telemetry.trace import TraceWriter

__all__ = [
    "Ledger",
    "MetricsLog",
    "Progress",
    "Recorder",
    "RunFolder",
    "TraceWriter",
    "describe_environment",
    "idle_as",
    "process_start_ns",
    "recording",
    "span",
    "write_json",
]
