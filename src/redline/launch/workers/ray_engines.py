"""Engines on a Ray cluster: rank 0 starts each in an actor, in the room that the driver keeps for them.

    RayActors.spawn(spec) ──► actor in bundle trainers + i ──► process: engine_worker ──► its address

The process is the one that `LocalProcesses` starts, and requests and weights go to it over the same connections. It listens on
loopback where the cluster is one machine, else on its node's address. Its bundle stays its own: a restart finds the room there.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import replace
from itertools import count

from redline.errors import ConfigError, EngineLostError
from redline.launch.workers.ray_cluster import GROUP_VARIABLE, join_as_rank, kept_room
from redline.launch.workers.ray_host import Job
from redline.launch.workers.ray_process import ActorGoneError, HostedProcess, news_of
from redline.launch.workers.spawn import START_S, WORKER, EngineSpec, wait_for_end
from redline.wire import make_token

KILL_S = 10.0
"""Seconds for an actor to end its process."""


class RayActors:
    """Starts the workers of engines on the cluster of this run. Implements `Spawner`."""

    def __init__(self, first_bundle: int, start_s: float = START_S) -> None:
        """Joins the cluster; call it in the main thread. The bundles from `first_bundle` on are for engines."""
        if GROUP_VARIABLE not in os.environ:
            raise ConfigError("no driver has kept room for engines on a Ray cluster", "start the run with redline train")
        join_as_rank()
        self._bundles, self._nodes = kept_room()
        self._free = count(first_bundle)
        self._bundle_of: dict[str, int] = {}
        self._lock = threading.Lock()
        self._start_s = start_s

    def spawn(self, spec: EngineSpec) -> RayEngine:
        """Start a worker and block until it listens. Raises EngineLostError, with what it said last, where it does not."""
        with self._lock:
            index = self._bundle_of.setdefault(spec.name, -1)
            if index < 0:
                index = self._bundle_of[spec.name] = next(self._free)
        process, token = HostedProcess(spec.name, self._bundles[index]), make_token()
        try:
            process.meet()
            kind = spec.device.partition(":")[0]  # Ray shows it its own GPUs alone
            here = replace(spec, device=kind, host=self._host(spec, process))
            process.start(Job(WORKER, env=here.environment(token)))
            return RayEngine(process, self._address(process), token)
        except BaseException as error:
            process.kill()
            if isinstance(error, ActorGoneError):
                raise EngineLostError(f"{spec.name} did not start: {error.message}", _HINT) from None
            raise

    def _host(self, spec: EngineSpec, process: HostedProcess) -> str:
        return process.address if self._nodes > 1 else spec.host

    def _address(self, process: HostedProcess) -> str:
        """Block until the worker has told where it listens."""
        deadline = time.monotonic() + self._start_s
        while process.is_alive:
            for _, kind, line in news_of([process]):
                if kind == "out":
                    return str(json.loads(line)["address"])
            if time.monotonic() > deadline:
                raise EngineLostError(f"{process.where} did not start within {self._start_s:g} s", _HINT)
        raise EngineLostError(f"{process.name} did not start: {process.why_ended()}", _HINT)


class RayEngine:
    """A worker in an actor. Implements `Spawned`."""

    def __init__(self, process: HostedProcess, address: str, token: str) -> None:
        self._process, self.address, self.token = process, address, token
        self._lock = threading.Lock()

    @property
    def pid(self) -> int:
        """Its process id on its node."""
        return self._process.pid

    def is_alive(self) -> bool:
        with self._lock:  # one thread at a time asks the actor
            for _ in news_of([self._process], wait_s=0):
                pass
            return self._process.is_alive

    def kill(self) -> None:
        """End it at once, also where it is stopped. Returns when it is gone, or its node does not answer."""
        with suppress(ActorGoneError):
            self._process.call("kill", timeout_s=KILL_S)
        self._process.kill()

    def why_ended(self) -> str:
        """How it ended and the last lines that it wrote; empty while it is alive. Waits a second for one that is ending."""
        wait_for_end(self.is_alive)
        return self._process.why_ended()


_HINT = "see what it says, and `ray status`; placement.engines=0 samples in the trainer's process"
