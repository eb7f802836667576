"""Samples of this very machine: what the process does shows in them."""

from __future__ import annotations

import itertools
import json
import mmap
import multiprocessing
import os
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from redline.telemetry import Recorder, recording
from redline.telemetry.machine.host import Host, memory_limits, waits_for_cores
from redline.telemetry.machine.samplers import SampleLog, Sampler, read_samples

MIB = 2**20


def burn(done: Any) -> None:
    """Work until told to stop."""
    while not done.is_set():
        sum(range(1000))


@pytest.fixture
def busy_child() -> Iterator[int]:
    """The number of a process that does nothing but compute."""
    context = multiprocessing.get_context("fork")
    done = context.Event()
    child = context.Process(target=burn, args=(done,))
    child.start()
    assert child.pid is not None
    yield child.pid
    done.set()
    child.join()


# ── the host ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_the_process_holds_is_in_the_sample() -> None:
    host = Host()
    before = host()
    held = mmap.mmap(-1, 64 * MIB)  # new pages: a heap may have some to give
    held.write(bytes(64 * MIB))
    files = [open(os.devnull) for _ in range(5)]  # noqa: SIM115
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    after = host()
    stop.set()
    for thread in threads:
        thread.join()
    for file in files:
        file.close()
    assert after["host/rss_bytes"] - before["host/rss_bytes"] > 0.9 * len(held)
    held.close()
    assert after["host/open_files"] - before["host/open_files"] == 5
    assert after["host/threads"] - before["host/threads"] == 3
    assert 0 < after["host/available_bytes"] < after["host/total_bytes"]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS allows no fork without exec")
def test_processor_time_is_that_of_the_process_and_of_its_children(busy_child: int) -> None:
    host, children = Host(), psutil.Process().children(recursive=True)  # other tests may have left some
    used = psutil.Process().cpu_times()
    spent = 0.0
    while psutil.Process(busy_child).cpu_times().user < 0.1 or spent == 0:
        sum(range(10_000))
        spent = psutil.Process().cpu_times().user - used.user
    sample = host()
    assert spent > 0
    assert sample["host/cpu_percent"] > 0
    assert sample["host/processes"] == 1 + len(children)
    assert sample["host/children_cpu_percent"] >= sample[f"process/{busy_child}/cpu_percent"] > 0
    assert sample["host/children_rss_bytes"] >= sample[f"process/{busy_child}/rss_bytes"] > MIB


def test_the_first_sample_has_what_the_machine_did_since_the_beginning_whichever_thread_takes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A sampler makes its sources in one thread and asks them in another."""
    kind = namedtuple("kind", ("user", "system", "idle", "iowait", "guest"))
    looks = [kind(10.0, 2.0, 50.0, 1.0, 4.0), kind(12.5, 2.5, 50.5, 1.5, 6.5), kind(12.5, 2.5, 50.5, 1.5, 6.5)]
    monkeypatch.setattr("psutil.cpu_times", lambda: looks.pop(0))
    host, found = Host(), list[dict[str, float]]()
    for _ in range(2):
        thread = threading.Thread(target=lambda: found.append(host()))
        thread.start()
        thread.join()
    busy = [sample["host/machine_cpu_percent"] for sample in found]
    assert busy == [75.0, 75.0], "3 of 4 seconds; nothing was counted between the two samples"


@pytest.mark.skipif(sys.platform != "linux", reason="macOS allows no fork without exec")
def test_a_child_that_ended_is_no_longer_there() -> None:
    child = multiprocessing.get_context("fork").Process(target=os.getpid)
    child.start()
    host = Host()
    child.join()
    sample = host()
    assert sample["host/processes"] == 1 + len(psutil.Process().children(recursive=True))
    assert not [key for key in sample if key.startswith(f"process/{child.pid}/")]


@pytest.mark.skipif(sys.platform != "linux", reason="macOS counts no bytes for a process")
def test_bytes_written_to_the_disk_are_counted_since_the_last_sample(tmp_path: Path) -> None:
    host = Host()
    before = psutil.Process().io_counters().write_bytes
    with (tmp_path / "file").open("wb") as file:
        file.write(bytes(8 * MIB))
        file.flush()
        os.fsync(file.fileno())
    written = psutil.Process().io_counters().write_bytes - before
    assert (host()["host/disk_written_bytes_per_s"] > 0) == (written > 0)  # a file system in memory writes to no disk
    assert host()["host/disk_written_bytes_per_s"] == 0


def test_what_each_thread_waited_for_a_core_is_read_and_one_that_has_ended_is_left_out(tmp_path: Path) -> None:
    for thread, told in (("17", "5000 42000 3\n"), ("18", "")):
        (tmp_path / thread).mkdir()
        (tmp_path / thread / "schedstat").write_text(told)
    assert waits_for_cores(tmp_path) == {"17": 42000}
    assert waits_for_cores(tmp_path / "nothing") == {}


def test_a_container_has_the_memory_that_its_limit_leaves(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{512 * MIB}\n")
    (tmp_path / "memory.current").write_text(f"{300 * MIB}\n")
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {100 * MIB}\nactive_file 7\n")
    assert memory_limits(tmp_path) == (512 * MIB, 312 * MIB)


@pytest.mark.parametrize("limit", ["max\n", f"{2**62}\n", None])
def test_without_a_limit_it_is_the_machine(tmp_path: Path, limit: str | None) -> None:
    if limit:
        (tmp_path / "memory.max").write_text(limit)
    assert memory_limits(tmp_path).total == psutil.virtual_memory().total


# ── the thread ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Counted:
    """A source that can be waited for."""

    def __init__(self) -> None:
        self.count = 0
        self.closed = False
        self._called = threading.Semaphore(0)

    def __call__(self) -> dict[str, int]:
        self.count += 1
        self._called.release()
        return {"test/count": self.count}

    def wait_for(self, count: int) -> None:
        for _ in range(count):
            assert self._called.acquire(timeout=300)

    def close(self) -> None:
        self.closed = True


def test_samples_are_lines_with_time_and_step_and_the_parts_of_all_sources(tmp_path: Path) -> None:
    source, step = Counted(), 7
    with Sampler(SampleLog(tmp_path / "samples.jsonl"), 0.001, [source, lambda: {"test/other": 1.5}], step=lambda: step):
        source.wait_for(3)
    samples = list(read_samples(tmp_path / "samples.jsonl"))
    assert [sample["test/count"] for sample in samples] == list(range(1, source.count + 1))
    assert all(sample["test/other"] == 1.5 and sample["step"] == 7 for sample in samples)
    assert [s["time"] for s in samples] == sorted(s["time"] for s in samples)
    assert all(sample["telemetry/sample_s"] >= 0 for sample in samples)
    assert source.closed


def test_the_shortest_run_has_a_sample(tmp_path: Path) -> None:
    with Sampler(SampleLog(tmp_path / "samples.jsonl"), 3600, [Host()]):
        pass
    [sample] = read_samples(tmp_path / "samples.jsonl")
    assert sample["host/rss_bytes"] > 0


def test_a_resumed_run_goes_on_in_the_same_file_without_the_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"time": 1.0, "step": 0}\n{"time": 2.0, "st')
    with Sampler(SampleLog(path), 3600, [], step=lambda: 0):
        pass
    assert [sample["step"] for sample in map(json.loads, path.read_bytes().splitlines())] == [0, 0]


def test_a_source_that_fails_is_named_once_and_the_others_go_on(tmp_path: Path) -> None:
    def broken() -> dict[str, float]:
        raise RuntimeError("the cable is out")

    source, notes = Counted(), []
    with Sampler(SampleLog(tmp_path / "samples.jsonl"), 0.001, [broken, source], tell=notes.append):
        source.wait_for(3)
    assert notes == ["broken is sampled no longer: RuntimeError: the cable is out"]
    assert sum("test/count" in sample for sample in read_samples(tmp_path / "samples.jsonl")) == source.count


def test_a_full_disk_ends_the_samples_and_not_the_run(tmp_path: Path) -> None:
    source, notes, full = Counted(), [], os.open("/dev/full", os.O_WRONLY)
    log = SampleLog(tmp_path / "samples.jsonl")
    with Sampler(log, 3600, [source], tell=notes.append):
        os.dup2(full, log._file.fileno())
    os.close(full)
    assert source.count == len(notes) == 1
    assert notes[0].startswith("no more samples are taken: OSError")


def test_the_thread_is_a_lane_that_waits_and_works(tmp_path: Path) -> None:
    recorder, source = Recorder(), Counted()
    began_ns, sampled_ns = time.perf_counter_ns(), list[int]()
    first = lambda: sampled_ns.append(time.perf_counter_ns()) or {}  # type: ignore[func-returns-value]  # noqa: E731
    with recording(recorder), Sampler(SampleLog(tmp_path / "samples.jsonl"), 0.001, [first, source]):
        source.wait_for(2)
    lane = recorder.ledger().lanes["sampler"]
    assert lane.rows.keys() == {"telemetry.sample", "wait.for_next_sample"}
    assert lane.unaccounted_ns < sampled_ns[0] - began_ns, "from the thread's start until it says what its idle time is"


def test_a_long_log_of_samples_covers_the_whole_run_more_coarsely_the_further_back(tmp_path: Path) -> None:
    path, source = tmp_path / "samples.jsonl", Counted()
    for _ in range(2):  # a resumed run goes on counting
        with Sampler(SampleLog(path, 20_000), 0.0002, [source]):
            source.wait_for(source.count + 600)
    counts = [sample["test/count"] for sample in read_samples(path)]
    steps = [after - before for before, after in itertools.pairwise(counts)]
    assert path.stat().st_size < 20_500
    assert counts[0] == 1
    assert counts[-1] == source.count
    assert steps[-20:] == [1] * 20
    assert steps[0] > 4
    assert max(steps) < source.count / 10
    assert list(read_samples(path))[-1]["telemetry/samples_left_out"] == source.count - len(counts)
