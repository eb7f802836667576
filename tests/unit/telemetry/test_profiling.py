from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from redline.config.schema import Config
from redline.errors import RunFolderError
from redline.telemetry import Recorder, RunFolder, recording, span
from redline.telemetry.files.trace import TraceWriter
from redline.telemetry.processes import read_processes, recording_process
from redline.telemetry.profiling import nvtx
from redline.telemetry.profiling.request import ask, request_path, take
from redline.telemetry.profiling.summary import Stages, device_operators, host_operators
from redline.telemetry.profiling.timeline import (
    CLOCK_MARK,
    Mark,
    Owners,
    Window,
    merge,
    read_spans,
    torch_offset_us,
    worker_events,
)


def complete(name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, **more}


# ── requests ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_request_reaches_the_run_once(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    with folder.locked():
        request = ask(folder, "trainer", 2)
        assert take(folder) == request
        assert take(folder) is None


def test_nobody_is_asked_where_nothing_runs(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    with folder.locked():
        pass
    with pytest.raises(RunFolderError, match=r"telemetry\.profile=rollout"):
        ask(folder, "rollout", 1)
    assert not request_path(folder).exists()


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"what": "all", "steps": 1, "id": "x"}', '{"what": "e2e", "steps": 0, "id": ""}']
)
def test_a_request_that_makes_no_sense_is_thrown_away(text: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    request_path(folder).write_text(text)
    assert take(folder) is None
    assert not request_path(folder).exists()


def test_steps_beyond_the_end_of_the_run_are_refused() -> None:
    values: dict[str, Any] = {
        "run": {"steps": 3},
        "model": {"path": "builtin:tiny"},
        "rollouts": {"task": {"kind": "import", "path": "letters:Letters"}},
        "telemetry": {"profile": {"what": "e2e", "steps": [3, 4]}},
    }
    with pytest.raises(ValueError, match="the run ends after step 3"):
        Config.model_validate(values)


# ── the timeline ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_tightest_mark_ties_the_clocks() -> None:
    trace = {
        "traceEvents": [complete(CLOCK_MARK, 100.0, 50.0), complete(CLOCK_MARK, 200.0, 2.0), complete("aten::mm", 0.0, 1.0)]
    }
    marks = [Mark(5_000_000, 5_060_000), Mark(5_100_000, 5_104_000)]
    assert torch_offset_us(trace, marks) == (5102.0 - 201.0, 2.0)
    assert torch_offset_us(trace, marks[:1]) is None


def test_spans_come_back_from_the_trace_on_their_own_clock(tmp_path: Path) -> None:
    recorder, path = Recorder(), tmp_path / "trace.json"
    with TraceWriter(path) as writer:
        with recorder.span("run.setup"):
            pass
        writer.write(recorder.drain())
        from_byte = path.stat().st_size
        tie = recorder.span("telemetry.profile", step=3)
        with tie:
            pass
        work = recorder.span("trainer.forward")
        with work:
            pass
        writer.write(recorder.drain())
        window = Window(tie.end_ns, work.end_ns, from_byte)
        names, spans = read_spans(path, window, ("step", 3, tie.start_ns))
    [found] = [event for event in spans if event["name"] == "trainer.forward"]
    assert found["ts"] == pytest.approx(work.start_ns / 1000, abs=0.01)
    assert "run.setup" not in [event["name"] for event in spans]
    assert {event["name"] for event in names} == {"process_name", "thread_name"}
    document = merge(names, spans, [complete("aten::mm", work.start_ns / 1000, 1.0, pid=77)], window)
    times = {event["name"]: event["ts"] for event in document["traceEvents"] if "ts" in event}
    assert times["trainer.forward"] == pytest.approx(times["aten::mm"], abs=0.01)
    assert json.loads(json.dumps(document)) == document


def test_the_spans_of_other_processes_are_in_the_timeline(tmp_path: Path) -> None:
    with recording_process("rewards", tmp_path) as recorder:
        with span("reward.early"):
            pass
        start_ns = time.perf_counter_ns()
        with span("reward.score", version=3):
            pass
    assert recorder is not None
    window = Window(start_ns, time.perf_counter_ns(), 0)
    document = merge([], worker_events(read_processes(tmp_path), window), [], window)
    [event] = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert (event["name"], event["args"]) == ("reward.score", {"version": 3})
    assert 0 <= event["ts"] <= (window.end_ns - start_ns) / 1000
    assert event["pid"].endswith(f"rewards-{os.getpid()}")


def test_the_innermost_span_owns_a_moment() -> None:
    owners = Owners(
        [complete("trainer.step", 10, 100), complete("trainer.forward", 20, 30), complete("engine.decode", 200, 10)]
    )
    moments = (5, 10, 20, 49, 50, 109, 111, 205, 211)
    assert [owners.at(moment) for moment in moments] == [
        "unaccounted",
        "trainer.step",
        "trainer.forward",
        "trainer.forward",
        "trainer.step",
        "trainer.step",
        "unaccounted",
        "engine.decode",
        "unaccounted",
    ]


# ── the summary ────────────────────────────────────────────────────────────────────────────────────────────────────────

STAGES = Stages(
    {"main": Owners([complete("trainer.forward", 0, 100)]), "rollouts": Owners([complete("engine.decode", 0, 100)])},
    {11: "main", 22: "rollouts"},
)


def test_an_operator_has_its_own_time_in_the_stage_that_called_it() -> None:
    events = [
        complete("aten::linear", 10, 30, cat="cpu_op", tid=11),
        complete("aten::mm", 15, 20, cat="cpu_op", tid=11),
        complete("aten::mm", 15, 7, cat="cpu_op", tid=22),
        complete("aten::add", 60, 5, cat="cpu_op", tid=99),  # autograd's thread works for the main lane
    ]
    operators = host_operators(events, STAGES)
    assert operators.largest() == [
        {"name": "aten::mm", "calls": 2, "self_s": pytest.approx(27e-6)},
        {"name": "aten::linear", "calls": 1, "self_s": pytest.approx(10e-6)},
        {"name": "aten::add", "calls": 1, "self_s": pytest.approx(5e-6)},
    ]
    assert {stage: part["self_s"] for stage, part in operators.by_stage().items()} == {
        "trainer": pytest.approx(35e-6),
        "engine": pytest.approx(7e-6),
    }


def test_a_kernel_belongs_to_the_stage_that_launched_it() -> None:
    events = [
        complete("cudaLaunchKernel", 50, 2, cat="cuda_runtime", tid=22, args={"correlation": 5}),
        complete("gemm", 500, 40, cat="kernel", tid=7, args={"correlation": 5}),
        complete("copy", 600, 1, cat="gpu_memcpy", tid=7, args={"correlation": 6}),
    ]
    stages = device_operators(events, STAGES).by_stage()
    assert list(stages) == ["engine", "unknown"]
    assert stages["engine"]["operators"] == [{"name": "gemm", "calls": 1, "self_s": pytest.approx(40e-6)}]


def test_spans_are_ranges_while_they_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no NVTX without CUDA: a list stands in for it."""
    calls: list[str] = []
    monkeypatch.setattr(nvtx.torch.cuda.nvtx, "range_push", calls.append)
    monkeypatch.setattr(nvtx.torch.cuda.nvtx, "range_pop", lambda: calls.append("pop"))
    recorder = Recorder()
    with recording(recorder):
        nvtx.show_spans(True)
        try:
            with span("trainer.forward"), span("trainer.backward"):
                pass
        finally:
            nvtx.show_spans(False)
        with span("trainer.optimizer"):
            pass
    assert calls == ["trainer.forward", "trainer.backward", "pop", "pop"]
    assert [s.name for s in recorder.drain()] == ["trainer.backward", "trainer.forward", "trainer.optimizer"]
