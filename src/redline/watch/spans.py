"""Where the time went: the spans of a run, written to `trace.json` as it goes and summed in `ledger.json` at its end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from redline.config.schema import TelemetryConfig
from redline.errors import boundary
from redline.telemetry import TraceWriter, write_json
from redline.telemetry.processes import ProcessRecord, read_processes, span_files, with_processes
from redline.watch.outputs import Outputs


class SpanFiles:
    """Takes the spans of the recorder to the files and the listeners."""

    def __init__(self, telemetry: TelemetryConfig, outputs: Outputs) -> None:
        self._outputs = outputs
        tell, path = outputs.progress.note, outputs.folder.trace
        self._trace = TraceWriter(path, telemetry.trace_max_bytes, tell=tell) if telemetry.trace else None

    def write(self, version: int) -> None:
        """Write the spans that have ended since the last call."""
        spans = self._outputs.recorder.drain()
        if self._trace:
            self._trace.write(spans)
        if spans:
            self._outputs.listeners.spans({"step": version, "spans": spans})

    def bound(self) -> None:
        """Keep the trace within `telemetry.trace_max_bytes`."""
        if self._trace:
            self._trace.bound()

    def close(self) -> None:
        """Write the ledger, with the spans of other processes. An error on the way is told, and not raised."""
        folder = self._outputs.folder
        with boundary() as caught:
            ledger = with_processes(self._outputs.recorder.ledger(), self._traced(read_processes(folder.spans)))
            if self._trace:
                self._trace.close()
            write_json(folder.ledger, ledger.to_json())  # the last: it says that the run has closed its files
        if caught.error is not None:
            self._outputs.progress.note(f"ledger.json is not written: {type(caught.error).__name__}: {caught.error}")

    def _traced(self, processes: Iterable[ProcessRecord]) -> Iterator[ProcessRecord]:
        """The same records, each written to the trace on its way."""
        share = self._trace.worker_bytes if self._trace else None
        count = len(span_files(self._outputs.folder.spans))
        for process in processes:
            if self._trace:
                self._trace.write_process(process, share and share // count)
            yield process
