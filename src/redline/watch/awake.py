"""A main thread that handles every signal, also one that comes while it goes to sleep.

Python runs the handlers of signals in the main thread, between two instructions. A signal that arrives after the last
instruction before a wait without a limit (of a lock, a queue, a thread), or in another thread, is not handled until something
else ends that wait: the second of two quick Ctrl-C would be lost. So a thread hears of each signal from the interpreter itself
and interrupts the main thread's wait until the handler must have run.

That thread also does what a handler must not: a handler may interrupt the main thread in the middle of a print or of starting a
thread, and printing there raises, starting one there waits for ever.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

NUDGE = signal.SIGURG
"""Harmless: ignored unless somebody asks for it."""
NUDGES = 20
"""After each signal. One suffices unless it, too, comes while the main thread goes to sleep."""
BETWEEN_S = 0.05
HANDLED = b"\0"
"""What the main thread writes when it has run handlers: no signal has this number."""


@contextmanager
def staying_awake(notice: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Inside the block no signal waits longer than a few hundredths of a second for its handler. For the main thread only.

    Another thread calls `notice` a few times after each signal, and once more after its handler has run, which may leave word
    there: the main thread may be in C code for long, and runs handlers only when it comes back.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    ended = threading.Event()
    thread = threading.Thread(target=_nudge_after_signals, args=(reader, ended, notice), name="signals", daemon=True)
    # Python runs the handlers of all signals that have come in the order of their numbers: this one after Ctrl-C's.
    before = signal.signal(NUDGE, lambda number, frame: _say_handled(writer))
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        ended.set()
        _say_handled(writer)  # closing it would end no read: a child that somebody forked may hold a copy
        thread.join()
        signal.signal(NUDGE, before)
        os.close(writer)
        os.close(reader)


def _say_handled(writer: int) -> None:
    with suppress(BlockingIOError):  # it is full: there is enough to read
        os.write(writer, HANDLED)


def _nudge_after_signals(reader: int, ended: threading.Event, notice: Callable[[], None]) -> None:
    main = threading.main_thread().ident
    assert main is not None
    while not ended.is_set():
        read = set(os.read(reader, 64))
        for _ in range(NUDGES if read - {NUDGE, *HANDLED} else 0):
            if ended.is_set():
                return
            signal.pthread_kill(main, NUDGE)
            ended.wait(BETWEEN_S)
            notice()
        if read & {*HANDLED} and not ended.is_set():
            notice()
