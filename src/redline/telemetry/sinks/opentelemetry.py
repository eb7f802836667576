"""OpenTelemetry over OTLP/HTTP: each row as gauges, each step's spans as one trace, each alert as a span of its own.

The exporters are called here, in the sink's thread, and not by the SDK's own batchers: those swallow what fails, and drop
spans beyond a queue's length.

Resume: a collector keeps points and traces by time. Steps that are taken again are new work at a new time, under the
same run name and version.
"""

from __future__ import annotations

import logging
import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics.export import (
    Gauge,
    Metric,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, TraceFlags

from redline import __version__
from redline.config.schema import Config
from redline.errors import ConfigError
from redline.telemetry.files.run_folder import RunFolder
from redline.telemetry.sinks.sink import check_reachable, numbers
from redline.telemetry.spans import Span

EXPORT_S = 10.0
MAX_SPANS = 1000
"""Spans of one request."""


class OpenTelemetrySink:
    name = "opentelemetry"

    def started(self, folder: RunFolder, config: Config) -> None:
        asked = config.telemetry.opentelemetry
        check_reachable("telemetry.opentelemetry.endpoint", asked.endpoint)
        base = asked.endpoint.rstrip("/")
        self._metrics = OTLPMetricExporter(f"{base}/v1/metrics", timeout=EXPORT_S)
        self._traces = OTLPSpanExporter(f"{base}/v1/traces", timeout=EXPORT_S)
        self._resource = Resource.create({"service.name": "redline", "redline.run": folder.path.name})
        self._scope = InstrumentationScope("redline", __version__)
        self._min_span_ns = int(asked.min_span_ms * 1e6)
        self._clock_offset_ns = time.time_ns() - time.perf_counter_ns()
        self._random = random.Random()
        self._last_words = _LastWords()
        exporters = logging.getLogger("opentelemetry.exporter.otlp")
        exporters.addHandler(self._last_words)
        exporters.propagate = False  # else each failure is on the console, once per attempt
        if not self._export_metrics({"run/started": 1}):
            raise ConfigError(
                f"telemetry.opentelemetry.endpoint = {asked.endpoint!r}: what listens there takes no OTLP over HTTP",
                "give the address of a collector's OTLP/HTTP receiver, by default port 4318",
            )

    def step(self, row: Mapping[str, Any]) -> None:
        self._export_row("run/step", row)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        self._export_row("evaluation/step", row)

    def alert(self, row: Mapping[str, Any]) -> None:
        now = time.perf_counter_ns()
        attributes = {f"redline.alert.{key}": str(value) for key, value in row.items()}
        self._export_spans([self._span(f"alert {row['kind']}", self._context(), None, attributes, now, now)])

    def spans(self, row: Mapping[str, Any]) -> None:
        """A trace of one step: the spans of every lane, under one that lasts from the first to the last."""
        spans: list[Span] = [span for span in row["spans"] if span.end_ns - span.start_ns >= self._min_span_ns]
        if spans:
            self._export_spans(self._trace(row["step"], spans))

    def close(self) -> None:
        self._metrics.shutdown()
        self._traces.shutdown()

    def _trace(self, step: int, spans: Sequence[Span]) -> list[ReadableSpan]:
        root = self._context()
        start_ns, end_ns = min(span.start_ns for span in spans), max(span.end_ns for span in spans)
        trace = [self._span(f"step {step}", root, None, {"redline.version": step}, start_ns, end_ns)]
        around: defaultdict[str, list[tuple[int, SpanContext]]] = defaultdict(list)
        for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):  # outer before inner
            open_spans = around[span.lane]
            while open_spans and open_spans[-1][0] < span.end_ns:
                open_spans.pop()
            parent, context = open_spans[-1][1] if open_spans else root, self._context(root.trace_id)
            open_spans.append((span.end_ns, context))
            attributes = {"redline.lane": span.lane, **{f"redline.{key}": _plain(value) for key, value in span.args.items()}}
            trace.append(self._span(span.name, context, parent, attributes, span.start_ns, span.end_ns))
        return trace

    def _span(
        self,
        name: str,
        context: SpanContext,
        parent: SpanContext | None,
        attributes: Mapping[str, Any],
        start_ns: int,
        end_ns: int,
    ) -> ReadableSpan:
        offset_ns = self._clock_offset_ns
        return ReadableSpan(
            name,
            context,
            parent,
            self._resource,
            attributes,
            start_time=start_ns + offset_ns,
            end_time=end_ns + offset_ns,
            instrumentation_scope=self._scope,
        )

    def _context(self, trace_id: int = 0) -> SpanContext:
        trace_id, span_id = trace_id or self._random.getrandbits(127) + 1, self._random.getrandbits(63) + 1
        return SpanContext(trace_id, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    def _export_spans(self, spans: Sequence[ReadableSpan]) -> None:
        for start in range(0, len(spans), MAX_SPANS):
            if self._traces.export(spans[start : start + MAX_SPANS]) is not SpanExportResult.SUCCESS:
                raise ConnectionError(self._last_words.text)

    def _export_row(self, step_key: str, row: Mapping[str, Any]) -> None:
        if not self._export_metrics({step_key: row["step"], **numbers(row)}):
            raise ConnectionError(self._last_words.text)

    def _export_metrics(self, values: Mapping[str, float]) -> bool:
        now = time.time_ns()
        metrics = [
            Metric(key, "", "", Gauge([NumberDataPoint({}, 0, now, int(value) if isinstance(value, bool) else value)]))
            for key, value in values.items()
        ]
        scope = ScopeMetrics(self._scope, metrics, "")
        return self._metrics.export(MetricsData([ResourceMetrics(self._resource, [scope], "")])) is MetricExportResult.SUCCESS


class _LastWords(logging.Handler):
    """Why an export failed: the exporters answer yes or no, and write the reason to a log."""

    text = "the export failed"

    def emit(self, record: logging.LogRecord) -> None:
        self.text = record.getMessage()


def _plain(value: object) -> str | bool | int | float:
    return value if isinstance(value, (str, bool, int, float)) else str(value)
