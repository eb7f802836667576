"""Section `placement`: which process runs where, and how weights get to engines."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt

from redline.config.section import Section

Cluster = Literal["ray"]
TransportName = Literal["auto", "shared", "cuda_ipc", "broadcast", "checkpoint_engine", "http"]
JOIN_PORT = 29600
"""The port of `placement.listen` where it names none."""


class PlacementConfig(Section):
    engines: int = Field(0, ge=0, le=64)
    """Processes that sample, each with an engine and weights of its own; 0 samples in the trainer's process, from the trainer's
    own weights. On a CPU they divide the cores; GPUs that the trainer leaves are theirs, else they share its GPU."""
    remote_engines: int = Field(0, ge=0, le=64)
    """How many of `engines` run on other machines, each started there by `redline join HOST:PORT`. Run and machines have one
    token, in the environment variable REDLINE_TOKEN."""
    listen: str = f"127.0.0.1:{JOIN_PORT}"
    """Where engines of other machines join the run: an address of this machine, HOST or HOST:PORT. By default only this machine
    reaches it."""
    join_timeout_s: PositiveFloat = 600.0
    """Seconds that the run waits for a machine to join, when it begins and each time after an engine there was lost."""
    transport: TransportName = "auto"
    """How new weights get to the engines. `shared`: they read the trainer's own (one process). `cuda_ipc`: through memory that
    both processes map, of the GPU or on a CPU of the machine. `broadcast`: in a process group (NCCL, gloo), also to other
    machines. `checkpoint_engine`: through files in the run folder, which all machines must see, and of which only what changed
    is written. `http`: to a server (`engine.kind: openai`). `auto` takes what fits `engines` and `engine.kind`."""
    sleep: bool = False
    """The engine in the trainer's process gives up its KV cache while a step is trained on, and makes it again afterwards: both
    may then use most of the GPU (`engine.gpu_memory_utilization`), for some time at every step."""
    cluster: Cluster | None = None
    """What starts the processes of a run: `ray`, or null for this one alone."""
    address: str = "auto"
    """The Ray cluster: `local` starts one on this machine that ends with the run, `auto` finds the one that this machine is
    part of, anything else is the address of its head (`10.0.0.1:6379`)."""
    trainers: PositiveInt = 1
    """Trainer ranks that a cluster starts, each a process with a CPU, or with a GPU where `run.device` is cuda."""
    max_restarts: int = Field(3, ge=0)
    """Times that an engine which has died is started again, and with a cluster that a run goes on from its newest checkpoint
    after a process or a node was lost; then the run ends with the reason."""
