"""Signals that come while the main thread waits."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

import pytest
from support.eventually import eventually

from redline.watch import awake
from redline.watch.awake import NUDGE, staying_awake

LONG_S = 60.0


@pytest.fixture
def handled() -> threading.Event:
    return threading.Event()


def raise_in_another_thread() -> None:
    """The kernel may hand a signal to any thread, and then nothing ends the wait of the main one."""
    threading.Thread(target=lambda: signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)).start()


def test_a_signal_that_another_thread_got_ends_a_wait_of_the_main_thread(handled: threading.Event) -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: handled.set())
    try:
        with staying_awake():
            threading.Timer(0.1, raise_in_another_thread).start()
            assert handled.wait(LONG_S)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_everything_is_as_before_afterwards() -> None:
    before, wakeup = signal.getsignal(NUDGE), signal.set_wakeup_fd(-1)
    with staying_awake():
        assert signal.getsignal(NUDGE) is not before
    assert signal.getsignal(NUDGE) is before
    assert signal.set_wakeup_fd(wakeup) == -1
    assert "signals" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.skipif(sys.platform != "linux", reason="macOS allows no fork without exec")
def test_a_child_that_was_forked_inside_keeps_nobody_waiting() -> None:
    with staying_awake():
        child = os.fork()
        if child == 0:
            signal.pause()
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_handler_that_runs_late_is_noticed(handled: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread may be in C code, such as a sum over ranks, until long after the last nudge."""
    monkeypatch.setattr(awake, "NUDGES", 1)
    libc, mutex, holds = ctypes.CDLL(None), ctypes.create_string_buffer(64), threading.Event()
    looked, noticed = threading.Semaphore(0), threading.Event()

    def notice() -> None:
        looked.release()
        if handled.is_set():
            noticed.set()

    def keep_the_main_thread_waiting() -> None:
        libc.pthread_mutex_lock(mutex)
        holds.set()
        status = Path(f"/proc/self/task/{threading.main_thread().native_id}/stat")
        eventually(lambda: status.read_text().rpartition(")")[2].split()[0] == "S")
        os.kill(os.getpid(), signal.SIGUSR1)
        looked.acquire()
        libc.pthread_mutex_unlock(mutex)

    before = signal.signal(signal.SIGUSR1, lambda number, frame: handled.set())
    try:
        with staying_awake(notice):
            other = threading.Thread(target=keep_the_main_thread_waiting)
            other.start()
            holds.wait()
            libc.pthread_mutex_lock(mutex)  # no signal ends this
            other.join()
            assert noticed.wait(LONG_S)
    finally:
        signal.signal(signal.SIGUSR1, before)
