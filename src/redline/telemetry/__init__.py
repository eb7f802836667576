"""What a run leaves behind, and how it accounts for its time. Loads no torch.

span() ──► Recorder ──┬──► Ledger        every nanosecond of a lane has one owner; the rest is `unaccounted`
                      ├──► MetricsLog    the same sums, per step
                      └──► TraceWriter   spans, for ui.perfetto.dev
"""

from __future__ import annotations

from redline.telemetry.console.progress import Progress
from redline.telemetry.files.durable import write_json
from redline.telemetry.files.metrics import MetricsLog
from redline.telemetry.files.run_folder import RunFolder
from redline.telemetry.files.trace import TraceWriter
from redline.telemetry.ledger import Ledger
from redline.telemetry.machine.environment import describe_environment
from redline.telemetry.spans import Recorder, idle_as, process_start_ns, recording, span

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
