"""A run on one host with an engine on another: the same steps as in one process, and a link that fails is a loss with names and
an end, never a hang."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.processes import REDLINE, num_rows, only_run, rows, succeed, write_letters
from support.two_hosts import TwoHosts, two_hosts

from redline.telemetry import RunFolder
from redline.telemetry.machine.hosts import sampled_hosts
from redline.telemetry.processes import read_processes
from redline.wire import make_token

STEPS = 8
SOON_S = 300.0
NOTICED_S = 25.0
"""Seconds within which a link that fails is a loss: 15 without a sign of life, and a busy machine."""
TOKEN = make_token()

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        if made is None:
            pytest.skip("network namespaces are not permitted here")
        yield made


@dataclass
class Both:
    """A run on host a and `redline join` on host b, with what each has written."""

    run: subprocess.Popen[bytes]
    join: subprocess.Popen[bytes]
    cwd: Path

    @property
    def folder(self) -> RunFolder:
        return only_run(self.cwd)

    @property
    def run_said(self) -> str:
        return (self.cwd / "run.txt").read_text()

    @property
    def join_said(self) -> str:
        return (self.cwd / "join.txt").read_text()

    def wait_for(self, holds: Callable[[], bool], within_s: float = SOON_S) -> float:
        """Seconds until something holds."""
        began = time.monotonic()
        while not holds():
            assert time.monotonic() - began < within_s, f"{self.run_said[-3000:]}\n── join:\n{self.join_said[-3000:]}"
            time.sleep(0.02)
        return time.monotonic() - began

    def wait_for_steps(self, count: int) -> None:
        def are_taken() -> bool:
            assert self.run.poll() is None, self.run_said
            return any(self.cwd.glob("runs/*")) and num_rows(self.folder.metrics) >= count

        self.wait_for(are_taken)


def write_recipe(cwd: Path, steps: int = STEPS, max_lag: int = 0) -> None:
    cwd.mkdir(exist_ok=True)
    rollouts = {"groups_per_step": 2, "group_size": 4, "max_new_tokens": 8, "evaluation": {"num_tasks": 4}}
    run = {"steps": steps, "checkpoint_every": 1000, "device": "cpu"}
    write_letters(cwd, run=run, rollouts=rollouts, buffer={"max_lag": max_lag})


@contextmanager
def both(hosts: TwoHosts, cwd: Path, *overrides: str, wait_s: float = SOON_S) -> Iterator[Both]:
    keys = {"placement.engines": "1", "placement.remote_engines": "1", "placement.listen": hosts.address_a}
    keys["telemetry.sample_every_s"] = "0.1"
    keys |= dict(override.split("=", 1) for override in overrides)
    train = ["train", "letters.yaml", *(f"{key}={value}" for key, value in keys.items())]
    join = ["join", f"{hosts.address_a}:29600", "--threads", "1", "--wait", f"{wait_s:g}"]
    with ExitStack() as processes:
        run = processes.enter_context(ended(on(hosts.a, train, cwd, "run.txt", "host-a")))
        while "waits for a machine" not in (said := (cwd / "run.txt").read_text()):  # `wait_s` is not for its start
            assert run.poll() is None, said
            time.sleep(0.05)
        yield Both(run, processes.enter_context(ended(on(hosts.b, join, cwd, "join.txt", "host-b"))), cwd)


@contextmanager
def ended(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """Kill a process when the block ends."""
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def on(
    host: str, arguments: list[str], cwd: Path, said: str, name: str, program: tuple[str, ...] = (REDLINE,)
) -> subprocess.Popen[bytes]:
    """Start a program on a host, which its samples call `name`."""
    env = os.environ | {"NO_COLOR": "1", "REDLINE_TOKEN": TOKEN, "REDLINE_HOST": name}
    with (cwd / said).open("wb") as file:
        command = ["ip", "netns", "exec", host, *program, *arguments]
        return subprocess.Popen(command, cwd=cwd, env=env, stdout=file, stderr=file)


def losses(folder: RunFolder) -> list[tuple[int, float, float]]:
    return [(row["step"], row["trainer/loss"], row["rollouts/reward_mean"]) for row in rows(folder.metrics)]


def test_an_engine_on_another_host_takes_the_same_steps_and_its_time_is_in_the_ledger(hosts: TwoHosts, tmp_path: Path) -> None:
    write_recipe(tmp_path / "one")
    succeed("train", "letters.yaml", cwd=tmp_path / "one")
    write_recipe(tmp_path / "two")
    with both(hosts, tmp_path / "two") as pair:
        assert pair.run.wait(SOON_S) == 0, pair.run_said
        assert pair.join.wait(SOON_S) == 0, pair.join_said
        assert "the run is over" in pair.join_said
    assert losses(pair.folder) == losses(only_run(tmp_path / "one"))
    assert "weights by broadcast" in pair.run_said
    assert any(lane.startswith("engine-1-") for lane in lanes(pair.folder)), lanes(pair.folder)
    assert TOKEN not in pair.run_said + pair.join_said
    assert_sampled(pair.folder, "host-a", {"host-b": "engine 1"})


def assert_sampled(folder: RunFolder, home: str, elsewhere: dict[str, str]) -> None:
    """Each machine has samples of its own, taken by this process."""
    assert {row["host"] for row in rows(folder.samples)} == {home}
    files = sampled_hosts(folder.samples_elsewhere)
    assert files.keys() == elsewhere.keys()
    for host, process in elsewhere.items():
        found = rows(files[host])
        assert {(row["host"], row["process"]) for row in found} == {(host, process)}
        assert all(row["host/total_bytes"] > 0 for row in found)
        assert [row["time"] for row in found] == sorted(row["time"] for row in found)


def test_ranks_on_two_hosts_sample_both_and_a_host_that_is_killed_has_what_it_sent(hosts: TwoHosts, tmp_path: Path) -> None:
    write_recipe(tmp_path, steps=10_000)
    with both_ranks(hosts, tmp_path) as pair:
        pair.wait_for_steps(2)
        pair.wait_for(lambda: "host-b" in sampled_hosts(pair.folder.samples_elsewhere))
        with hosts.failing("drop"):
            assert pair.run.wait(SOON_S) != 0
        assert pair.join.wait(SOON_S) != 0
    assert_sampled(pair.folder, "host-a", {"host-b": "rank 1"})


def test_a_rank_that_does_not_see_the_run_folder_is_in_trace_and_ledger(hosts: TwoHosts, tmp_path: Path) -> None:
    """Its disk has a folder of the same name, of another run, which stays as it was."""
    write_recipe(tmp_path)
    other = tmp_path / "other" / "letters-001"
    other.mkdir(parents=True)
    (other / "environment.json").write_text("{}")
    (tmp_path / "runs").mkdir()
    own_disk = ("unshare", "--mount", "sh", "-c", 'mount --bind other runs && exec "$@"', "sh")
    with both_ranks(hosts, tmp_path, on_b=own_disk) as pair:
        assert pair.run.wait(SOON_S) == 0, pair.run_said
        assert pair.join.wait(SOON_S) == 0, pair.join_said
    assert [path.name for path in other.iterdir()] == ["environment.json"]
    ledger = json.loads(pair.folder.ledger.read_text())["lanes"]
    (rank_1,) = (lane for name, lane in ledger.items() if re.fullmatch(r"rank-1-\d+/main", name))
    assert {"trainer.forward", "trainer.backward", "wait.for_rank_0"} <= rank_1["rows"].keys()
    (process,) = (each for each in read_processes(pair.folder.spans) if each.name == "rank-1")
    assert process.ledger is not None
    assert process.clock.how == "shortest of several round trips"
    steps = {span.args["version"] for span in process.spans if span.name == "trainer.other"}
    assert len(steps) == STEPS


@contextmanager
def both_ranks(hosts: TwoHosts, cwd: Path, on_b: tuple[str, ...] = ()) -> Iterator[Both]:
    """A run of two ranks, rank 1 on host b, where the words `on_b` come before its command."""
    python = ("env", "GLOO_SOCKET_IFNAME=eth0", sys.executable, "-m", "torch.distributed.run")
    meet = ("--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "0")
    meet += ("--master-addr", hosts.address_a, "--master-port", "29650")
    train = ["-m", "redline", "train", "letters.yaml", "telemetry.sample_every_s=0.1", "trainer.rank_timeout_s=10"]
    with ExitStack() as processes:
        a = on(hosts.a, ["--node-rank", "0", *train], cwd, "run.txt", "host-a", (*python, *meet))
        processes.enter_context(ended(a))
        b = on(hosts.b, ["--node-rank", "1", *train], cwd, "join.txt", "host-b", (*on_b, *python, *meet))
        yield Both(a, processes.enter_context(ended(b)), cwd)


def lanes(folder: RunFolder) -> list[str]:
    return list(json.loads(folder.ledger.read_text())["lanes"])


@pytest.mark.parametrize("how", ["cut", "drop"])
def test_a_link_that_fails_is_a_loss_with_names_and_once_it_is_back_the_engine_has_work_again(
    how: str, hosts: TwoHosts, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recipe(tmp_path, steps=10_000)
    with both(hosts, tmp_path) as pair:
        pair.wait_for_steps(2)
        with hosts.failing(how):
            noticed_s = pair.wait_for(lambda: "is lost: " in pair.run_said, NOTICED_S)
            there_s = pair.wait_for(lambda: "joining again" in pair.join_said, NOTICED_S)
        back_s = pair.wait_for(lambda: "is back after" in pair.run_said)
        done = num_rows(pair.folder.metrics)
        pair.wait_for(lambda: num_rows(pair.folder.metrics) > done + 2)
        assert pair.run.poll() is None
    lost = re.search(r"engine 1 at (\S+) is lost: .*", pair.run_said)
    assert lost is not None, pair.run_said
    assert lost[1] == hosts.address_b
    assert "no sign of life for 15 s; it had not answered" in lost[0]
    versions = [row["weight_sync/version"] for row in rows(pair.folder.metrics) if "weight_sync/version" in row]
    assert versions == sorted(versions)
    with capsys.disabled():
        print(f"\n{how}: noticed after {noticed_s:.1f} s here, {there_s:.1f} s there; back {back_s:.1f} s after the link")


def test_while_the_link_is_down_the_other_engines_get_the_requests(hosts: TwoHosts, tmp_path: Path) -> None:
    write_recipe(tmp_path, steps=10_000)
    with both(hosts, tmp_path, "placement.engines=2") as pair:
        pair.wait_for_steps(2)
        with hosts.failing("drop"):
            pair.wait_for(lambda: "is lost: " in pair.run_said, NOTICED_S)
            done = num_rows(pair.folder.metrics)
            pair.wait_for(lambda: num_rows(pair.folder.metrics) > done + 3)


def test_where_no_engine_comes_back_the_run_ends_with_the_reason_and_a_checkpoint_that_goes_on(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    write_recipe(tmp_path, steps=10_000)
    short = ("placement.join_timeout_s=60", "placement.max_restarts=1")  # in which the other side has to import torch
    with both(hosts, tmp_path, *short, wait_s=20) as pair:
        pair.wait_for_steps(2)
        with hosts.failing("drop"):
            began = time.monotonic()
            assert pair.run.wait(SOON_S) == 2
            assert time.monotonic() - began < NOTICED_S + 60 + 50
            assert pair.join.wait(SOON_S) == 2
    assert f"no machine has joined at {hosts.address_a}:29600 within 60 s; it was started again 1 times" in pair.run_said
    assert "Traceback" not in pair.run_said + pair.join_said
    assert "tried for 20 s" in pair.join_said
    trained = rows(pair.folder.metrics)[-1]["step"]
    assert [path.name for path in pair.folder.checkpoints.iterdir()] == [f"step-{trained:06d}"]
    here = ["placement.engines=0", "placement.remote_engines=0", f"run.steps={trained + 1}"]
    succeed("train", str(pair.folder.path), "--resume", *here, cwd=tmp_path)
    assert rows(pair.folder.metrics)[-1]["step"] == trained + 1


def test_a_run_that_is_killed_ends_its_engine_there_and_the_machine_waits_for_the_next(hosts: TwoHosts, tmp_path: Path) -> None:
    write_recipe(tmp_path, steps=10_000)
    with both(hosts, tmp_path) as pair:
        pair.wait_for_steps(2)
        pair.run.kill()
        pair.wait_for(lambda: "joining again" in pair.join_said, NOTICED_S)
        again = on(hosts.a, ["train", str(pair.folder.path), "--resume"], tmp_path, "again.txt", "host-a")
        try:
            done = num_rows(pair.folder.metrics)
            pair.wait_for(lambda: num_rows(pair.folder.metrics) > done + 1)
        finally:
            again.kill()
            again.wait()
