"""Ranks that a real torch.profiler records while one of them packs an object that grows, and others wait for it.

Each function returns what its own clock says, so that the cost that was planted is known, whatever the machine does meanwhile.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

Range = Callable[[str], AbstractContextManager[Any]]


@dataclass(slots=True)
class Stamps:
    """Moments of one rank, in nanoseconds since 1970."""

    packed: list[tuple[int, int]] = field(default_factory=list)
    """From when to when it packed, step by step."""
    unpacked: list[tuple[int, int]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """When it began to wait for the object."""
    met: list[int] = field(default_factory=list)
    """When it came to the collective at the end of a step."""


def grown(step: int) -> dict[str, list[list[int]]]:
    """What a scheduler would send: slots of batch × length, longer with each step."""
    return {"slots_mappings": [list(range(64)) for _ in range(1_500 + 500 * step)]}


def record(folder: str, steps: int, with_stack: bool) -> Stamps:
    """Take steps together with another rank, and write the profile of all but the first into a file of this rank's."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    stamps = Stamps()
    named: Range = (lambda name: nullcontext()) if with_stack else torch.profiler.record_function
    one_step(0, Stamps(), torch.profiler.record_function)  # connects, and pays for what is done once
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, with_stack=with_stack, record_shapes=not with_stack) as profiler:
        for step in range(steps):
            one_step(step, stamps, named)
    profiler.export_chrome_trace(f"{folder}/profile-{os.environ['RANK']}.pt.trace.json.gz")
    return stamps


def one_step(step: int, stamps: Stamps, named: Range) -> None:
    import torch
    import torch.distributed as dist

    with named("step"), named("prepare_context"):
        share_context(step, stamps, named)
    gradient = torch.ones(64, 64) @ torch.ones(64, 64)
    stamps.met.append(time.time_ns())
    dist.all_reduce(gradient)


def share_context(step: int, stamps: Stamps, named: Range) -> None:
    """Send the object from rank 0 to the others, as `broadcast_object_list` does: its size, then its bytes."""
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 0:
        found = grown(step)
        with named("broadcast_context"):
            with named("pickle.dumps"), stamped(stamps.packed):
                data = pickle.dumps(found)
            dist.broadcast(torch.tensor([len(data)]), 0)
            dist.broadcast(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)
        return
    stamps.asked.append(time.time_ns())
    with named("broadcast_context"):
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0)
        received = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(received, 0)
        data = received.numpy().tobytes()
        with named("pickle.loads"), stamped(stamps.unpacked):
            found = pickle.loads(data)
        del found  # it takes a millisecond, which is not the call's


@contextmanager
def stamped(into: list[tuple[int, int]]) -> Iterator[None]:
    start = time.time_ns()
    yield
    into.append((start, time.time_ns()))


def schedule(pipe: Connection, path: str) -> None:
    """A scheduler beside an engine: whenever it is asked, it packs what the step needs and sends it. Ends when told to."""
    import torch

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    named, stamps, step = torch.profiler.record_function, Stamps(), 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        while pipe.recv_bytes() == b"step":
            found = grown(4 * step)
            pipe.send_bytes(b"")
            pipe.recv_bytes()
            with named("broadcast_context"):
                with named("pickle.dumps"), stamped(stamps.packed):
                    data = pickle.dumps(found)
                with named("connection.send"):
                    pipe.send_bytes(data)
            step += 1
    profiler.export_chrome_trace(path)
    pipe.send(stamps)
