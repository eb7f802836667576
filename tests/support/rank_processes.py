"""A few processes that talk through gloo, forked from one that has imported torch, and given one function after the other."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from support.forks import FORKS
from support.ports import free_port

PATIENCE_S = 600


class Ranks:
    """The processes. Functions and arguments travel by pickle: functions are top-level ones of modules in `tests/`."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What it returns on each of them, in order; where it raises, an AssertionError with the traceback."""
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [pipe.recv() if pipe.poll(PATIENCE_S) else ("no answer", None) for pipe in self._pipes]
        for rank, (error, _) in enumerate(answers):
            assert error is None, f"rank {rank}: {error}"
        return [result for _, result in answers]


@contextmanager
def started_ranks(world: int) -> Iterator[Ranks]:
    port = free_port()
    pipes, processes = [], []
    for rank in range(world):
        ours, theirs = FORKS.Pipe()
        process = FORKS.Process(target=_serve, args=(theirs, rank, world, port), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        yield Ranks(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, rank: int, world: int, port: int) -> None:
    """Before anything connects, the environment is as torchrun would have it."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch

    torch.set_num_threads(1)
    while True:
        function, arguments = pipe.recv()
        try:
            pipe.send((None, function(*arguments)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
