"""The process of an engine: how it begins, what it shows of itself, and that it ends with its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from support.tiny_engines import Model, ask, assert_same, make_model

from redline.config import EngineRecipe
from redline.engine import EngineSession
from redline.engine.remote.client import open_engine
from redline.errors import EngineLostError, WireError
from redline.launch.workers.spawn import EngineSpec, LocalProcesses
from redline.models.files.tiny import tiny_tokenizer
from redline.telemetry.processes import read_processes
from redline.wire import connect, make_token

SOON_S = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    made = make_model(tmp_path_factory.mktemp("model"))
    tiny_tokenizer().save_pretrained(made.folder)
    return made


def spec_of(model: Model, **fields: str) -> EngineSpec:
    recipe = {"model": {"path": str(model.folder), "dtype": "float32"}, "engine": {"block_size": 4, "max_num_seqs": 8}}
    return EngineSpec(EngineRecipe.model_validate(recipe).model_dump(mode="json"), **fields)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_worker_samples_what_an_engine_here_does_and_shows_its_token_to_nobody(model: Model, tmp_path: Path) -> None:
    worker = LocalProcesses().spawn(spec_of(model, spans=str(tmp_path / "spans")))
    with pytest.raises(WireError):
        connect(worker.address, make_token(), "requests", 5)
    engine = open_engine(worker.address, worker.token, "engine 0", why_ended=worker.why_ended)
    requests = [ask(5, 30, seed=1, n=3), ask(9, 12, seed=2)]
    for got, expected in zip(EngineSession(engine).generate(requests), map(model.alone, requests), strict=True):
        assert_same(got, expected)
    assert worker.token not in Path(f"/proc/{worker.pid}/cmdline").read_text()
    assert worker.address.startswith("127.0.0.1:")
    engine.close()
    soon(lambda: not worker.is_alive())
    assert worker.why_ended().startswith(f"its process {worker.pid} ended with exit code 0")
    assert worker.token not in worker.why_ended()
    [record] = read_processes(tmp_path / "spans")
    assert record.name == "engine-0"
    assert {"engine.prefill", "engine.decode"} <= {span.name for span in record.spans}
    assert record.ledger is not None, "it ended in order"


@pytest.mark.slow
def test_a_worker_that_cannot_load_its_model_says_so_in_the_error_of_who_started_it(model: Model, tmp_path: Path) -> None:
    recipe = {"model": {"path": str(tmp_path / "nothing")}}
    spec = EngineSpec(EngineRecipe.model_validate(recipe).model_dump(mode="json"), name="engine 3")
    with pytest.raises(EngineLostError, match=r"(?s)engine 3 did not start: .*nothing") as caught:
        LocalProcesses().spawn(spec)
    assert "Traceback" not in caught.value.message


@pytest.mark.slow
def test_a_worker_that_takes_too_long_to_start_is_killed_and_named(model: Model) -> None:
    with pytest.raises(EngineLostError, match=r"engine 0 did not start: not done after 0\.2 s"):
        LocalProcesses(start_s=0.2).spawn(spec_of(model))


PARENT = """
import json, os, sys, time
from redline.launch.workers.spawn import EngineSpec, LocalProcesses
from redline.engine.remote.client import open_engine
worker = LocalProcesses().spawn(EngineSpec.from_json(sys.stdin.readline()))
if sys.argv[1].startswith("connected"):
    engine = open_engine(worker.address, worker.token, "engine 0")
if sys.argv[1].endswith("with a child") and os.fork() == 0:
    time.sleep(600)
print(json.dumps({"pid": worker.pid}), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["connected", "not yet connected", "connected with a child"])
def test_a_worker_ends_with_its_parent_however_that_ends_and_whatever_it_leaves_behind(model: Model, how: str) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
        start_new_session=True,
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    print(spec_of(model).to_json(), file=parent.stdin, flush=True)
    pid = json.loads(parent.stdout.readline())["pid"]
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    try:
        soon(lambda: not Path(f"/proc/{pid}").exists())
    finally:
        with suppress(ProcessLookupError):
            os.killpg(parent.pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_worker_that_is_no_longer_wanted_while_it_starts_is_ended_at_once(model: Model) -> None:
    processes = LocalProcesses()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(processes.spawn, spec_of(model))
        time.sleep(0.3)
        began = time.monotonic()
        processes.close()
        with pytest.raises(EngineLostError, match="engine 0 did not start"):
            starting.result(10)
        assert time.monotonic() - began < 3
    with pytest.raises(EngineLostError, match="no longer needed"):
        processes.spawn(spec_of(model))


def soon(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)
