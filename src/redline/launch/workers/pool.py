"""The processes of a run's engines: started together, each connected twice, and started again one by one.

spec ──► spawner ──► process ──┬─ requests ──► RemoteEngine
                               └─ weights ───► a channel of the transport
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from redline.addresses import is_loopback
from redline.engine.remote.client import RemoteEngine, TakeSample, open_engine
from redline.engine.remote.patience import Patience
from redline.errors import EngineLostError, WireError
from redline.launch.workers.spawn import EngineSpec, Spawned, Spawner
from redline.wire import Connection, connect

CLOSE_S = 10.0
"""Seconds that the processes have to end by themselves, with their spans written."""


@dataclass(slots=True)
class EngineProcess:
    """One process, and the two connections to it."""

    spawned: Spawned
    engine: RemoteEngine
    channel: Connection

    def close(self) -> None:
        self.channel.close()
        self.engine.close()


def _no_weights_yet(channel: Connection) -> None:
    raise EngineLostError(f"{channel.name} died before the run began", "look at what it wrote, and start the run again")


class EnginePool:
    """All engine processes of a run."""

    def __init__(
        self,
        spawner: Spawner,
        specs: Sequence[EngineSpec],
        patience: Patience | None = None,
        *,
        take_sample: TakeSample | None = None,
    ) -> None:
        """Start all of them at once and block until each has loaded its model. Where one does not start all are ended, and its
        EngineLostError is raised. `take_sample` gets the samples that they take of their machines."""
        self._spawner, self._specs, self._patience = spawner, list(specs), patience or Patience()
        self._take_sample = take_sample
        self.arrived = threading.Event()
        """Set when something has come from any of them."""
        self.catch_up: Callable[[Connection], object] = _no_weights_yet
        """Brings the engine at the end of this channel to the current version: `WeightProtocol.catch_up`. Until it is set, an
        engine that was lost is not taken back: it would sample from the weights that it has loaded, whatever its version."""
        self._lock = threading.Lock()
        self._is_closed = False
        self._processes = self._start_all()

    @property
    def engines(self) -> list[RemoteEngine]:
        return [process.engine for process in self._processes]

    @property
    def channels(self) -> list[Connection]:
        """The connections for weights, one for each engine."""
        return [process.channel for process in self._processes]

    @property
    def spawned(self) -> list[Spawned]:
        return [process.spawned for process in self._processes]

    def restart(self, index: int) -> RemoteEngine:
        """End what is left of an engine, start it again and bring it to the current version. Blocks until then. Raises
        EngineLostError or another RedlineError where that fails; nothing is left behind then."""
        old = self._processes[index]
        old.close()
        old.spawned.kill()
        new = self._start(index)
        try:
            self.catch_up(new.channel)
        except BaseException:
            new.close()
            new.spawned.kill()
            raise
        with self._lock:
            why = "is no longer needed" if self._is_closed else "was lost as soon as it had its weights"
            if not self._is_closed and not new.channel.is_closed:
                self._processes[index] = new
                return new.engine
        new.close()
        new.spawned.kill()
        raise EngineLostError(f"{self._specs[index].name} {why}")

    def lose(self, channel: Connection, error: WireError) -> None:
        """End the process whose channel for weights failed: it would go on with old weights. It takes no request any more,
        also where its machine does not end it. One that is being started is not among them yet: `restart` sees that its channel
        is closed."""
        with self._lock:
            lost = [process for process in self._processes if process.channel is channel]
        for process in lost:
            process.spawned.kill()
            process.engine.lose(f"it gets no weights any more: {error.message}")

    def close(self) -> None:
        """End all processes. Blocks until each is gone: they have some seconds to write their spans."""
        with self._lock:
            self._is_closed = True
        for process in self._processes:
            process.close()
        until = time.monotonic() + CLOSE_S
        for process in self._processes:
            while process.spawned.is_alive() and time.monotonic() < until:
                time.sleep(0.02)
            process.spawned.kill()

    def _start_all(self) -> list[EngineProcess]:
        futures = [_in_thread(self._start, index) for index in range(len(self._specs))]
        started = [future.result() for future in futures if future.exception() is None]
        if len(started) < len(futures):
            for process in started:
                process.close()
                process.spawned.kill()
            raise next(error for future in futures if (error := future.exception()) is not None)
        return started

    def _start(self, index: int) -> EngineProcess:
        spec = self._specs[index]
        spawned = self._spawner.spawn(spec)
        host = spawned.address.rpartition(":")[0].strip("[]")
        name = spec.name if is_loopback(host) else f"{spec.name} at {host}"
        try:
            engine = open_engine(
                spawned.address,
                spawned.token,
                name,
                patience=self._patience,
                why_ended=spawned.why_ended,
                arrived=self.arrived,
                take_sample=self._take_sample,
            )
            channel = connect(spawned.address, spawned.token, "weights", self._patience.connect_s)
        except WireError as error:
            spawned.kill()
            raise EngineLostError(f"{name} did not answer: {error.message}; {spawned.why_ended()}", error.hint) from None
        except BaseException:
            spawned.kill()
            raise
        channel.name = name
        return EngineProcess(spawned, engine, channel)


def _in_thread(start: Callable[[int], EngineProcess], index: int) -> Future[EngineProcess]:
    """Start an engine in a thread that does not keep this process from ending."""
    started: Future[EngineProcess] = Future()

    def run() -> None:
        try:
            started.set_result(start(index))
        except BaseException as error:
            started.set_exception(error)

    threading.Thread(target=run, name="engine start", daemon=True).start()
    return started
