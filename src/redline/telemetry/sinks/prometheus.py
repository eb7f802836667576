"""An HTTP endpoint with the newest value of every metric, for Prometheus to scrape.

    redline_trainer_loss{run="demo-001"} 0.0123

Resume: the endpoint has no history. What Prometheus keeps is by time, and a step that is taken again is scraped as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from redline.config.schema import Config
from redline.errors import ConfigError
from redline.telemetry.files.durable import write_json
from redline.telemetry.files.run_folder import RunFolder
from redline.telemetry.sinks.sink import numbers


class PrometheusSink:
    name = "prometheus"

    def started(self, folder: RunFolder, config: Config) -> None:
        asked = config.telemetry.prometheus
        self._run = folder.path.name
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._alerts = Counter("redline_alerts", "Alerts raised", ["run", "kind"], registry=self._registry)
        try:
            self._server, self._thread = start_http_server(asked.port, asked.host, self._registry)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"telemetry.prometheus: cannot listen on {asked.host}:{asked.port}: {error}",
                "choose another telemetry.prometheus.port; 0 takes a free one",
            ) from error
        folder.sinks.mkdir(exist_ok=True)
        host = f"[{asked.host}]" if ":" in asked.host else asked.host
        write_json(folder.sinks / "prometheus.json", {"url": f"http://{host}:{self._server.server_port}/metrics"})

    def step(self, row: Mapping[str, Any]) -> None:
        self._set("run/step", row["step"])
        for key, value in numbers(row).items():
            self._set(key, value)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        self._set("evaluation/step", row["step"])
        for key, value in numbers(row).items():
            self._set(key, value)

    def alert(self, row: Mapping[str, Any]) -> None:
        self._alerts.labels(self._run, row["kind"]).inc()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _set(self, key: str, value: float) -> None:
        name = metric_name(key)
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, key, ["run"], registry=self._registry)
        self._gauges[name].labels(self._run).set(value)


def metric_name(key: str) -> str:
    """`trainer/loss` as Prometheus spells it: `redline_trainer_loss`."""
    return "redline_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)
