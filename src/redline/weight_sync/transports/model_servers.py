"""Servers of others, which load weights from a folder that they can read: SGLang's and vLLM's.

    send      write an ordinary model folder, under a name that appears when it is whole
    adopt     pause ─► load the folder ─► forget cached keys ─► go on
    revert    the same, with the folder of the version before

A folder's name is the label of its weights on the server: by it a server is found out that was started again.

Neither takes tensors in the body of a request without unpickling them, and neither has a second set of weights: they stand
still while they load. Their other ways (NCCL, CUDA IPC) need GPUs that trainer and server share, or a group of their processes.
"""

from __future__ import annotations

import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlencode

from safetensors import SafetensorError
from torch import Tensor

from redline.errors import ServerAwayError, WeightSyncError
from redline.weight_sync.transports.http_calls import HttpServer

Write = Callable[[Path, Mapping[str, Tensor]], None]
"""Writes a model folder of the policy's tensors."""


class FolderServer(ABC):
    """A server that loads model folders. Implements `http.WeightServer`."""

    def __init__(self, server: HttpServer, folder: Path, write: Write, model: Path) -> None:
        """`folder` is where versions are written; `model` is the folder of the weights that the server was started with."""
        self._server, self._folder, self._write = server, folder, write
        self._current, self._sent = model, Path()
        self._before: Path | None = None
        """What `revert` goes back to."""
        self._label: str | None = None
        """What the server calls the weights that it was left with; None before the first. Of the folder's name, which no other
        run has."""
        self._written: list[Path] = []
        """Versions that are in the folder by this object's doing; it deletes no others."""
        folder.mkdir(parents=True, exist_ok=True)

    def send(self, version: int, tensors: Mapping[str, Tensor], found: Mapping[str, str]) -> int:
        self._before = None  # where this fails, the server has what it had
        path = self._folder / f"{version:06}-{secrets.token_hex(3)}"
        part = path.with_name(path.name + ".part")
        self._written += [part, path]
        try:
            self._write(part, tensors)
            part.rename(path)
        except (OSError, SafetensorError) as error:
            why = f"{path}: the weights for {self._server.url} cannot be written: {error}"
            raise WeightSyncError(why, "make room there, or name another engine.weights_folder") from error
        self._before, self._sent = self._current, path
        self._prune()
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))

    def _prune(self) -> None:
        needed = (self._sent, self._current)
        self._delete([path for path in self._written if path not in needed])

    def _delete(self, paths: Sequence[Path]) -> None:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
            self._written.remove(path)

    def close(self) -> None:
        """Delete the versions that were written: the server has loaded the last one, and the run keeps its own."""
        self._delete(list(self._written))

    def verify(self) -> None:
        if not any(self._sent.glob("*.safetensors")):
            raise WeightSyncError(f"{self._sent}: no weights for {self._server.url}", "is the folder's disk full?")

    def is_lost(self) -> bool:
        return self._label is not None and self.label() != self._label

    def adopt(self) -> bool:
        """Load what was sent. Where that fails the version before is loaded again, and only then the server goes on. Returns
        whether it had lost what it was left with, which it is asked once it is paused."""
        self.pause()
        try:
            was_lost = self.is_lost()
            self._take(self._sent)
        except ServerAwayError:  # it has ended, or is paused still
            raise
        except WeightSyncError:
            self._take_before()
            self.resume()
            raise
        self.resume()
        return was_lost

    def revert(self) -> None:
        """Load the version before once more. A server that cannot stays paused: part of its weights may be new."""
        if self._before is None:
            return
        self.pause()
        self._take_before()
        self.resume()

    def _take_before(self) -> None:
        assert self._before is not None
        path, self._before = self._before, None
        try:
            self._take(path)
        except WeightSyncError as error:
            why = f"{self._server.url} is paused: it loads neither the new weights nor those before ({error.message})"
            raise WeightSyncError(why, "start that server again, and then the run") from error

    def _take(self, path: Path) -> None:
        self.load(path.name, path.absolute())
        self._current, self._label = path, path.name

    @abstractmethod
    def pause(self) -> None:
        """Begin no step until `resume`; requests under way are kept."""

    @abstractmethod
    def load(self, label: str, path: Path) -> None:
        """Load the weights of a model folder under this label, and forget what was computed with others. Raises
        WeightSyncError."""

    @abstractmethod
    def label(self) -> str | None:
        """The label of the weights that it has; a server that was started again has another."""

    @abstractmethod
    def resume(self) -> None: ...


class SglangServer(FolderServer):
    """SGLang's own server. Requests under way are computed again from their tokens (`retract`)."""

    def pause(self) -> None:
        self._server.post("/pause_generation", {"mode": "retract"})

    def load(self, label: str, path: Path) -> None:
        asked = {"model_path": str(path), "flush_cache": True, "weight_version": label}
        said = self._server.post("/update_weights_from_disk", asked)
        if said.get("success") is not True:
            why = f"{self._server.url} did not load {path}: {said.get('message') or said}"
            raise WeightSyncError(why, "the server must see the folder under this path (engine.weights_folder)")

    def label(self) -> str | None:
        return self._server.get("/model_info").get("weight_version")

    def resume(self) -> None:
        self._server.post("/continue_generation")


class VllmServer(FolderServer):
    """vLLM's own server, started with VLLM_SERVER_DEV_MODE=1. Requests under way go on, computed again from their tokens."""

    def pause(self) -> None:
        self._server.post("/pause?" + urlencode({"mode": "keep"}))

    def load(self, label: str, path: Path) -> None:
        self._server.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})
        said = self._server.post("/reset_prefix_cache?" + urlencode({"reset_running_requests": "true"}))
        if said.get("success") is not True:
            why = f"{self._server.url} keeps keys of the weights before in its cache"
            raise WeightSyncError(why, "start it with --no-enable-prefix-caching, or update while nothing is sampled")
        self._server.post("/update_weight_version", {"new_version": label})

    def label(self) -> str | None:
        return self._server.get("/weight_info").get("weight_version")

    def resume(self) -> None:
        self._server.post("/resume")
