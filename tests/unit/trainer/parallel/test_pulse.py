"""Who is alive, told by one process to another through a store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from redline.errors import RankLostError
from redline.trainer.parallel.pulse import Pulse


def silent_rank(store: dist.Store, rank: int, **beat: object) -> None:
    """A rank that beat once, on a machine out of sight."""
    store.set(
        f"beat/{rank}", json.dumps({"count": 1, "pid": 7, "host": "far", "sight": "there", "at": "trainer.backward", **beat})
    )


@pytest.fixture
def rank_0() -> tuple[Pulse, dist.Store]:
    store = dist.HashStore()
    return Pulse(store, 0, 3), store


def test_a_rank_that_has_not_begun_is_not_missed(rank_0: tuple[Pulse, dist.Store]) -> None:
    pulse, _ = rank_0
    assert pulse.find_lost(0.15) == ""
    pulse.check()


def test_a_silent_rank_is_lost_after_the_patience_and_named_to_all(rank_0: tuple[Pulse, dist.Store]) -> None:
    pulse, store = rank_0
    silent_rank(store, 2)
    pulse.patience_s = 0.2
    assert "rank 2 of the trainer (process 7 on far) has given no sign of life" in pulse.find_lost(60.0)
    with pytest.raises(RankLostError, match="rank 2"):
        pulse.check()
    assert "rank 2" in Pulse(store, 1, 3).find_lost(60.0), "rank 0 tells the others"


def test_a_rank_that_goes_on_beating_is_not_lost(rank_0: tuple[Pulse, dist.Store]) -> None:
    pulse, store = rank_0
    pulse.patience_s = 1.0
    for count in range(4):
        silent_rank(store, 1, count=count)
        assert pulse.find_lost(0.3) == ""


def test_a_process_of_this_machine_that_has_ended_is_missed_at_once(rank_0: tuple[Pulse, dist.Store]) -> None:
    pulse, store = rank_0
    other = Pulse(store, 1, 3)
    other._beat(0)
    with subprocess.Popen([sys.executable, "-c", ""]) as gone:
        gone.wait()
    store.set("beat/1", json.dumps(json.loads(store.get("beat/1")) | {"pid": gone.pid}))
    missed = pulse.find_lost(60.0)
    assert f"(process {gone.pid} on" in missed
    assert missed.endswith("is gone"), "nobody waited for a sign of life"


def test_a_rank_that_ends_with_an_error_says_why(rank_0: tuple[Pulse, dist.Store]) -> None:
    pulse, store = rank_0
    silent_rank(store, 1)
    Pulse(store, 1, 3).ended("NoRoomError: too long")
    assert pulse.find_lost(60.0) == "rank 1 of the trainer (process 7 on far) ended: NoRoomError: too long"


def test_a_checkpoint_that_is_being_written_comes_to_its_end_first(
    rank_0: tuple[Pulse, dist.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main thread waits in a collective, where nothing can tell it; the process is ended for it."""
    pulse, _ = rank_0
    ended: list[float] = []
    monkeypatch.setattr(os, "_exit", lambda code: ended.append(time.monotonic()))
    monkeypatch.setattr("redline.trainer.parallel.pulse.GRACE_S", 0.01)
    pulse.lost = "rank 1 is gone"
    written = time.monotonic() + 0.3
    pulse.is_writing = lambda: time.monotonic() < written
    pulse._end()
    assert ended[0] >= written
    monkeypatch.setattr("redline.trainer.parallel.pulse.WRITING_S", 0.1)
    pulse.is_writing = lambda: True
    pulse._end()
    assert len(ended) == 2, "but not for ever"


def test_a_main_thread_that_has_an_error_of_its_own_closes_its_run_undisturbed(
    rank_0: tuple[Pulse, dist.Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank has raised the same: the others have ended, and this one has files to write."""
    pulse, _ = rank_0
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr("redline.trainer.parallel.pulse.GRACE_S", 0.01)
    pulse.lost, pulse.is_closing = "rank 1 ended: three steps in a row were not finite", True
    with ThreadPoolExecutor(1) as ending:
        end = ending.submit(pulse._end)
        time.sleep(0.1)
        pulse.close()
        end.result()
    assert ended == []


def test_a_rank_that_beats_and_stands_still_is_named_with_its_line(rank_0: tuple[Pulse, dist.Store]) -> None:
    """Its thread says that it lives; what the others wait for is its main thread."""
    pulse, store = rank_0
    silent_rank(store, 1, where="loss.py:7, in forward", waits=False, stood_s=31.0)
    silent_rank(store, 2, where="distributed_c10d.py:99, in all_gather", waits=True, stood_s=31.0)
    pulse._listen()
    assert pulse.stuck() == {"trainer: seconds that rank 1 has stood at loss.py:7, in forward, waiting for no other": 31.0}


def test_a_beat_says_where_the_main_thread_is(rank_0: tuple[Pulse, dist.Store]) -> None:
    pulse, store = rank_0
    with ThreadPoolExecutor(1) as beating:
        beating.submit(pulse._beat, 1).result()
    told = json.loads(store.get("beat/0"))
    assert ".py:" in told["where"]
    assert not told["waits"]
    assert told["stood_s"] >= 0


def test_a_stall_file_gets_what_each_rank_was_at(rank_0: tuple[Pulse, dist.Store]) -> None:
    pulse, store = rank_0
    silent_rank(store, 1)
    began = time.monotonic()
    pulse._listen()
    ((name, silent_s),) = pulse.silences().items()
    assert name == "trainer: seconds since rank 1, in trainer.backward, gave a sign of life"
    assert 0 <= silent_s <= time.monotonic() - began
