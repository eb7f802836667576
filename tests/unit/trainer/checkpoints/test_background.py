"""Checkpoints written behind the training, by real threads, to a real disk, in processes that are really killed."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from support.eventually import eventually
from support.fakes import FakeTrainer
from support.policy_training import make_trainer, recipe
from support.small_models import CONFIGS, write_model
from support.watched_stages import FakeStages

from redline.config import validate
from redline.errors import RunFolderError
from redline.telemetry import Progress, Recorder, RunFolder
from redline.trainer.checkpoints.background import CheckpointWriter
from redline.trainer.checkpoints.folder import load_checkpoint
from redline.trainer.parallel.checkpoint_parts import RankCheckpoint
from redline.trainer.parallel.pulse import Pulse
from redline.watch.checkpoints import checkpoints
from redline.watch.outputs import Outputs
from redline.watch.run_watch import RunWatch


@pytest.fixture
def writer() -> Iterator[CheckpointWriter]:
    made = CheckpointWriter()
    yield made
    made.close()


def state(value: float, size: int = 1000) -> dict[str, torch.Tensor]:
    return {"master/a": torch.full((size, 3), value), "exp_avg_sq/a": torch.full((7,), int(value), dtype=torch.uint8)}


def test_what_is_written_is_the_state_at_the_time_of_saving(writer: CheckpointWriter, tmp_path: Path) -> None:
    live = state(1.0, size=300_000)
    writer.save(tmp_path / "step-000001", 1, live, {"next_task": 5})
    for tensor in live.values():
        tensor.add_(1)  # the next step, while the thread is still writing
    writer.flush()
    found = load_checkpoint(tmp_path / "step-000001")
    assert (found.version, found.data) == (1, {"next_task": 5})
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in state(1.0, size=300_000).items())


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that flushes nothing of other threads until the event is set."""
    ready, flush = threading.Event(), os.fsync

    def fsync(descriptor: int) -> None:
        if threading.current_thread() is not threading.main_thread():  # which flushes its rows, and is not what is slow here
            assert ready.wait(300)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    yield ready
    ready.set()


def test_saving_returns_before_the_disk_has_it(writer: CheckpointWriter, disk: threading.Event, tmp_path: Path) -> None:
    writer.save(tmp_path / "step-000001", 1, state(1.0))
    assert not (tmp_path / "step-000001").exists()
    disk.set()
    writer.flush()
    assert load_checkpoint(tmp_path / "step-000001").version == 1


def test_a_trainer_that_is_closed_has_written_its_checkpoint_and_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    write_model(tmp_path / "model", CONFIGS["llama, tied"])
    trainer = make_trainer(tmp_path / "model", recipe())
    trainer.save(tmp_path / "step-000001")
    trainer.close()
    assert load_checkpoint(tmp_path / "step-000001").version == 0
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("checkpoints")]
    assert not left, "each call of redline.train in a process would leave one"


def test_a_second_checkpoint_waits_for_the_first(writer: CheckpointWriter, disk: threading.Event, tmp_path: Path) -> None:
    writer.save(tmp_path / "step-000001", 1, state(1.0))
    second = threading.Thread(target=writer.save, args=(tmp_path / "step-000002", 2, state(2.0)))
    second.start()
    second.join(0.1)
    assert second.is_alive(), "it was taken while the first was being written"
    disk.set()
    second.join()
    writer.flush()
    for version in (1, 2):
        found = load_checkpoint(tmp_path / f"step-{version:06d}")
        assert torch.equal(found.tensors["master/a"], state(float(version))["master/a"])


def test_a_write_that_failed_is_raised_by_the_next_call_and_leaves_nothing(writer: CheckpointWriter, tmp_path: Path) -> None:
    parent = tmp_path / "checkpoints"
    parent.write_text("a file where a folder should be")
    writer.save(parent / "step-000001", 1, state(1.0))
    with pytest.raises(RunFolderError, match="step-000001: the checkpoint could not be written") as caught:
        writer.save(parent / "step-000002", 2, state(2.0))
    assert "room on the disk" in caught.value.hint
    parent.unlink()
    writer.save(parent / "step-000003", 3, state(3.0))
    writer.flush()
    assert [path.name for path in parent.iterdir()] == ["step-000003"]


def test_where_host_memory_runs_out_the_error_says_so(
    writer: CheckpointWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(descriptor: int) -> None:
        raise MemoryError

    monkeypatch.setattr(os, "fsync", no_room)
    writer.save(tmp_path / "step-000001", 1, state(1.0))
    with pytest.raises(RunFolderError, match="the checkpoint could not be written: MemoryError") as caught:
        writer.flush()
    assert "make room in host memory" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def rank_writer(store: dist.Store, rank: int, agreed: list[float]) -> CheckpointWriter:
    """That of one of two ranks, which hear in turn what all of them have agreed on."""
    answers = iter(agreed)
    whole = RankCheckpoint(store, Pulse(store, rank, 2), rank, 2, rank, lambda values: torch.tensor([next(answers)]))
    return CheckpointWriter(whole)


def test_a_part_that_fails_with_whatever_error_is_told_to_the_rank_that_waits_for_it(tmp_path: Path) -> None:
    store, folder = dist.HashStore(), tmp_path / "step-000001"
    first, second = (rank_writer(store, rank, [1.0, -1.0]) for rank in (0, 1))
    first.save(folder, 1, state(1.0))
    second.save(folder, 1, {"master/a": torch.zeros(2, dtype=torch.complex128)})  # which no file of tensors can hold
    with ThreadPoolExecutor(1) as flushing:
        told = flushing.submit(first.flush).exception(timeout=60)
    assert isinstance(told, RunFolderError)
    assert "rank 1 of the trainer could not write its part of the checkpoint" in told.message
    assert "complex128" in told.message
    with pytest.raises(Exception, match="complex128") as caught:
        second.flush()
    assert not isinstance(caught.value, RunFolderError), "a fault of ours keeps its traceback"
    assert not folder.exists()


def test_saving_a_step_twice_writes_it_once(writer: CheckpointWriter, tmp_path: Path) -> None:
    writer.save(tmp_path / "step-000001", 1, state(1.0))
    writer.save(tmp_path / "step-000001", 1, state(9.0))
    writer.flush()
    assert float(load_checkpoint(tmp_path / "step-000001").tensors["master/a"][0, 0]) == 1.0


def test_the_host_copy_is_kept_for_the_next_time(writer: CheckpointWriter, tmp_path: Path) -> None:
    addresses = []
    for version in (1, 2):
        writer.save(tmp_path / f"{version}", version, state(float(version)))
        addresses.append([tensor.data_ptr() for tensor in writer._host.values()])
    assert addresses[0] == addresses[1]


# ── the run folder ─────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class SavingTrainer(FakeTrainer):
    writer: CheckpointWriter = field(default_factory=CheckpointWriter)

    def save(self, folder: Path) -> None:
        self.writer.save(folder, self.version, state(float(self.version)))

    def flush(self) -> None:
        self.writer.flush()


def test_the_checkpoint_before_is_kept_until_the_new_one_is_on_the_disk(disk: threading.Event, tmp_path: Path) -> None:
    recipe = {
        "model": {"path": "builtin:tiny"},
        "rollouts": {"task": {"kind": "import", "path": "tests:Fake"}},
        "run": {"keep_checkpoints": 1},
    }
    trainer, folder = SavingTrainer([]), RunFolder.create(tmp_path, "run")
    progress = Progress(10, console=Console(file=io.StringIO()))
    watch = RunWatch(validate(recipe), Outputs(folder, Recorder(), progress), FakeStages(trainer))
    disk.set()
    trainer.version = 5
    watch.checkpoint()
    trainer.writer.flush()
    disk.clear()
    trainer.version = 10
    watch.checkpoint()
    assert [path.name for path in checkpoints(folder)] == ["step-000005"]
    disk.set()
    watch.close()
    assert [path.name for path in folder.checkpoints.iterdir()] == ["step-000010"]


# ── processes ──────────────────────────────────────────────────────────────────────────────────────────────────────────

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from redline.trainer.checkpoints.background import CheckpointWriter
folder, size = Path(sys.argv[1]), int(sys.argv[2])
writer = CheckpointWriter()
writer.save(folder / "step-000001", 1, {"a": torch.full((size,), 1.0)})
writer.flush()
if sys.argv[3] == "wait":
    os.fsync = lambda descriptor: time.sleep(900)  # a disk that never has it
writer.save(folder / "step-000002", 2, {"a": torch.full((size,), 2.0)})
print("taken", flush=True)
if sys.argv[3] == "raise":
    raise SystemExit("an error right after")
sys.stdin.read()
"""


def saving_process(folder: Path, size: int, ending: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", SCRIPT, str(folder), str(size), ending]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_killed_in_the_middle_of_a_write_the_checkpoint_before_is_whole(tmp_path: Path) -> None:
    half_written = tmp_path / ".step-000002.partial" / "trainer.safetensors"
    with saving_process(tmp_path, 1_000_000, "wait") as process:
        eventually(lambda: process.poll() is not None or (half_written.exists() and half_written.stat().st_size))
        process.send_signal(signal.SIGKILL)
        assert process.wait(300) == -signal.SIGKILL
    assert half_written.exists()
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-000001"]
    found = load_checkpoint(tmp_path / "step-000001")
    assert torch.equal(found.tensors["a"], torch.full((1_000_000,), 1.0))
    shutil.rmtree(half_written.parent)


@pytest.mark.slow
def test_a_process_that_ends_with_an_error_finishes_its_write(tmp_path: Path) -> None:
    with saving_process(tmp_path, 2_000_000, "raise") as process:
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "an error right after" in stderr
    assert torch.equal(load_checkpoint(tmp_path / "step-000002").tensors["a"], torch.full((2_000_000,), 2.0))
