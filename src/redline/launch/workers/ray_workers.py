"""Workers of environments and rewards on a Ray cluster: each is an actor that holds games and calls functions, as the program
of a local worker process does.

    Worker (a thread of rank 0) ──► RayWorker.ask ── a line of JSON ──► actor: `program.answer` ──► the user's code
                                                  ◄─ a line of JSON ──

Actors are spread over the nodes (SPREAD), each with one CPU. One that finds no room waits for it, where Ray's autoscaler sees
it. What goes there and back is text; nothing is a tensor, and nothing of the user's is unpickled.
"""

from __future__ import annotations

import json
import os
import socket
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from redline.config import Config
from redline.environments.workers.process import EndedError, start_processes_with
from redline.environments.workers.program import answer
from redline.launch.workers.ray_cluster import GROUP_VARIABLE, ROOM_S, join_as_rank
from redline.launch.workers.ray_process import in_one_line
from redline.telemetry.machine.hosts import HostSamples, HostSampling, sampling_host

SAMPLES_KEPT = 600
"""Samples of a node that wait for the next answer; the oldest give way."""


def place_workers(config: Config, hosts: HostSamples | None = None) -> None:
    """Have this process, where it is rank 0 of a run on a Ray cluster, start worker processes there. Joins the cluster; call it
    in the main thread. `hosts` takes the samples of their nodes."""
    rollouts = config.rollouts
    if GROUP_VARIABLE not in os.environ or (rollouts.environment.name is None and rollouts.reward_run_in == "threads"):
        return
    join_as_rank()
    # A cluster that is this machine for the length of the run has the room that the recipe asks for.
    num_cpus = 0 if config.placement.address == "local" else 1
    start_processes_with(lambda name: RayWorker(name, num_cpus, hosts))


class WorkerActor:
    """What the actor does. One call at a time, in the main thread of its process. Samples of its node travel with the answers:
    a call beside them would need a second thread."""

    def __init__(self, name: str, sampling: Mapping[str, Any] | None) -> None:
        """`sampling` has the fields of a `HostSampling`."""
        self._objects: dict[int, Any] = {}
        self._samples: deque[tuple[str, Mapping[str, Any]]] = deque(maxlen=SAMPLES_KEPT)
        if sampling is not None:
            self._sampling = sampling_host(HostSampling(**sampling), name, lambda *sample: self._samples.append(sample))
            self._sampling.__enter__()  # for as long as the actor lives

    def describe(self) -> tuple[str, int, str]:
        """The name of this machine, the actor's process id, and what Ray calls this node."""
        import ray

        return socket.gethostname(), os.getpid(), str(ray.get_runtime_context().get_node_id())

    def answer(self, message: str) -> str:
        """Do what a message of `program.py` asks. Both are JSON."""
        found = answer(json.loads(message), self._objects)
        samples = [self._samples.popleft() for _ in range(len(self._samples))]
        return json.dumps({**found, "samples": samples} if samples else found)


class RayWorker:
    """An actor, as the worker that owns it sees it. Implements `WorkerProcess`."""

    start_s = ROOM_S

    def __init__(self, name: str, num_cpus: float = 1, hosts: HostSamples | None = None) -> None:
        """Ask Ray for an actor and return at once. `hosts` takes the samples of its node."""
        import ray

        # Nothing else may be called while a game is: a second thread would be inside the user's code.
        remote = ray.remote(WorkerActor).options(num_cpus=num_cpus, max_restarts=0, scheduling_strategy="SPREAD")
        self._name, self._hosts = name, hosts
        self._actor = remote.remote(name, asdict(hosts.sampling) if hosts else None)
        self._began = self._actor.describe.remote()
        self._host, self.pid, self.node = "", 0, ""
        """Host, process and id of its node, once it has begun."""

    @property
    def where(self) -> str:
        """`environment process 3 on node-7`."""
        return f"{self._name} on {self._host}" if self._host else self._name

    def wait_until_ready(self, limit_s: float) -> bool:
        import ray

        if not ray.wait([self._began], timeout=limit_s)[0]:
            return False
        self._host, self.pid, self.node = self._get(self._began, 0.0)
        return True

    def ask(self, message: Mapping[str, Any], limit_s: float | None) -> Mapping[str, Any]:
        found: dict[str, Any] = json.loads(self._get(self._actor.answer.remote(json.dumps(message)), limit_s))
        for machine, sample in found.pop("samples", ()):
            if self._hosts is not None:
                self._hosts.take(machine, sample)
        return found

    def why_ended(self) -> str:
        """Always empty: an actor that is gone says so when it is asked, and who asks may ask another."""
        return ""

    def kill(self) -> None:
        import ray

        with suppress(Exception):  # it is dead already, or the cluster gone
            ray.kill(self._actor)

    def close(self) -> None:
        self.kill()

    def _get(self, asked: Any, limit_s: float | None) -> Any:
        import ray

        try:
            return ray.get(asked, timeout=limit_s)
        except ray.exceptions.GetTimeoutError:
            self.kill()
            raise EndedError(f"{self.where} was ended: it did not answer in time", is_late=True) from None
        except ray.exceptions.RayError as error:
            raise EndedError(f"{self.where} {in_one_line(error)}") from None
