from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.eventually import eventually

from redline.config.installation import how_to_install
from redline.telemetry import Recorder, recording, span
from redline.telemetry.stalls import stacks
from redline.telemetry.stalls.activity import ActivityProbe
from redline.telemetry.stalls.calls import Call, calling, forget_call
from redline.telemetry.stalls.slow_calls import CALL_S, saying_what_hangs
from redline.telemetry.stalls.watch import FIRST_KEPT, FIRST_S, FLOOR_S, LAST_KEPT, MIN_STEPS, Stall, StallWatch, describe

pytestmark = pytest.mark.usefixtures("no_calls_of_others")

AFTER_S = 10.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Watched:
    """A recorder and a watch over it, whose clock we move."""

    def __init__(self, folder: Path, after_s: float | None = AFTER_S) -> None:
        self.clock = Clock()
        self.recorder = Recorder()
        self.probe = ActivityProbe(self.recorder, self.clock)
        self.stalls = StallWatch(folder / "stalls", after_s)
        self.stalls.begin(lambda: {"engine: sequences waiting": 3})

    def pass_time(self, seconds: float) -> Stall | None:
        self.stalls.tick(self.probe.look(), 7)
        self.clock.now += seconds
        return self.stalls.tick(self.probe.look(), 7)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path)
    with recording(made.recorder):
        yield made
    made.stalls.close()


@contextlib.contextmanager
def in_thread(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Work that goes on until the block ends; the block begins when the thread waits for that."""
    end = threading.Event()

    def is_waiting() -> bool:
        frame = sys._current_frames().get(thread.ident or 0)
        return frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) == (threading.__file__, "wait")

    thread = threading.Thread(target=work, args=(end,), name=name)
    thread.start()
    eventually(is_waiting)
    try:
        yield
    finally:
        end.set()
        thread.join()


def hanging_environment(end: threading.Event) -> None:
    end.wait()


def test_the_file_names_what_hangs_who_waits_for_it_and_what_is_queued(watched: Watched, tmp_path: Path) -> None:
    def rollouts(end: threading.Event) -> None:
        with span("rollouts.environment", task="t1"):
            hanging_environment(end)

    with in_thread("rollouts", rollouts), span("wait.for_rollouts"):
        stall = watched.pass_time(AFTER_S + 1)
    assert stall is not None
    assert stall.in_rollouts
    document = json.loads((tmp_path / "stalls" / "stall-001.json").read_text())
    assert "in hanging_environment" in document["summary"]
    assert document["summary"].startswith("rollouts has been in rollouts.environment for ")
    assert any(
        line.startswith("main has waited for rollouts ") and line.endswith("for lane rollouts")
        for line in document["who_waits_for_whom"]
    )
    assert document["queues"] == {"engine: sequences waiting": 3}
    assert {lane["name"]: [s["name"] for s in lane["open"]] for lane in document["lanes"]} == {
        "main": ["wait.for_rollouts"],
        "rollouts": ["rollouts.environment"],
    }
    [stack] = [thread["stack"] for thread in document["threads"] if thread["lane"] == "rollouts"]
    assert any("in hanging_environment: end.wait()" in line for line in stack)
    text = stall.path.read_text()
    assert "engine: sequences waiting: 3" in text
    assert "in hanging_environment" in text


def test_an_engine_elsewhere_that_does_not_answer_is_named_with_what_it_was_asked_and_where_it_is(watched: Watched) -> None:
    asked = {"engine 2 at 10.0.0.2:4711: seconds without an answer to 'apply'": 31.5}
    watched.stalls.begin(lambda: asked, lambda: {"engine 2 at 10.0.0.2:4711": ["thread engine", "  sampler.py:7, in draw"]})
    with span("wait.for_engines"):
        stall = watched.pass_time(AFTER_S + 1)
    assert stall is not None
    text = stall.path.read_text()
    assert "main waits for engines, which are processes of their own and have done nothing for 11 s" in text
    assert "engine 2 at 10.0.0.2:4711: seconds without an answer to 'apply': 31.5" in text
    assert "Process elsewhere, as it last said: engine 2 at 10.0.0.2:4711\n  thread engine\n    sampler.py:7, in draw" in text


def test_lanes_that_wait_for_each_other_are_said_to(watched: Watched) -> None:
    def rollouts(end: threading.Event) -> None:
        with span("wait.for_budget"):
            end.wait()

    with in_thread("rollouts", rollouts), span("wait.for_rollouts"):
        stall = watched.pass_time(AFTER_S + 1)
    assert stall is not None
    assert not stall.in_rollouts
    assert "every lane waits, main for rollouts, rollouts for budget" in stall.finding.seen


def test_one_file_per_stall_which_says_when_it_was_over(watched: Watched, tmp_path: Path) -> None:
    with span("trainer.forward"):
        first = watched.pass_time(AFTER_S + 1)
        assert watched.pass_time(AFTER_S + 1) is None
    watched.pass_time(1)
    with span("trainer.backward"):
        second = watched.pass_time(AFTER_S + 1)
    assert first is not None
    assert second is not None
    assert [path.name for path in sorted((tmp_path / "stalls").glob("*.txt"))] == [
        "frozen.txt",
        "stall-001.txt",
        "stall-002.txt",
    ]
    assert "It moved again after 22 s." in first.path.read_text()
    assert "moved again" not in second.path.read_text()


def test_the_first_and_the_newest_stalls_keep_their_files(watched: Watched, tmp_path: Path) -> None:
    for _ in range(FIRST_KEPT + LAST_KEPT + 5):
        assert watched.pass_time(AFTER_S + 1)
        with watched.recorder.span("trainer.step"):
            pass
    numbers = sorted(int(path.stem.removeprefix("stall-")) for path in (tmp_path / "stalls").glob("stall-*.txt"))
    assert numbers == [*range(1, FIRST_KEPT + 1), *range(FIRST_KEPT + 6, FIRST_KEPT + LAST_KEPT + 6)]
    assert len(list((tmp_path / "stalls").glob("stall-*.json"))) == FIRST_KEPT + LAST_KEPT


def test_a_stall_is_told_where_its_file_cannot_be_written(watched: Watched, tmp_path: Path) -> None:
    (tmp_path / "stalls" / "stall-001.json").mkdir()
    (tmp_path / "stalls" / "stall-001.json" / "in-the-way").touch()
    stall = watched.pass_time(AFTER_S + 1)
    assert stall is not None
    assert stall.finding.seen.startswith("nothing has moved for 11 s")
    assert stall.finding.look_at.startswith("stall-001.txt could not be written (Is a directory)")
    with watched.recorder.span("trainer.step"):
        pass
    assert watched.pass_time(0) is None


def test_a_lane_that_only_wakes_up_to_wait_again_moves_nothing(watched: Watched) -> None:
    with span("rollouts.reward"):
        for _ in range(5):
            assert watched.pass_time(AFTER_S / 6) is None
            in_and_out = threading.Thread(target=lambda: span("wait.for_budget").__enter__(), name="other")
            in_and_out.start()
            in_and_out.join()
        assert watched.pass_time(AFTER_S) is not None


def test_a_run_that_moves_is_not_stalled_and_leaves_no_folder(watched: Watched, tmp_path: Path) -> None:
    for _ in range(20):
        with span("engine.decode"):
            pass
        assert watched.pass_time(AFTER_S * 0.9) is None
    watched.stalls.close()
    assert not (tmp_path / "stalls").exists()


def test_the_patience_follows_from_the_pauses_of_the_run(tmp_path: Path) -> None:
    watched = Watched(tmp_path, after_s=None)
    with recording(watched.recorder):
        assert watched.stalls.after_s == FIRST_S
        for _ in range(MIN_STEPS):
            watched.stalls.step()
        assert watched.stalls.after_s == FLOOR_S
        with span("run.checkpoint"):
            assert watched.pass_time(50) is None
        watched.pass_time(1)
    assert watched.stalls.after_s == 150
    watched.stalls.close()


def test_until_the_stages_are_there_a_short_patience_does_not_count(tmp_path: Path) -> None:
    watch = StallWatch(tmp_path / "stalls", 5.0)
    assert watch.after_s == FIRST_S
    watch.begin(dict)
    assert watch.after_s == 5.0
    watch.close()


FREEZES = """
import ctypes, pathlib, sys
from redline.telemetry import Recorder
from redline.telemetry.stalls.activity import ActivityProbe
from redline.telemetry.stalls.watch import StallWatch

def keeps_the_interpreter_to_itself():
    ctypes.PyDLL(None).usleep(1_500_000)  # PyDLL does not let go of the interpreter

watch = StallWatch(pathlib.Path(sys.argv[1]), 0.4, frozen_floor_s=0.4)
watch.begin(dict)
probe = ActivityProbe(Recorder())
assert watch.tick(probe.look(), 3) is None
keeps_the_interpreter_to_itself()
stall = watch.tick(probe.look(), 3)
watch.close()
assert "no thread could run" in stall.finding.seen
print(stall.path.read_text())
"""


def test_code_that_keeps_the_interpreter_to_itself_is_found_all_the_same(tmp_path: Path) -> None:
    """In a process of its own: faulthandler writes a hundred threads, newest first, and other tests leave many behind."""
    command = [sys.executable, "-c", FREEZES, str(tmp_path / "stalls")]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "in keeps_the_interpreter_to_itself" in told.stdout


# ── other processes ────────────────────────────────────────────────────────────────────────────────────────────────────

CHILD = "import time\ndef stuck_here():\n    print('here', flush=True)\n    time.sleep(600)\nstuck_here()"


@pytest.fixture
def child() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_child_process_has_its_stack_or_the_reason_why_not(child: subprocess.Popen[str]) -> None:
    [found] = [stack for stack in stacks.child_stacks() if stack.pid == child.pid]
    text = "\n".join(found.lines)
    assert "stuck_here" in text or text.startswith("no stack: py-spy:")
    assert "-c" in found.command
    assert "(" in found.state, "as the kernel has it: S (sleeping)"


def test_without_py_spy_the_file_says_how_to_get_it(child: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "find_py_spy", lambda: None)
    [found] = [stack for stack in stacks.child_stacks() if stack.pid == child.pid]
    assert found.lines == [f"no stack: py-spy is not installed; {how_to_install('profile')}"]


# ── calls of the user's code ───────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def calls(what: str, seconds: float) -> Iterator[Call]:
    """A call in another thread that has lasted for so long."""
    found: list[Call] = []

    def work(end: threading.Event) -> None:
        with calling(what) as call:
            call.began_s -= seconds
            found.append(call)
            hanging_environment(end)

    with in_thread(what, work):
        yield found[0]


def tell_tale(tmp_path: Path, after_s: float | None = None) -> Watched:
    watched = Watched(tmp_path, after_s)
    watched.clock.now = 1000.0
    watched.probe.look()
    return watched


def test_the_first_call_that_lasts_is_told_within_half_a_minute_whatever_else_moves(tmp_path: Path) -> None:
    assert CALL_S <= 25
    watched = tell_tale(tmp_path)
    with calls("score", CALL_S - 15):
        assert watched.stalls.tick(watched.probe.look(), 0) is None
    with calls("score", CALL_S + 3 * CALL_S):
        with span("engine.decode"):
            pass
        stall = watched.stalls.tick(watched.probe.look(), 0)
        assert watched.stalls.tick(watched.probe.look(), 0) is None, "told once"
    assert stall is not None
    assert stall.in_rollouts
    assert re.match(r"`score` has not returned for 8\d s, at test_watch\.py:", stall.finding.seen)
    assert "in hanging_environment: end.wait()" in stall.finding.seen
    watched.stalls.tick(watched.probe.look(), 0)
    text = stall.path.read_text()
    assert re.search(r"`score` has not returned for 8\d s", text)
    assert text.rstrip().endswith("`score` returned.")
    watched.stalls.close()


def test_a_call_may_last_three_times_as_long_as_those_that_returned(tmp_path: Path) -> None:
    watched = tell_tale(tmp_path)
    with calls("score", 15):
        watched.stalls.tick(watched.probe.look(), 0)
    with calls("score", 40):
        assert watched.stalls.tick(watched.probe.look(), 0) is None
    with calls("train", 40):
        assert watched.stalls.tick(watched.probe.look(), 0) is not None, "another function has another history"
    with calls("score", 125):
        assert watched.stalls.tick(watched.probe.look(), 0) is not None
    watched.stalls.close()


def test_what_was_given_up_says_nothing_about_how_long_a_call_may_last(tmp_path: Path) -> None:
    watched = tell_tale(tmp_path)
    for _ in range(2):
        with calls("score", 100) as call:
            assert watched.stalls.tick(watched.probe.look(), 0) is not None
            forget_call(call)
            assert watched.stalls.tick(watched.probe.look(), 0) is None
    watched.stalls.close()


def test_a_recipe_may_say_how_long_a_call_may_last(tmp_path: Path) -> None:
    watched = tell_tale(tmp_path, after_s=300.0)
    with calls("score", 290):
        assert watched.stalls.tick(watched.probe.look(), 0) is None
    with calls("score", 301):
        assert watched.stalls.tick(watched.probe.look(), 0) is not None
    watched.stalls.close()


def test_many_quick_calls_inside_one_span_move(watched: Watched) -> None:
    with span("rollouts.reward"):
        for _ in range(5):
            with calling("score"):
                pass
            assert watched.pass_time(AFTER_S * 0.9) is None


def test_whoever_waits_for_a_call_is_where_the_call_is(watched: Watched) -> None:
    def work(end: threading.Event) -> None:
        with span("rollouts.reward"), calling("score", threading.main_thread().ident):
            hanging_environment(end)

    with span("rollouts.reward"), in_thread("score", work):
        document = describe(watched.probe.look(), {}, stacks.own_stacks(), [], 3)
    assert re.match(r"main has been in rollouts\.reward for \d+ s, at test_watch\.py:", document["summary"])
    assert document["summary"].endswith("in hanging_environment: end.wait()")


def test_before_there_is_a_run_a_call_that_lasts_is_told_as_well(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with calls("held_out", CALL_S + 1), saying_what_hangs(every_s=0.01):
        eventually(lambda: said.append(capsys.readouterr().err) or "\n" in "".join(said))  # type: ignore[func-returns-value]
    assert re.match(r"`held_out` has not returned for 2\d s, at test_watch\.py:", "".join(said))


COLLECTED_MEANWHILE = """
import faulthandler, gc, threading
from redline.telemetry.stalls.calls import calling

class Garbage:
    def __init__(self):
        self.local, self.itself = threading.local(), self
        self.local.value = 1

def work():
    with calling("score") as call:
        calls.append(call)
        begun.set()
        end.wait(600)

faulthandler.dump_traceback_later(300, exit=True)
for _ in range(5):
    calls, begun, end = [], threading.Event(), threading.Event()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    begun.wait()
    gc.collect()
    gc.disable()
    gc.set_threshold(1)
    for _ in range(3):
        Garbage()
    spare = [{} for _ in range(20)]
    del spare  # Python takes the next dictionary from here, and collects when it makes the frames
    gc.enable()  # the next container that is made, of whatever kind, has a collection before it
    place = calls[0].place()
    gc.set_threshold(700)
    assert "in wait" in place, place
    assert gc.isenabled()
    end.set()
    thread.join()
"""


def test_garbage_that_is_due_while_stacks_are_read_does_not_stop_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", COLLECTED_MEANWHILE], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
