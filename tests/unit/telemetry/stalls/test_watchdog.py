from __future__ import annotations

import gc
import json
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from redline.config.schema import Config
from redline.errors import ConfigError
from redline.telemetry import Recorder, RunFolder, workers
from redline.telemetry.alerts.webhook import Webhook, webhook_url
from redline.telemetry.stalls.watchdog import Watchdog
from redline.telemetry.workers import WorkerState, forget_worker, watch_worker, workers_now

pytestmark = pytest.mark.usefixtures("no_calls_of_others")

PATIENCE_S = 300.0


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def config(**telemetry: Any) -> Config:
    task = {"kind": "import", "path": "letters:Letters"}
    return Config.model_validate({"model": {"path": "builtin:tiny"}, "rollouts": {"task": task}, "telemetry": telemetry})


def alerts_of(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.alerts.read_text().splitlines()] if folder.alerts.exists() else []


# ── the thread ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(autouse=True)
def _no_worker_of_another_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process leave threads that died on purpose, and children that were killed and not waited for."""
    monkeypatch.setattr(workers, "_workers", {})
    gc.collect()
    subprocess._cleanup()  # type: ignore[attr-defined]
    multiprocessing.active_children()


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run")


def test_it_sees_rows_samples_and_the_clock(folder: RunFolder) -> None:
    sent: list[Any] = []
    watchdog = Watchdog(Recorder(), send=sent.append, every_s=0.01)
    watchdog.started(folder, config())
    worker = threading.Thread(target=lambda: None)
    worker.start()
    worker.join()
    watch_worker("rollouts", worker)
    wait_for(lambda: len(sent) == 1)
    forget_worker("rollouts")
    watchdog.step({"step": 4, "trainer/loss": None, "trainer/grad_norm": 1.0})
    gib = 2**30
    rows = [
        {"time": 60.0 * i, "host/rss_bytes": i * gib // 4, "host/available_bytes": 8 * gib, "host/total_bytes": 32 * gib}
        for i in range(60)
    ]
    (folder.path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    watchdog.close()
    assert [row["kind"] for row in alerts_of(folder)] == ["dead_worker", "not_finite", "host_memory_slope"]
    assert sent == alerts_of(folder)
    assert not folder.stalls.exists()


def test_it_sees_the_samples_of_other_machines_each_for_itself(folder: RunFolder) -> None:
    watchdog = Watchdog(Recorder(), every_s=3600)
    folder.samples_elsewhere.mkdir()
    gib = 2**30
    sizes = {"host": "node-7", "host/available_bytes": 8 * gib, "host/total_bytes": 32 * gib}
    grows = [{"time": 60.0 * i, "process": "engine 1", **sizes, "host/rss_bytes": i * gib // 4} for i in range(60)]
    stays = [{"time": 60.0 * i, "process": "engine 2", **sizes, "host/rss_bytes": gib} for i in range(60)]
    old = folder.samples_elsewhere / "old-00000000.jsonl"
    old.write_text("".join(json.dumps(row) + "\n" for row in grows))  # of an earlier process
    watchdog.started(folder, config())
    for name, rows in (("node-7-aaaaaaaa", grows), ("node-7-bbbbbbbb", stays)):
        (folder.samples_elsewhere / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    watchdog.close()
    [row] = alerts_of(folder)
    assert row["kind"] == "host_memory_slope"
    assert row["seen"].startswith("the run's memory on node-7, which engine 1 samples, grows by ")


def test_a_stall_is_told_and_written(folder: RunFolder) -> None:
    recorder = Recorder()
    watchdog = Watchdog(recorder)
    watchdog.started(folder, config(stall_after_s=0.2))
    with recorder.span("trainer.forward"):
        watchdog.begin(dict)
        wait_for(lambda: bool(alerts_of(folder)))
    watchdog.close()
    [row] = alerts_of(folder)
    assert row["kind"] == "stall"
    assert "main has been in trainer.forward" in row["seen"]
    assert "stalls/stall-001.txt" in row["look_at"]
    assert (folder.stalls / "stall-001.txt").exists()


def test_zero_watches_for_no_stall(folder: RunFolder) -> None:
    watchdog = Watchdog(Recorder(), every_s=0.01)
    watchdog.started(folder, config(stall_after_s=0))
    assert not folder.stalls.exists()
    watchdog.close()


# ── workers ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_workers_are_alive_until_they_are_not() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watch_worker("engine", process)
    try:
        assert WorkerState("engine", True) in workers_now()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert WorkerState("engine", False, f"process {process.pid} was ended by SIGKILL") in workers_now()
    finally:
        forget_worker("engine")
        assert process.stdin is not None
        process.stdin.close()
    assert "engine" not in [worker.name for worker in workers_now()]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("code", "expected"), [("raise SystemExit(3)", "ended with exit code 3"), ("", None)])
def test_a_child_that_nobody_named_counts_once_it_has_failed(code: str, expected: str | None) -> None:
    process = subprocess.Popen([sys.executable, "-c", code])
    stat = Path(f"/proc/{process.pid}/stat")
    wait_for(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
    ends = [worker.end for worker in workers_now() if f"process {process.pid} " in worker.name]
    process.wait()
    assert ends == ([f"process {process.pid} {expected}"] if expected else [])


# ── the webhook ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Server(HTTPServer):
    posts: list[dict[str, Any]]
    answer_may_come: threading.Event


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.server.answer_may_come.wait(PATIENCE_S)
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server(("127.0.0.1", 0), Handler)
    made.posts, made.answer_may_come = [], threading.Event()
    made.answer_may_come.set()
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.answer_may_come.set()
    made.shutdown()
    thread.join()
    made.server_close()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_port}/hook"


def test_an_alert_is_posted_with_the_run_and_a_sentence(server: Server, folder: RunFolder) -> None:
    watchdog = Watchdog(Recorder())
    watchdog.started(folder, config(alert_webhook=url(server)))
    watchdog.step({"step": 4, "trainer/loss": None, "trainer/grad_norm": 1.0})
    watchdog.close()
    [post] = server.posts
    assert {**alerts_of(folder)[0], "run": "run-001", "text": post["text"]} == post
    assert "trainer/loss" in post["text"]


def test_a_webhook_that_hangs_holds_up_nobody(server: Server) -> None:
    server.answer_may_come.clear()
    webhook = Webhook(url(server), 0.2, lambda text: None)
    for number in range(1000):
        webhook.post({"number": number})
    wait_for(lambda: len(server.posts) == 1)
    webhook.close()
    assert server.posts[0] == {"number": 0}


def test_a_webhook_that_fails_is_told_once() -> None:
    told: list[str] = []
    webhook = Webhook("http://127.0.0.1:9/", 1.0, told.append)
    for _ in range(3):
        webhook.post({})
    webhook.close()
    [text] = told
    assert text.startswith("telemetry.alert_webhook: URLError")
    assert text.endswith("alerts.jsonl has them all")


def test_the_url_may_stay_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOOK", "https://example.org/secret")
    assert webhook_url("env:HOOK") == "https://example.org/secret"
    assert webhook_url("http://example.org") == "http://example.org"
    monkeypatch.delenv("HOOK")
    with pytest.raises(ConfigError, match="HOOK holds no URL"):
        webhook_url("env:HOOK")
