"""Every sink against its real library, offline. Each is skipped where the library is not installed."""

from __future__ import annotations

import gzip
import http.server
import importlib
import inspect
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.eventually import eventually
from support.ports import free_port
from support.sink_runs import SAMPLES, killed_and_resumed, listening, make_config, row, tell, tensorboard_events, wandb_history

from redline.errors import ConfigError
from redline.telemetry import Recorder, RunFolder
from redline.telemetry.listeners import Listeners
from redline.telemetry.sinks import make_sinks
from redline.telemetry.sinks.sink import Memory, flat, numbers


@contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[http.server.ThreadingHTTPServer]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


# ── before any library ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_sink_nobody_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.sinks"):
        make_config("tensorbord")


def test_a_step_is_new_once_in_every_process_that_shares_the_folder(tmp_path: Path) -> None:
    memory = Memory(tmp_path / "sink.json")
    assert [memory.is_new("step", step) for step in (1, 2, 2, 1, 3)] == [True, True, False, False, True]
    assert memory.is_new("evaluation", 3)
    again = Memory(tmp_path / "sink.json")
    assert [again.is_new("step", step) for step in (3, 4)] == [False, True]


def test_a_row_becomes_its_finite_numbers() -> None:
    assert numbers({"step": 1, "a/b": 2, "a/c": None, "a/d": "x", "a/e": float("nan"), "a/f": True}) == {"a/b": 2, "a/f": True}


def test_a_document_becomes_dotted_keys() -> None:
    assert flat({"run": {"seed": 0, "x": {"y": []}}, "task": {}}) == {"run.seed": 0, "run.x.y": [], "task": {}}


# ── TensorBoard ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_tensorboard_shows_texts_once_as_text(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    killed_and_resumed(tmp_path, make_config("tensorboard"))
    _, texts = tensorboard_events(tmp_path / "tensorboard")
    assert [step for step, _ in texts["config/text_summary"]] == [0]
    assert [step for step, _ in texts["evaluation/samples/text_summary"]] == [3, 5]
    assert [step for step, _ in texts["alerts/reward_collapse/text_summary"]] == [3, 5]
    shown = texts["evaluation/samples/text_summary"][0][1].decode()
    assert json.loads(shown) == SAMPLES
    assert all(line.startswith("    ") for line in shown.splitlines())  # a block of code: markup in it stays text


# ── Weights & Biases ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_wandb_offline_holds_a_resumed_run_under_one_id_with_its_attempts_as_tables(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    killed_and_resumed(tmp_path, make_config("wandb", mode="offline", trajectories_every=2))
    history = wandb_history(tmp_path)
    assert [each["_step"] for each in history if any(key.startswith("rollouts/trajectories") for key in each)] == [2, 4]
    assert len({path.name for path in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")}) == 1
    tables = list((tmp_path / "wandb").glob("offline-run-*/files/media/table/rollouts/trajectories_*.json"))
    assert len(tables) == 2
    assert json.loads(tables[0].read_text())["columns"][2:4] == ["answer", "reward"]


def test_wandb_without_a_login_is_refused_before_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match="nobody is logged in") as error, listening(tmp_path, make_config("wandb")):
        pass
    assert "wandb login" in error.value.hint


def test_wandb_that_cannot_be_reached_is_refused_without_its_half_minute_of_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    from redline.telemetry.sinks.wandb import INIT_S, wandb

    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
    monkeypatch.setattr(wandb.setup().settings, "base_url", f"http://127.0.0.1:{free_port()}")
    started = time.monotonic()
    with pytest.raises(ConfigError, match="cannot connect to http") as error, listening(tmp_path, make_config("wandb")):
        pass
    assert time.monotonic() - started < INIT_S / 3
    assert "telemetry.wandb.mode=offline" in error.value.hint


def test_wandb_with_a_key_that_cannot_be_one_is_refused_with_the_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    if "prompt" not in inspect.signature(wandb.login).parameters:
        pytest.skip("before that, wandb looks at keys only when it sends them")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    (tmp_path / "netrc").write_text("default login user password short\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match="API key") as error, listening(tmp_path, make_config("wandb")):
        pass
    assert "wandb login" in error.value.hint


# ── trackio ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_trackio_holds_samples_and_alerts_and_prints_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trackio")
    from trackio import utils
    from trackio.sqlite_storage import SQLiteStorage

    for module in (utils, importlib.import_module("trackio.sqlite_storage")):
        monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
    (tmp_path / "demo-001").mkdir()
    killed_and_resumed(tmp_path / "demo-001", make_config("trackio"))
    logs = SQLiteStorage.get_logs("redline", "demo-001")
    assert [each["step"] for each in logs if "evaluation/samples" in each] == [3, 5]
    assert len(SQLiteStorage.get_alerts("redline", run_name="demo-001")) == 2
    assert capsys.readouterr().out == ""


def test_trackio_with_a_space_needs_a_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setattr("redline.telemetry.sinks.trackio.get_token", lambda: None)
    with pytest.raises(ConfigError, match="logged in"), listening(tmp_path, make_config("trackio", space_id="me/runs")):
        pass


# ── MLflow ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow  # a new database migrates itself through every version of MLflow
def test_mlflow_holds_a_resumed_run_as_one_with_its_recipe_and_alerts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)  # artifacts go beside the database
    (tmp_path / "demo-001").mkdir()
    killed_and_resumed(tmp_path / "demo-001", make_config("mlflow"))
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("redline").experiment_id])
    assert run.data.params["run.steps"] == "100"
    assert run.info.status == "FINISHED"
    assert run.data.tags["redline.alert.reward_collapse"] == "step 5: reward 0"


def test_mlflow_says_at_once_when_nobody_listens(tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    config = make_config("mlflow", tracking_uri=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="cannot connect"), listening(tmp_path, config):
        pass


# ── Prometheus ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_prometheus_is_scraped_over_http_on_loopback(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    config = make_config("prometheus", port=0)
    assert config.telemetry.prometheus.host == "127.0.0.1"
    with listening(tmp_path, config) as listeners:
        tell(listeners, [1, 2])
        url = json.loads((tmp_path / "sinks" / "prometheus.json").read_text())["url"]
        labels = f'{{run="{tmp_path.name}"}}'
        wanted = f'redline_alerts_total{{kind="reward_collapse",run="{tmp_path.name}"}} 1.0'
        text = scraped(url, wanted)
    assert f"redline_trainer_loss{labels} 0.2" in text
    assert f"redline_run_step{labels} 2.0" in text
    assert f"redline_evaluation_reward_mean{labels} 0.5" in text
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url)


def scraped(url: str, wanted: str) -> str:
    """The page once it has a line; the sink's thread may be a moment behind."""
    pages: list[str] = []

    def is_there() -> bool:
        pages.append(urllib.request.urlopen(url).read().decode())
        return wanted in pages[-1]

    eventually(is_there)
    return pages[-1]


def test_prometheus_says_at_once_when_its_port_is_taken(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = make_config("prometheus", port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1") as error, listening(tmp_path, config):
            pass
    assert "telemetry.prometheus.port" in error.value.hint


# ── OpenTelemetry ──────────────────────────────────────────────────────────────────────────────────────────────────────


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes OTLP over HTTP, and keeps it."""

    received: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append((self.path, gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


class Closed(Collector):
    def do_POST(self) -> None:
        self.send_response(404)
        self.end_headers()


def test_opentelemetry_sends_rows_spans_and_alerts_to_a_collector(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    recorder = Recorder()
    with recorder.span("trainer.step", version=2), recorder.span("trainer.forward"):
        time.sleep(0.002)
    with recorder.span("engine.decode"):
        pass
    spans = recorder.drain()
    spans[-1].end_ns = spans[-1].start_ns + 1000  # shorter than what is sent
    handler = type("Kept", (Collector,), {"received": []})
    with serving(handler) as server:
        config = make_config("opentelemetry", endpoint=f"http://127.0.0.1:{server.server_port}")
        with listening(tmp_path, config) as listeners:
            tell(listeners, [1, 2])
            listeners.spans({"step": 2, "spans": spans})
    points: dict[str, list[float]] = {}
    sent = []
    for path, body in handler.received:
        if path == "/v1/metrics":
            for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
                for metric in resource.scope_metrics[0].metrics:
                    point = metric.gauge.data_points[0]
                    points.setdefault(metric.name, []).append(point.as_double or float(point.as_int))
        else:
            assert path == "/v1/traces"
            sent += ExportTraceServiceRequest.FromString(body).resource_spans[0].scope_spans[0].spans
    assert points["trainer/loss"] == [0.1, 0.2]
    assert points["run/step"] == [1, 2]
    assert points["evaluation/reward_mean"] == [0.5]
    by_name = {span.name: span for span in sent}
    assert by_name.keys() == {"alert reward_collapse", "step 2", "trainer.step", "trainer.forward"}
    assert by_name["trainer.forward"].parent_span_id == by_name["trainer.step"].span_id
    assert by_name["trainer.step"].parent_span_id == by_name["step 2"].span_id
    assert not by_name["step 2"].parent_span_id
    assert len({by_name[name].trace_id for name in ("step 2", "trainer.step", "trainer.forward")}) == 1
    step = by_name["trainer.step"]
    assert {a.key: a.value.int_value for a in step.attributes if a.value.int_value} == {"redline.version": 2}
    assert step.end_time_unix_nano - step.start_time_unix_nano >= 2_000_000
    assert abs(time.time_ns() - step.end_time_unix_nano) < 600e9


def test_opentelemetry_says_at_once_when_nobody_listens_or_what_listens_is_no_collector(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    config = make_config("opentelemetry", endpoint=f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ConfigError, match="cannot connect"), listening(tmp_path, config):
        pass
    with serving(Closed) as server:
        config = make_config("opentelemetry", endpoint=f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(ConfigError, match="takes no OTLP"), listening(tmp_path, config):
            pass


def test_a_collector_that_goes_away_is_logged_and_stops_nobody(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    monkeypatch.setattr("redline.telemetry.sinks.opentelemetry.EXPORT_S", 0.2)
    told: list[str] = []
    with serving(type("Kept", (Collector,), {"received": []})) as server:
        config = make_config("opentelemetry", endpoint=f"http://127.0.0.1:{server.server_port}")
        listeners = Listeners(make_sinks(config.telemetry), tell=told.append)
        listeners.started(RunFolder(tmp_path), config)
    for step in range(2):
        listeners.step(row(step))
    listeners.close()
    assert len(told) == 1
    assert "opentelemetry: step failed" in told[0]
    assert (tmp_path / "sinks.log").read_text().count("step failed") == 2
    assert capfd.readouterr().err == ""
