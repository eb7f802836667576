"""One process with one gap before every launch: what its thread does there decides the class of the cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import nsys_files
from support.late_launches import MS, US, Call, Kernel, Recorded

from redline.lab.traces.causes import ON_DEVICE, UNRECORDED, Cause
from redline.lab.traces.diagnosis import diagnose
from redline.lab.traces.names import HOST_WORK

STEPS, STEP, GAP = 10, 3 * MS, MS
PID, TID, OTHER = 500, 501, 502


def gaps(name: str, *, kind: str = "range", launched: int = 0) -> Recorded:
    """A device that works for 2 ms and waits for 1 ms while a thread is in a call of this name."""
    found = Recorded({PID: (0, 0)})
    for step in range(STEPS):
        start = step * STEP
        if name:
            found.calls.append(Call(PID, TID, name, start - GAP + 10 * US, start - 10 * US, kind, correlation=9000 + step))
        moment = start - 5 * US - launched
        found.calls.append(Call(PID, TID, "cudaGraphLaunch", moment, moment + 4 * US, "cuda", 100 + step))
        found.kernels.append(Kernel(PID, 0, 7, "gemm", start, start + STEP - GAP, 100 + step, 1, 1))
    return found


def first_cause(recorded: Recorded, folder: Path) -> Cause:
    return diagnose([nsys_files.write(recorded, folder / "report.sqlite", graphs="node")]).engines[0].causes[0]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("msgspec encode", "serialisation"),
        ("cloudpickle.dumps", "serialisation"),
        ("tokenizer.encode_batch", "tokenisation"),
        ("detokenize", "tokenisation"),
        ("Waiting for GIL", "gil"),
        ("aten::copy_", "copy"),
        ("aten::item", "synchronisation"),
        ("barrier", "synchronisation"),
        ("<built-in method wait of Work object at 0xffff7421d210>", "synchronisation"),
        ("shm_broadcast.enqueue", "ipc"),
        ("get_next_batch_to_run", "scheduling"),
        ("Scheduler.schedule", "scheduling"),
        ("sample", HOST_WORK),
        ("torch/utils/_contextlib.py(117): decorate_context", HOST_WORK),
        ("aten::broadcast_tensors", HOST_WORK),
        ("nn.Module: InputPipeline_0", HOST_WORK),
        ("multiprocessing/connection.py(206): send", "ipc"),
    ],
)
def test_a_call_before_the_launch_has_its_class_and_its_time(name: str, kind: str, tmp_path: Path) -> None:
    cause = first_cause(gaps(name), tmp_path)
    assert (cause.kind, cause.call, len(cause.stalls)) == (kind, name, STEPS - 1)
    assert cause.lost == pytest.approx((STEPS - 1) * (GAP - 20 * US), rel=0.02)


def test_a_blocking_call_into_cuda_is_a_class_of_its_own(tmp_path: Path) -> None:
    assert first_cause(gaps("cudaStreamSynchronize", kind="cuda"), tmp_path).kind == "synchronisation"


def test_time_in_which_the_thread_recorded_nothing_is_called_unrecorded(tmp_path: Path) -> None:
    cause = first_cause(gaps(""), tmp_path)
    assert (cause.kind, cause.call) == (UNRECORDED, "")


def test_work_that_was_launched_in_time_and_began_late_is_the_devices(tmp_path: Path) -> None:
    assert first_cause(gaps("schedule", launched=2 * GAP), tmp_path).kind == ON_DEVICE


def test_a_wait_for_another_thread_leads_to_what_that_thread_did(tmp_path: Path) -> None:
    recorded = gaps("queue.get")
    for step in range(STEPS):
        start = step * STEP - GAP
        recorded.calls.append(Call(PID, OTHER, "tokenize prompts", start + 20 * US, start + 900 * US, "range"))
        recorded.calls.append(Call(PID, OTHER, "queue.put", start + 900 * US, start + 985 * US, "range"))
    cause = first_cause(recorded, tmp_path)
    assert (cause.kind, cause.call, cause.hops) == ("tokenisation", "tokenize prompts", 1)
    assert cause.lost == pytest.approx((STEPS - 1) * 880 * US, rel=0.02)


def test_a_wait_for_a_message_that_nobody_sent_stays_a_wait(tmp_path: Path) -> None:
    recorded = gaps("zmq.recv")
    for step in range(STEPS):  # long before the wait is over, and so of another message
        recorded.calls.append(Call(PID, OTHER, "zmq.send", step * STEP - 2 * GAP, step * STEP - 2 * GAP + 5 * US, "range"))
    cause = first_cause(recorded, tmp_path)
    assert (cause.kind, cause.call, cause.hops) == ("ipc", "zmq.recv", 0)
    assert "no call that sent it was recorded" in cause.basis


def test_a_send_that_computes_is_serialisation_where_calls_of_the_system_are_recorded(tmp_path: Path) -> None:
    recorded = gaps("send_context")
    for step in range(STEPS):
        at = step * STEP - 30 * US
        recorded.calls.append(Call(PID, TID, "sendmsg", at, at + 8 * US, "system"))
    cause = first_cause(recorded, tmp_path)
    assert (cause.kind, cause.call) == ("serialisation", "send_context")
    assert "no call of the system" in cause.basis
