"""The processes of engines, as the run keeps them: here a worker is a listener in this process that says it is ready."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from redline.errors import EngineLostError, WireClosed, WireError
from redline.launch.workers.pool import EnginePool
from redline.launch.workers.spawn import EngineSpec, Spawned
from redline.types import EngineStats, WeightUpdate
from redline.wire import Connection, Listener, listen

TOKEN = "a-token-of-the-tests"


@dataclass
class Worker:
    """Implements `Spawned`."""

    listener: Listener
    is_killed: bool = False
    hears_no_kill: bool = False
    """Whether it goes on: its machine does not answer."""
    token: str = TOKEN
    connections: list[Connection] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with suppress(WireError):  # it is killed
            self.connections.append(self.listener.accept(60))
            self.connections[0].send("ready", {"limits": None, "adapters": [], "stats": asdict(EngineStats())})
            self.connections.append(self.listener.accept(60))

    @property
    def address(self) -> str:
        return self.listener.address

    def is_alive(self) -> bool:
        return not self.is_killed

    def kill(self) -> None:
        self.is_killed = True
        if self.hears_no_kill:
            return
        self.listener.close()
        for connection in self.connections:
            connection.close()

    def why_ended(self) -> str:
        if self.hears_no_kill and threading.current_thread() is threading.main_thread():
            time.sleep(0.2)  # the thread that reads sees the end of the connection meanwhile
        return ""


class Workers:
    """Implements `Spawner`."""

    def __init__(self) -> None:
        self.made: list[Worker] = []

    def spawn(self, spec: EngineSpec) -> Spawned:
        self.made.append(Worker(listen(token=TOKEN)))
        return self.made[-1]


def test_an_engine_that_gets_no_weights_any_more_is_ended_also_while_it_is_started() -> None:
    workers = Workers()
    pool = EnginePool(workers, [EngineSpec({}, "engine 0")])
    lost = WireClosed("engine 0 has ended the connection")

    def lose(channel: Connection) -> Any:
        channel.close()  # as `AskedEngines` does before it tells of a loss
        pool.lose(channel, lost)

    pool.lose(pool.channels[0], lost)
    assert workers.made[0].is_killed
    pool.catch_up = lose
    with pytest.raises(EngineLostError, match="engine 0 was lost as soon as it had its weights"):
        pool.restart(0)
    assert workers.made[1].is_killed
    pool.catch_up = lambda channel: None
    pool.restart(0)
    assert not workers.made[2].is_killed
    pool.lose(pool.channels[0], lost)
    assert workers.made[2].is_killed
    pool.close()


def test_an_engine_that_gets_no_weights_any_more_takes_no_request_where_its_machine_does_not_end_it() -> None:
    """It would say that it has another version than the others, and end the run."""
    workers = Workers()
    pool = EnginePool(workers, [EngineSpec({}, "engine 0")])
    workers.made[0].hears_no_kill = True
    pool.lose(pool.channels[0], WireClosed("engine 0 did not answer 'bucket' of the weights within 120 s"))
    with pytest.raises(EngineLostError, match="it gets no weights any more: engine 0 did not answer 'bucket'"):
        pool.engines[0].apply(WeightUpdate(1, (), 0))
    pool.close()
