"""Reading the frames of other threads, in a process of its own: what goes wrong here would hang the one that tests."""

from __future__ import annotations

import subprocess
import sys

FRAMES_DURING_COLLECTIONS = """
import faulthandler, gc, threading, time

from redline.telemetry.stalls.stacks import current_frames

faulthandler.dump_traceback_later(300, exit=True)

class Cycle:
    def __init__(self):
        self.itself = self

    def __del__(self):
        time.sleep(0.001)  # lets other threads run in the middle of a collection

def start_threads():
    while not over.is_set():
        thread = threading.Thread(target=time.sleep, args=(0,))
        thread.start()
        thread.join()

def read(depth):
    return read(depth - 1) if depth else current_frames()  # each new frame may begin a collection

over = threading.Event()
starter = threading.Thread(target=start_threads)
starter.start()
gc.set_threshold(1, 1000, 1000)
for _ in range(100):
    gc.disable()
    for _ in range(3):
        Cycle()
    gc.enable()
    read(20)
over.set()
starter.join()
print("read")
"""


def test_reading_frames_is_no_deadlock_with_a_garbage_collection_that_lets_other_threads_start() -> None:
    """With a bare `sys._current_frames` on Python 3.11 it is one within a second."""
    done = subprocess.run(
        [sys.executable, "-c", FRAMES_DURING_COLLECTIONS], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.stdout == "read\n", done.stderr
