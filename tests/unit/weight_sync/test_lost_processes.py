"""Engines in processes of their own that are killed or stopped while weights go to them."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest
import torch

from redline.errors import WireClosed, WireTimeout
from redline.lab.bench.weight_engines import EngineApart
from redline.types import WeightSet
from redline.weight_sync import Sending
from redline.weight_sync.plan import TransferPlan

pytestmark = pytest.mark.slow


@pytest.mark.skipif(sys.platform != "linux", reason="memory without a name is Linux's")
@pytest.mark.parametrize("name", ["cuda_ipc", "broadcast"])
def test_a_process_that_is_stopped_or_killed_is_named_within_the_time_limit(name: str) -> None:
    tensors = {"embed": torch.randn(2**20), "norm": torch.ones(3)}
    plan = TransferPlan(1, tuple(tensors))
    for sign, error in ((signal.SIGSTOP, WireTimeout), (signal.SIGKILL, WireClosed)):
        with EngineApart(name, tensors, Sending(timeout_s=3, bucket_bytes=2**18)) as engine:
            engine.transport.move(plan, WeightSet(1, tensors))
            engine.transport.verify(WeightSet(1, tensors))
            engine.transport.adopt()
            engine.check(tensors)
            os.kill(engine.pid, sign)
            began = time.monotonic()
            with pytest.raises(error, match=f"the engine of {name}"):
                engine.transport.move(TransferPlan(2, tuple(tensors)), WeightSet(2, tensors))
            assert time.monotonic() - began < 10
            os.kill(engine.pid, signal.SIGKILL)
    assert not [entry for entry in os.listdir("/dev/shm") if "redline-weights" in entry]
