"""Engines in other processes, for `redline bench weight-sync`: a process of their own, a connection, a transport."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from redline.child import Child
from redline.lab.bench.weight_engine import CONNECT_S, sums_of
from redline.weight_sync import Broadcast, CheckpointEngine, CudaIpc, Sending
from redline.weight_sync.buckets import form_of
from redline.weight_sync.transport import Transport
from redline.wire import TOKEN_VARIABLE, Connection, connect, make_token

START_S = 300.0


@dataclass(slots=True, frozen=True)
class Link:
    """What a transport is made of."""

    channels: Sequence[Connection]
    tensors: Mapping[str, Tensor]
    folder: Path
    sending: Sending


APART: Mapping[str, Callable[[Link], Transport]] = {
    "cuda_ipc": lambda link: CudaIpc(link.channels, link.tensors, link.sending),
    "broadcast": lambda link: Broadcast(link.channels, link.tensors, link.sending),
    "checkpoint_engine": lambda link: CheckpointEngine(link.channels, link.tensors, link.folder, link.sending),
}
"""Name → a transport to engines of other processes."""


class EngineApart:
    """One engine in another process, with a second set of weights, and the transport to it. A context manager that ends it."""

    def __init__(self, name: str, tensors: Mapping[str, Tensor], sending: Sending | None = None) -> None:
        """Start the process and open the transport of this name to it. Blocks until both are there."""
        self._folder = tempfile.TemporaryDirectory(prefix="redline-weight-sync-")
        token = make_token()
        self._child = Child([sys.executable, "-m", "redline.lab.bench.weight_engine"], {TOKEN_VARIABLE: token}, own_group=True)
        try:
            device = next(iter(tensors.values())).device
            forms = [form_of(key, tensor).to_json() for key, tensor in tensors.items()]
            address = self._child.ask(json.dumps({"forms": forms, "device": device.type}), START_S)["address"]
            self._connection = connect(address, token, "weights", CONNECT_S)
            self._connection.name = f"the engine of {name}"
            link = Link([self._connection], tensors, Path(self._folder.name), sending or Sending())
            self.transport = APART[name](link)
        except BaseException:
            self._child.kill()
            self._folder.cleanup()
            raise

    @property
    def pid(self) -> int:
        return self._child.pid

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise AssertionError unless the other process would read exactly these bytes."""
        if next(iter(tensors.values())).is_cuda:
            torch.cuda.synchronize()
        theirs, ours = self._child.ask("", START_S)["sums"], sums_of(tensors)
        assert theirs == ours, f"not the same: {', '.join(name for name in ours if theirs.get(name) != ours[name])}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with suppress(Exception):
            self.transport.close()
        self._connection.close()
        self._child.close()
        self._folder.cleanup()
