"""Signals to a run, and output that nobody reads."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console
from support.eventually import eventually
from support.fakes import FakeTrainer
from support.watched_stages import FakeStages

from redline.config import validate
from redline.telemetry import Progress, Recorder, RunFolder
from redline.telemetry.console.unread_output import dropping_unread_output
from redline.watch.interrupts import saying_how_to_continue
from redline.watch.outputs import Outputs
from redline.watch.run_watch import RunWatch


def make_watch(parent: Path, output: TextIO | None = None) -> RunWatch:
    config = validate(
        {"model": {"path": "builtin:tiny"}, "rollouts": {"task": {"kind": "import", "path": "tests:Fake"}}}, "a test"
    )
    progress = Progress(10, console=Console(file=output or io.StringIO(), width=100_000))
    folder = RunFolder.create(parent, "run")
    return RunWatch(config, Outputs(folder, Recorder(), progress), FakeStages(FakeTrainer([])))


@pytest.fixture
def hang_up() -> Iterator[None]:
    """SIGHUP as a shell leaves it, whatever pytest was started under."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


def test_what_the_disk_refuses_names_the_run_that_goes_on_and_after_which_step(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run")
    (folder.checkpoints / "step-000003").mkdir(parents=True)
    folder.config.write_text("{}")
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space left") as caught, saying_how_to_continue(folder):
        raise full
    assert caught.value.__notes__ == [f"then go on after step-000003 with: redline train {folder.shown} --resume"]


@pytest.mark.usefixtures("hang_up")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_a_first_signal_asks_the_run_to_stop_and_a_second_one_does_what_it_always_does(
    number: signal.Signals, tmp_path: Path
) -> None:
    watch, before = make_watch(tmp_path), signal.getsignal(number)
    with watch.interrupts.listening():
        assert not watch.should_stop()
        os.kill(os.getpid(), number)
        assert watch.should_stop()
        for second in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # of whatever kind it is
            assert signal.getsignal(second) is (signal.default_int_handler if second == signal.SIGINT else signal.SIG_DFL)
    assert signal.getsignal(number) is before


def test_a_signal_in_the_middle_of_a_line_is_told_after_it(tmp_path: Path) -> None:
    """A handler that printed would interrupt the print of the main thread, which the stream refuses."""
    reader, writer = os.pipe()
    output = os.fdopen(writer, "w", buffering=1)
    watch = make_watch(tmp_path, output)
    read = bytearray()

    def interrupt_and_read() -> None:
        eventually(lambda: not select.select([], [writer], [], 0)[1])  # the pipe is full: the line is being written
        os.kill(os.getpid(), signal.SIGINT)
        eventually(lambda: watch.interrupts.requested)
        while block := os.read(reader, 2**16):
            read.extend(block)

    other = threading.Thread(target=interrupt_and_read)
    with watch.interrupts.listening():
        other.start()
        print("x" * 2**20, file=output)
        assert watch.should_stop()
    output.close()
    other.join()
    os.close(reader)
    line, told = read.decode().splitlines()
    assert line == "x" * 2**20
    assert told == "stopping after this step; once more stops at once"


@pytest.mark.usefixtures("hang_up")
def test_a_run_under_nohup_goes_on_when_the_terminal_is_closed(tmp_path: Path) -> None:
    watch = make_watch(tmp_path)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with watch.interrupts.listening():
        os.kill(os.getpid(), signal.SIGHUP)
        assert not watch.should_stop()


def test_what_goes_to_a_pipe_without_a_reader_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w", buffering=1)
    os.close(reader)
    monkeypatch.setattr(sys, "stderr", stream)
    with dropping_unread_output():
        Progress(10).note("a note")
        print("a line", file=sys.stderr, flush=True)
    os.write(writer, b"a library writes to the descriptor")
    stream.close()


class FullDisk(io.StringIO):
    is_full = True

    def write(self, text: str) -> int:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(text)


def test_what_a_full_disk_does_not_take_is_dropped_until_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = FullDisk()
    monkeypatch.setattr(sys, "stderr", stream)
    with dropping_unread_output():
        print("lost", file=sys.stderr)
        stream.is_full = False
        print("kept", file=sys.stderr)
    assert stream.getvalue() == "kept\n"
