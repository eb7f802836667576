"""Machines beside rank 0's: one process of each samples it, and what it sends is in the run folder at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.eventually import eventually

from redline.telemetry.machine import hosts
from redline.telemetry.machine.host import Host, host_name, machine_id
from redline.telemetry.machine.hosts import HostSamples, HostSampling, Roll, sampled_hosts, sampling_host
from redline.telemetry.machine.samplers import read_samples

SOON_S = 60.0
SAMPLE = {"time": 1.0, "host": "node-7", "host/cpu_percent": 3.0}


@pytest.fixture
def sampling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HostSampling:
    """Of a run elsewhere. Locks are in a folder of the test's own."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return HostSampling(0.01, "/runs/demo-001", "far-12345678")


class Sent:
    """What was sent to rank 0."""

    def __init__(self) -> None:
        self.samples: list[tuple[str, Mapping[str, Any]]] = []
        self._came = threading.Semaphore(0)

    def __call__(self, machine: str, sample: Mapping[str, Any]) -> None:
        self.samples.append((machine, sample))
        self._came.release()

    def wait_for_one(self) -> None:
        assert self._came.acquire(timeout=SOON_S)


# ── on the other machines ──────────────────────────────────────────────────────────────────────────────────────────────


def test_a_process_on_another_machine_sends_samples_that_name_its_host_and_itself(sampling: HostSampling) -> None:
    sent = Sent()
    with sampling_host(sampling, "engine 1", sent):
        sent.wait_for_one()
    machine, sample = sent.samples[0]
    assert machine == machine_id()
    assert sample["host"] == host_name()
    assert sample["process"] == "engine 1"
    assert sample["host/machine_cpu_percent"] >= 0
    assert "step" not in sample, "it does not know"


def test_processes_on_rank_0s_machine_leave_the_samples_to_rank_0(sampling: HostSampling, tmp_path: Path) -> None:
    sent = Sent()
    with (
        sampling_host(HostSampling(0.001, sampling.run, machine_id()), "engine 1", sent),
        sampling_host(None, "engine 2", sent),
    ):
        assert not [thread for thread in threading.enumerate() if thread.name in ("sampler", "host sampler")]
    assert not sent.samples
    assert not list(tmp_path.iterdir())


def test_one_process_of_a_machine_samples_however_many_there_are(sampling: HostSampling, tmp_path: Path) -> None:
    first, second = Sent(), Sent()
    with sampling_host(sampling, "rank 1", first, look_s=0.01):
        first.wait_for_one()
        with sampling_host(sampling, "rank 2", second, look_s=0.01), sampling_host(sampling, "rank 3", second, look_s=0.01):
            for _ in range(5):
                first.wait_for_one()
            assert not second.samples
    eventually(lambda: not list(tmp_path.iterdir()), "something is left behind")


HOLDER = """
import sys, time
from redline.telemetry.machine.hosts import HostSampling, machine_id, sampling_host
sampling = HostSampling(0.01, "/runs/demo-001", sys.argv[1])
with sampling_host(sampling, "rank 1", lambda *sample: print("sampled", flush=True)):
    if sampling.home == machine_id():
        print("written down", flush=True)
    time.sleep(600)
"""


@contextmanager
def another_process(folder: Path, home: str = "far-12345678") -> Iterator[subprocess.Popen[str]]:
    env = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen([sys.executable, "-c", HOLDER, home], env=env, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_where_the_process_that_samples_is_killed_another_goes_on(sampling: HostSampling, tmp_path: Path) -> None:
    sent = Sent()
    with another_process(tmp_path) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        with sampling_host(sampling, "rank 2", sent, look_s=0.01):
            with Roll(sampling) as roll:
                assert [process.pid for process in roll.others()] == [holder.pid]
            assert not sent.samples
            holder.send_signal(signal.SIGKILL)
            holder.wait()
            sent.wait_for_one()


def test_the_runs_other_processes_on_a_machine_are_no_neighbours(sampling: HostSampling, tmp_path: Path) -> None:
    with another_process(tmp_path) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with Roll(sampling) as roll:
            sample = Host(roll.others)()
            assert sample[f"process/{other.pid}/rss_bytes"] > 0
            assert sample["host/children_rss_bytes"] >= sample[f"process/{other.pid}/rss_bytes"]


def test_processes_on_rank_0s_machine_are_no_neighbours_whoever_started_them(sampling: HostSampling, tmp_path: Path) -> None:
    home = HostSampling(0.01, sampling.run, machine_id())
    with another_process(tmp_path, home=machine_id()) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        assert [process.pid for process in Roll(home).others()] == [rank.pid]


def test_a_process_that_was_killed_is_struck_off_and_so_is_one_whose_id_another_has(sampling: HostSampling) -> None:
    with Roll(sampling) as roll:
        folder = roll._folder
        with subprocess.Popen([sys.executable, "-c", ""]) as gone:
            gone.wait()
        (folder / str(gone.pid)).write_text("1.0")
        (folder / str(os.getppid())).write_text(str(psutil.Process(os.getppid()).create_time() - 1000))
        assert roll.others() == []
        assert [path.name for path in folder.iterdir()] == [str(os.getpid())]


def test_a_connection_that_fails_ends_the_samples_and_is_said_once(sampling: HostSampling) -> None:
    said: list[str] = []

    def broken(machine: str, sample: Mapping[str, Any]) -> None:
        raise RuntimeError("the store is gone")

    with sampling_host(sampling, "rank 1", broken, said.append):
        eventually(lambda: bool(said))
    assert said == ["no more samples are taken: RuntimeError: the store is gone"]


def test_a_connection_that_hangs_does_not_keep_a_process_from_ending(
    sampling: HostSampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts, "CLOSE_S", 0.01)
    began, go_on = threading.Event(), threading.Event()

    def hangs(machine: str, sample: Mapping[str, Any]) -> None:
        began.set()
        assert go_on.wait(SOON_S)

    with sampling_host(sampling, "rank 1", hangs):
        assert began.wait(SOON_S)
    assert not go_on.is_set(), "the block has ended, and the thread has not"
    go_on.set()


def test_a_machine_may_be_called_otherwise_and_its_id_can_name_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REDLINE_HOST", "rack 3/node.7")
    assert host_name() == "rack 3/node.7"
    assert machine_id().startswith("rack_3_node_7")
    assert "/" not in machine_id()


# ── in rank 0 ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_each_machine_has_a_file_and_a_sample_is_in_it_at_once(sampling: HostSampling, tmp_path: Path) -> None:
    folder = tmp_path / "samples"
    with HostSamples(folder, sampling, pytest.fail) as taken:
        taken.take("node-7-3f0c61d2", SAMPLE)
        taken.take("node-8-00000001", {**SAMPLE, "host": "node-8"})
        taken.take("node-7-3f0c61d2", {**SAMPLE, "time": 2.0})
        assert [row["time"] for row in read_samples(folder / "node-7-3f0c61d2.jsonl")] == [1.0, 2.0]
    assert sampled_hosts(folder) == {
        "node-7": folder / "node-7-3f0c61d2.jsonl",
        "node-8": folder / "node-8-00000001.jsonl",
    }


def test_a_resumed_run_goes_on_in_the_same_file(sampling: HostSampling, tmp_path: Path) -> None:
    path = tmp_path / "samples" / "node-7.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps(SAMPLE) + "\n" + '{"time": 2.0, "ho')
    with HostSamples(path.parent, sampling, pytest.fail) as taken:
        taken.take("node-7", {**SAMPLE, "time": 3.0})
    assert [row["time"] for row in read_samples(path)] == [1.0, 3.0]


def test_two_machines_of_one_name_are_told_apart(sampling: HostSampling, tmp_path: Path) -> None:
    with HostSamples(tmp_path / "samples", sampling, pytest.fail) as taken:
        for machine in ("node-7-aaaaaaaa", "node-7-bbbbbbbb"):
            taken.take(machine, SAMPLE)
    assert list(sampled_hosts(tmp_path / "samples")) == ["node-7-aaaaaaaa", "node-7-bbbbbbbb"]


def test_before_and_after_its_block_nothing_is_written(sampling: HostSampling, tmp_path: Path) -> None:
    taken = HostSamples(tmp_path / "samples", sampling, pytest.fail)
    taken.take("node-7", SAMPLE)
    with taken:
        assert not taken.wait_until_closed(0.0)
    taken.take("node-7", SAMPLE)
    assert taken.wait_until_closed(0.0)
    assert not (tmp_path / "samples").exists()


@pytest.mark.parametrize(
    ("machine", "sample"), [("../x", SAMPLE), ("", SAMPLE), ("node-7", {"host": "node-7"}), ("node-7", {"time": 1.0})]
)
def test_what_is_no_sample_is_refused(sampling: HostSampling, tmp_path: Path, machine: str, sample: dict[str, Any]) -> None:
    with HostSamples(tmp_path / "samples", sampling, pytest.fail) as taken, pytest.raises(ValueError, match="no sample"):
        taken.take(machine, sample)


def test_a_disk_that_takes_no_more_is_said_once_and_ends_nothing(sampling: HostSampling, tmp_path: Path) -> None:
    said: list[str] = []
    (tmp_path / "samples").write_text("a file where the folder should be")
    with HostSamples(tmp_path / "samples", sampling, said.append) as taken:
        taken.take("node-7", SAMPLE)
        taken.take("node-7", SAMPLE)
    assert len(said) == 1
    assert said[0].startswith("no more samples of other machines are written: ")
