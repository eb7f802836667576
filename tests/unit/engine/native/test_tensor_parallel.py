"""How the ranks of an engine over several processes find each other."""

from __future__ import annotations

import socket
import subprocess
import sys

import psutil
import pytest

from redline.engine.native.tensor_parallel import join_meeting, new_meeting


def test_two_engines_that_start_at_once_meet_at_ports_of_their_own() -> None:
    """Each port is held from the moment at which it is chosen: a port that was only free then may be another engine's."""
    meetings = [new_meeting() for _ in range(2)]
    assert meetings[0].port != meetings[1].port
    for number, meeting in enumerate(meetings):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", meeting.port))
        meeting.set("which", str(number))
        assert join_meeting(meeting.port).get("which") == str(number).encode()


BEGINS_AND_ENDS = """
import os
from pathlib import Path
import torch
from redline.config.sections.engine import ServedEngineConfig
from redline.engine.native.tensor_parallel import PROGRAM, _start_worker, _worker_settings, new_meeting

config = ServedEngineConfig(tensor_parallel_size=2)
settings = _worker_settings(Path("/nowhere"), config, torch.device("cpu"), torch.float32, new_meeting().port)
print(_start_worker(PROGRAM, settings | {"step_timeout_s": 60}, 1).pid, flush=True)
os._exit(0)
"""


@pytest.mark.slow
def test_a_rank_that_is_still_starting_ends_with_rank_0() -> None:
    """It has no connection yet that could end."""
    done = subprocess.run([sys.executable, "-c", BEGINS_AND_ENDS], stdout=subprocess.PIPE, text=True, timeout=120)
    rank = psutil.Process(int(done.stdout))
    try:
        rank.wait(120)
    finally:
        if rank.is_running():
            rank.kill()
