"""The processes of engines, as the run keeps them: here a worker is a listener in this process that says it is ready."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import pytest

from redline.errors import EngineLostError, WireClosed, WireError
from redline.launch.workers.pool import EnginePool
from redline.launch.workers.spawn import EngineSpec, Spawned
from redline.types import EngineStats
from redline.wire import Connection, Listener, listen

TOKEN = "a-token-of-the-tests"


@dataclass
class Worker:
    """Implements `Spawned`."""

    listener: Listener
    is_killed: bool = False
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
        self.listener.close()
        for connection in self.connections:
            connection.close()

    def why_ended(self) -> str:
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
