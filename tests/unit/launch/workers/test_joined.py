"""Machines that join a run: what each side says, and what becomes of it when the other is gone. Both sides are here, with
processes that only pretend to be engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import redline
from redline.config import EngineRecipe
from redline.errors import ConfigError, EngineLostError, WireError
from redline.launch.workers import join as join_side
from redline.launch.workers import machines
from redline.launch.workers.join import Hold, Visit
from redline.launch.workers.joined import JoinedEngines
from redline.launch.workers.machines import ROLE
from redline.launch.workers.span_copies import SpanCopies, SpanSource
from redline.launch.workers.spawn import EngineSpec
from redline.telemetry.processes import ClockOffset, read_processes
from redline.wire import connect, make_token

TOKEN = make_token()
SOON_S = 300
RECIPE = EngineRecipe.model_validate({"model": {"path": "builtin:tiny"}}).model_dump(mode="json")
SPEC = EngineSpec(RECIPE, name="engine 2", remote=True)


class FakeProcess:
    """Stands for the process of an engine."""

    pid = 4711

    def __init__(self, spec: EngineSpec, token: str) -> None:
        self.spec, self.token, self.address = spec, token, f"{spec.host}:4711"
        self.why = ""

    def is_alive(self) -> bool:
        return not self.why

    def kill(self) -> None:
        self.why = self.why or "was ended by SIGKILL"

    def why_ended(self) -> str:
        return self.why


class FakeProcesses:
    """Starts fakes, or does not."""

    def __init__(self) -> None:
        self.started: list[FakeProcess] = []
        self.refuses = ""

    def spawn(self, spec: EngineSpec, token: str | None = None) -> FakeProcess:
        if self.refuses:
            raise EngineLostError(self.refuses)
        assert token == TOKEN
        self.started.append(FakeProcess(spec, token))
        return self.started[-1]

    def close(self) -> None: ...


class FakeMachine:
    """A machine that has joined, in a thread."""

    def __init__(self, run: JoinedEngines, folder: Path, hold: Hold | None = None) -> None:
        self.processes = FakeProcesses()
        self.connection = connect(run.address, TOKEN, ROLE, SOON_S)
        self.said: list[str] = []
        self.folder = folder
        self.visit = Visit(self.connection, TOKEN, hold or Hold(), folder, self.said.append, self.processes)
        self._pool = ThreadPoolExecutor(1)
        self.serving = self._pool.submit(self.visit.serve)

    def leave(self) -> None:
        self.visit.close()
        self.connection.close()
        self._pool.shutdown(wait=False)


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def run(tmp_path: Path, told: list[str]) -> Iterator[JoinedEngines]:
    joined = JoinedEngines(("127.0.0.1", 0), TOKEN, SOON_S, tmp_path / "spans", told.append)
    yield joined
    joined.close()


@pytest.fixture
def machine(run: JoinedEngines, tmp_path: Path) -> Iterator[FakeMachine]:
    made = FakeMachine(run, tmp_path / "there", Hold(model="/data/model", num_threads=3))
    made.folder.mkdir()
    yield made
    made.leave()


def test_a_machine_starts_what_the_run_asks_for_with_its_own_model_address_and_cores(
    run: JoinedEngines, machine: FakeMachine, told: list[str]
) -> None:
    engine = run.spawn(SPEC)
    assert (engine.address, engine.token, engine.is_alive(), engine.why_ended()) == ("127.0.0.1:4711", TOKEN, True, "")
    [process] = machine.processes.started
    assert process.spec.recipe["model"]["path"] == "/data/model"
    assert (process.spec.num_threads, process.spec.host, process.spec.name) == (3, "127.0.0.1", "engine 2")
    assert any("has joined" in line for line in told)


def test_an_engine_that_ends_there_is_known_here_with_its_words_and_the_machine_is_free_again(
    run: JoinedEngines, machine: FakeMachine
) -> None:
    engine = run.spawn(SPEC)
    machine.processes.started[0].why = "its process 4711 was ended by SIGSEGV\nlast words"
    soon(lambda: not engine.is_alive())
    assert "was ended by SIGSEGV\nlast words" in engine.why_ended()
    again = run.spawn(SPEC)
    assert again.is_alive()
    again.kill()
    assert not again.is_alive()
    assert "SIGKILL" in again.why_ended()
    assert run.spawn(SPEC).is_alive()
    assert len(machine.processes.started) == 3


def test_an_engine_that_does_not_start_is_told_with_the_machine(run: JoinedEngines, machine: FakeMachine) -> None:
    machine.processes.refuses = "/data/model: there is no such folder"
    with pytest.raises(EngineLostError, match=r"engine 2 did not start on .* \(127.0.0.1\): /data/model: there is no") as lost:
        run.spawn(SPEC)
    assert "--model" in lost.value.hint
    machine.processes.refuses = ""
    assert run.spawn(SPEC).is_alive()


def test_a_machine_that_cannot_start_anything_says_why_at_once(
    run: JoinedEngines, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(spec: EngineSpec, token: str | None = None) -> FakeProcess:
        raise OSError("no room for a process")

    monkeypatch.setattr(machine.processes, "spawn", fail)
    with pytest.raises(EngineLostError, match="OSError: no room for a process"):
        run.spawn(SPEC)


@pytest.mark.parametrize("device", ["cuda:3", "cuda"])
def test_a_gpu_that_a_machine_does_not_have_is_told_to_the_run(
    device: str, run: JoinedEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    machine = FakeMachine(run, tmp_path, Hold(device=device))
    with pytest.raises(EngineLostError, match=f"--device {device}: redline sees no GPU here"):
        run.spawn(SPEC)
    assert machine.processes.started == []
    machine.leave()


@pytest.mark.parametrize(
    ("device", "said"), [("cuda:2", "redline sees 2 GPUs here"), ("cuda:x", "no such device"), ("tpu", "no such device")]
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_joined(
    device: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match=f"--device {device}: .*{said}"):
        join_side.check_device(device)
    join_side.check_device("cuda:1")


def test_an_index_beyond_the_visible_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert EngineSpec(RECIPE, device="cuda:1").environment(TOKEN)["CUDA_VISIBLE_DEVICES"] == "6"
    with pytest.raises(ConfigError, match="cuda:2: CUDA_VISIBLE_DEVICES = 4,6 shows 2"):
        EngineSpec(RECIPE, device="cuda:2").environment(TOKEN)


def test_a_run_that_nobody_joins_says_what_to_start_and_gives_up_in_time(tmp_path: Path, told: list[str]) -> None:
    joined = JoinedEngines(("127.0.0.1", 0), TOKEN, 0.3, None, told.append)
    with pytest.raises(EngineLostError, match=f"engine 2: no machine has joined at {joined.address} within 0.3 s") as lost:
        joined.spawn(SPEC)
    assert f"redline join {joined.address}" in lost.value.hint
    assert told == [f"engine 2 waits for a machine: start `redline join {joined.address}` there"]
    joined.close()


def test_a_start_that_is_no_longer_wanted_waits_for_nobody(run: JoinedEngines) -> None:
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(run.spawn, SPEC)
        time.sleep(0.05)
        run.stop_starting()
        with pytest.raises(EngineLostError, match="no longer needed"):
            starting.result(SOON_S)


def test_a_machine_that_stands_by_takes_the_place_of_one_that_has_left(
    run: JoinedEngines, machine: FakeMachine, tmp_path: Path
) -> None:
    engine = run.spawn(SPEC)
    spare = FakeMachine(run, tmp_path)
    soon(lambda: len(run._machines) == 2)
    machine.leave()
    soon(lambda: not engine.is_alive())
    assert "ended the connection" in engine.why_ended()
    assert run.spawn(SPEC).is_alive()
    assert len(spare.processes.started) == 1
    spare.leave()


def test_a_machine_that_says_nothing_is_taken_for_gone(
    run: JoinedEngines, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = run.spawn(SPEC)
    monkeypatch.setattr(machines, "SILENCE_S", 0.2)
    monkeypatch.setattr(machine.visit, "_connection", Mute())
    machine.connection.send("pulse")
    soon(lambda: not engine.is_alive())
    assert "sent no sign of life for 0.2 s" in engine.why_ended()


class Mute:
    """A connection over which nothing comes."""

    def send(self, *frame: object, **rest: object) -> None: ...


def test_a_machine_that_hears_nothing_ends_its_engine_and_joins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    begun: list[FakeProcesses] = []

    def processes() -> FakeProcesses:
        begun.append(FakeProcesses())
        return begun[-1]

    monkeypatch.setattr(join_side, "LocalProcesses", processes)
    first = JoinedEngines(("127.0.0.1", 0), TOKEN, SOON_S, None, lambda text: None)
    host, port = first.address.split(":")
    joining = threading.Thread(target=join_side.join, args=(first.address, TOKEN, Hold(), 300.0, told.append))
    joining.start()
    first.spawn(SPEC)
    first._listener.close()
    with first._changed:  # a run that is stopped: its connections stay, and nothing comes
        [machine] = first._machines
        first._machines.clear()
    monkeypatch.setattr(join_side, "SILENCE_S", 0.3)
    machine.pulse()  # the last: from now on it waits no longer than that
    soon(lambda: any("is lost: the run sent nothing for 0.3 s; joining again" in line for line in told))
    monkeypatch.setattr(join_side, "SILENCE_S", SOON_S)
    soon(lambda: not begun[0].started[0].is_alive())
    second = JoinedEngines((host, int(port)), TOKEN, SOON_S, None, lambda text: None)
    assert second.spawn(SPEC).is_alive()
    second.close()
    joining.join(SOON_S)
    assert "the run is over" in told


def test_a_machine_with_another_version_is_told_so_and_leaves(
    run: JoinedEngines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines.redline, "__version__", "9.9")
    with connect(run.address, TOKEN, ROLE, SOON_S) as connection:
        connection.send("here", {"host": "node-7", "redline": "0.1"})
        for _ in range(16):
            assert connection.receive(SOON_S).kind == "clock"
            connection.send("clock", {"ns": time.perf_counter_ns()})
        over = connection.receive(SOON_S)
    assert over.kind == "over"
    assert "redline is 0.1 on node-7 (127.0.0.1), and 9.9 in the run" in over.fields["error"]


def test_a_run_that_refuses_a_machine_ends_its_join_with_the_reason(run: JoinedEngines, machine: FakeMachine) -> None:
    soon(lambda: len(run._machines) == 1)
    run._machines[0]._connection.send("over", {"error": "redline is 0.1 here"})
    with pytest.raises(ConfigError, match=r"redline is 0\.1 here"):
        machine.serving.result(SOON_S)


def test_who_cannot_reach_the_run_gives_up_in_time_and_another_token_at_once(run: JoinedEngines, told: list[str]) -> None:
    began = time.monotonic()
    with pytest.raises(WireError, match="does not know the token"):
        join_side.join(run.address, make_token(), Hold(), 2 * SOON_S, told.append)
    run.close()
    with pytest.raises(WireError, match=rf"{run.address} \(join\) cannot be reached: .*; tried for 0.5 s"):
        join_side.join(run.address, TOKEN, Hold(), 0.5, told.append)
    assert time.monotonic() - began < SOON_S


def test_a_machine_that_is_just_joining_when_the_run_ends_is_told(run: JoinedEngines) -> None:
    with connect(run.address, TOKEN, ROLE, 60.0) as connection:
        connection.send("here", {"host": "node-7", "redline": redline.__version__})
        frame = connection.receive(60.0)
        assert frame.kind == "clock"
        closing = threading.Thread(target=run.close)
        closing.start()
        soon(lambda: run._is_closed)
        while frame.kind != "over":
            if frame.kind == "clock":
                connection.send("clock", {"ns": 0})
            frame = connection.receive(60.0)
        closing.join()


def test_a_stranger_with_the_token_and_another_role_is_turned_away(run: JoinedEngines) -> None:
    with connect(run.address, TOKEN, "weights", SOON_S) as connection, pytest.raises(WireError):
        connection.receive(SOON_S)


def test_spans_of_a_machine_are_copied_into_the_run_and_those_that_were_let_go_of_there_go_here_too(
    run: JoinedEngines, machine: FakeMachine, tmp_path: Path
) -> None:
    header = b'{"process":"engine-2","os_pid":4711,"boot":"b","spans_ns":0,"wall_ns":0}\n'
    row = b'{"lane":"engine","name":"engine.decode","start_ns":%d,"end_ns":%d}\n'
    file = machine.folder / "engine-2-4711.jsonl"
    file.write_bytes(header + row % (0, 10) + row % (10, 30))
    engine = run.spawn(SPEC)
    machine.processes.started[0].kill()
    soon(lambda: not engine.is_alive())
    [record] = read_processes(tmp_path / "spans")
    assert (record.name, len(record.spans)) == ("engine-2", 2)
    assert record.clock.how == "shortest of several round trips"
    file.write_bytes(header + row % (0, 10))
    engine = run.spawn(SPEC)
    engine.kill()
    [record] = read_processes(tmp_path / "spans")
    assert len(record.spans) == 1


def test_processes_of_two_machines_with_one_name_and_id_have_files_and_lanes_of_their_own(tmp_path: Path) -> None:
    header = b'{"process":"engine-2","os_pid":8,"boot":"%s","spans_ns":0,"wall_ns":0}\n'
    row = b'{"lane":"engine","name":"engine.decode","start_ns":0,"end_ns":%d}\n'
    for boot, end_ns in ((b"a", 10), (b"b", 30)):
        copies = SpanCopies(tmp_path, ClockOffset(0, 0, "the same"))
        copies.write("engine-2-8.jsonl", 0, header % boot)
        copies.write("engine-2-8.jsonl", len(header % boot), row % end_ns)
    records = list(read_processes(tmp_path))
    assert [len(record.spans) for record in records] == [1, 1]
    lanes = {lane: ledger.wall_ns for record in records for lane, ledger in record.lanes().items()}
    assert lanes == {"engine-2-8/engine": 10, "engine-2-8-2/engine": 30}


@pytest.mark.parametrize("name", ["../a.jsonl", "a/b.jsonl", "a.json", "", "..jsonl"])
def test_a_machine_writes_nothing_but_span_files(name: str, tmp_path: Path) -> None:
    copies = SpanCopies(tmp_path, ClockOffset(0, 0, "the same"))
    with pytest.raises(ValueError, match="is no file of spans"):
        copies.write(name, 0, b"x")
    assert list(tmp_path.iterdir()) == []


def test_a_machine_whose_spans_cannot_be_written_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "spans").write_text("no folder")
    copies = SpanCopies(tmp_path / "spans", ClockOffset(0, 0, "a test"))
    for _ in range(2):
        copies.write("engine-1-4711.jsonl", 0, b"{}")
    assert capsys.readouterr().err.count("spans of other machines are no longer written") == 1


def test_what_is_new_in_span_files_is_found_once(tmp_path: Path) -> None:
    source = SpanSource(tmp_path)
    (tmp_path / "a-1.jsonl").write_bytes(b"one\n")
    assert list(source.changes()) == [("a-1.jsonl", 0, b"one\n")]
    assert list(source.changes()) == []
    with (tmp_path / "a-1.jsonl").open("ab") as file:
        file.write(b"two\n")
    assert list(source.changes()) == [("a-1.jsonl", 4, b"two\n")]


def soon(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + SOON_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
