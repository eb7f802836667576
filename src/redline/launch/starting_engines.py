"""The processes of a run's engines, which load their models while the trainer loads its own.

engines on devices of their own    begin at once ──────────────────► pool
engines that share a GPU           wait for the trainer: they get what it leaves ──► pool
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from redline.config import Config
from redline.launch.engine_processes import engine_specs
from redline.launch.joining import open_to, take_token
from redline.launch.placement import Placement
from redline.launch.workers.joined import JoinedEngines
from redline.launch.workers.pool import EnginePool
from redline.launch.workers.ray_engines import RayActors
from redline.launch.workers.spawn import EngineSpec, LocalProcesses, Spawned, Spawner
from redline.telemetry import RunFolder, span
from redline.telemetry.machine.hosts import HostSamples


class StartingEngines:
    """Engines of a placement that are being started. Make it in the main thread, before the trainer loads its model."""

    def __init__(
        self,
        config: Config,
        placement: Placement,
        folder: RunFolder,
        tell: Callable[[str], None],
        hosts: HostSamples | None = None,
    ) -> None:
        """Begin to start the engines, where that need not wait for the trainer. Does not block. `hosts` takes the samples of
        their machines."""
        self._config, self._placement, self.folder, self._hosts = config, placement, folder, hosts
        self._spawners = Spawners(config, folder, tell)
        self._pool: Future[EnginePool] | None = None
        if not any(map(placement.shares_gpu, placement.engines)):
            self._pool = self._begin(0)

    def pool(self, weight_bytes: int) -> EnginePool:
        """Return the processes. Blocks until each has loaded its model. Raises EngineLostError where one does not start.
        `weight_bytes` is the size of one set of weights."""
        if self._pool is None:
            self._pool = self._begin(weight_bytes)
        with span("engine.setup"):
            return self._pool.result()

    def close(self) -> None:
        """End all processes, also those that are being started. Those that work have some seconds to write their spans."""
        self._spawners.close_starting()
        if self._pool is not None:
            if not self._pool.done():
                self._spawners.close()
            self._pool.add_done_callback(_close_pool)
        self._spawners.close()

    def _begin(self, weight_bytes: int) -> Future[EnginePool]:
        hosts = self._hosts
        sampling = hosts.sampling if hosts else None
        specs = engine_specs(self._config, self._placement, self.folder, weight_bytes, sampling)
        started: Future[EnginePool] = Future()

        def start() -> None:
            try:
                started.set_result(EnginePool(self._spawners, specs, take_sample=hosts.take if hosts else None))
            except BaseException as error:
                started.set_exception(error)

        threading.Thread(target=start, name="engines start", daemon=True).start()
        return started


def _close_pool(pool: Future[EnginePool]) -> None:
    if pool.exception() is None:
        pool.result().close()


class Spawners:
    """Starts each engine where its spec says: here, on the cluster of the run, or on a machine that has joined. Implements
    `Spawner`."""

    def __init__(self, config: Config, folder: RunFolder, tell: Callable[[str], None]) -> None:
        wanted = config.placement
        self._local = LocalProcesses()
        self._here: Spawner = RayActors(first_bundle=wanted.trainers) if wanted.cluster == "ray" else self._local
        self._joined: JoinedEngines | None = None
        if wanted.remote_engines:
            self._joined = JoinedEngines(open_to(config), take_token(), wanted.join_timeout_s, folder.spans, tell)

    def spawn(self, spec: EngineSpec) -> Spawned:
        """Start a worker and block until it listens. Raises EngineLostError, with what it said last, where it does not."""
        if not spec.remote:
            return self._here.spawn(spec)
        assert self._joined is not None, "placement.remote_engines"
        return self._joined.spawn(spec)

    def close_starting(self) -> None:
        """End what does not listen yet, and start nothing more."""
        self._local.close()
        if self._joined is not None:
            self._joined.stop_starting()

    def close(self) -> None:
        """Let the machines that have joined go."""
        if self._joined is not None:
            self._joined.close()
