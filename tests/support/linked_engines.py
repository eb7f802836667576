"""Engines of other processes, as a transport sees them: a real connection, a real receiver, in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from redline.errors import RedlineError
from redline.types import WeightUpdate
from redline.weight_sync import WeightReceiver
from redline.wire import Connection, connect, listen, make_token


def connected(name: str = "engine-0") -> tuple[Connection, Connection]:
    """Two ends of one connection: the trainer's, and that of the engine which it knows by this name."""
    token = make_token()
    with listen(token=token) as listener:
        ours = connect(listener.address, token, "weights", 60)
        theirs = listener.accept(60)
    ours.name = name
    return ours, theirs


@dataclass
class WorkerEngine:
    """The engine of a worker: notes what happens to it. Implements `receiver.UpdatedEngine`."""

    versions: list[int] = field(default_factory=list)
    is_held: bool = False
    num_holds: int = 0
    refuses: int | None = None
    """The version that it does not take."""
    failure: RedlineError | None = None
    """Why it takes no further step."""

    @contextmanager
    def held(self) -> Iterator[None]:
        self.is_held, self.num_holds = True, self.num_holds + 1
        try:
            yield
        finally:
            self.is_held = False

    def apply(self, update: WeightUpdate) -> None:
        assert self.is_held, "only between two steps"
        if update.version == self.refuses:
            raise RuntimeError("the engine does not take it")
        self.versions.append(update.version)

    def fail(self, error: RedlineError) -> None:
        self.failure = error


class LinkedEngine:
    """A worker with a second set of weights."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        name: str = "engine-0",
        logprobs: Callable[[Sequence[int]], Sequence[float]] | None = None,
        engine: WorkerEngine | None = None,
        make_receiver: Callable[..., WeightReceiver] = WeightReceiver,
    ) -> None:
        contiguous = torch.contiguous_format
        self.tensors = {key: torch.zeros_like(tensor, memory_format=contiguous) for key, tensor in tensors.items()}
        self.engine = engine or WorkerEngine()
        self.receiver = make_receiver(self.tensors, self.engine, logprobs)
        self.channel, self.worker = connected(name)
        self._thread = threading.Thread(target=self.receiver.serve, args=(self.worker,), daemon=True)
        self._thread.start()

    def has(self, tensors: Mapping[str, Tensor]) -> bool:
        return all(torch.equal(self.tensors[name], tensor) for name, tensor in tensors.items())

    def close(self) -> None:
        self.channel.close()
        self._thread.join(60)
        assert not self._thread.is_alive()
