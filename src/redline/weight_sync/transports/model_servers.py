"""Servers of others, which load weights from a folder that they can read: SGLang's and vLLM's.

    send      write an ordinary model folder, under a name that appears when it is whole
    adopt     pause ─► load the folder ─► forget cached keys ─► go on
    revert    the same, with the folder of the version before

Neither takes tensors in the body of a request without unpickling them, and neither has a second set of weights: they stand
still while they load. Their other ways (NCCL, CUDA IPC) need GPUs that trainer and server share, or a group of their processes.
"""

from __future__ import annotations

import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlencode

from torch import Tensor

from redline.errors import WeightSyncError
from redline.weight_sync.transports.http_calls import HttpServer

Write = Callable[[Path, Mapping[str, Tensor]], None]
"""Writes a model folder of the policy's tensors."""


class FolderServer(ABC):
    """A server that loads model folders. Implements `http.WeightServer`."""

    def __init__(self, server: HttpServer, folder: Path, write: Write, model: Path) -> None:
        """`folder` is where versions are written; `model` is the folder of the weights that the server was started with."""
        self._server, self._folder, self._write = server, folder, write
        self._current, self._sent = model, Path()
        self._version, self._sent_version = 0, 0
        self._before: tuple[int, Path] | None = None
        self._written: list[Path] = []
        """Versions that are in the folder by this object's doing; it deletes no others."""
        folder.mkdir(parents=True, exist_ok=True)

    def send(self, version: int, tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> int:
        path = self._folder / f"{version:06}-{secrets.token_hex(3)}"
        part = path.with_name(path.name + ".part")
        self._write(part, tensors)
        part.rename(path)
        self._written.append(path)
        self._before = self._version, self._current
        self._sent_version, self._sent = version, path
        self._prune()
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))

    def _prune(self) -> None:
        needed = (self._sent, self._current)
        for path in [path for path in self._written if path not in needed]:
            shutil.rmtree(path)
            self._written.remove(path)

    def verify(self) -> None:
        if not any(self._sent.glob("*.safetensors")):
            raise WeightSyncError(f"{self._sent}: no weights for {self._server.url}", "is the folder's disk full?")

    def adopt(self) -> None:
        try:
            self._take(self._sent_version, self._sent)
        except WeightSyncError:
            with suppress(WeightSyncError):  # part of its weights may be new
                self.revert()
            raise
        self._version, self._current = self._sent_version, self._sent

    def revert(self) -> None:
        if self._before is None:
            return
        (version, path), self._before = self._before, None
        self._take(version, path)
        self._version, self._current = version, path

    def _take(self, version: int, path: Path) -> None:
        with self._paused():
            self.load(version, path.absolute())

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self.pause()
        try:
            yield
        finally:
            self.resume()

    @abstractmethod
    def pause(self) -> None:
        """Begin no step until `resume`; requests under way are kept."""

    @abstractmethod
    def load(self, version: int, path: Path) -> None:
        """Load the weights of a model folder, and forget what was computed with others. Raises WeightSyncError."""

    @abstractmethod
    def resume(self) -> None: ...


class SglangServer(FolderServer):
    """SGLang's own server. Requests under way are computed again from their tokens (`retract`)."""

    def pause(self) -> None:
        self._server.post("/pause_generation", {"mode": "retract"})

    def load(self, version: int, path: Path) -> None:
        asked = {"model_path": str(path), "flush_cache": True, "weight_version": str(version)}
        said = self._server.post("/update_weights_from_disk", asked)
        if said.get("success") is not True:
            why = f"{self._server.url} did not load {path}: {said.get('message') or said}"
            raise WeightSyncError(why, "the server must see the folder under this path (engine.weights_folder)")

    def resume(self) -> None:
        self._server.post("/continue_generation")


class VllmServer(FolderServer):
    """vLLM's own server, started with VLLM_SERVER_DEV_MODE=1. Requests under way go on, computed again from their tokens."""

    def pause(self) -> None:
        self._server.post("/pause?" + urlencode({"mode": "keep"}))

    def load(self, version: int, path: Path) -> None:
        self._server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
        said = self._server.post("/reset_prefix_cache?" + urlencode({"reset_running_requests": "true"}))
        if said.get("success") is not True:
            why = f"{self._server.url} keeps keys of the weights before in its cache"
            raise WeightSyncError(why, "start it with --no-enable-prefix-caching, or update while nothing is sampled")
        self._server.post("/update_weight_version", {"new_version": str(version)})

    def resume(self) -> None:
        self._server.post("/resume")
