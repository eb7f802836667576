"""Weights to SGLang's and vLLM's servers, as their documentation has the calls; the servers here only write them down."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from redline.errors import WeightSyncError
from redline.types import WeightSet
from redline.weight_sync.plan import TransferPlan
from redline.weight_sync.transports.http import HttpWeights
from redline.weight_sync.transports.http_calls import HttpServer
from redline.weight_sync.transports.model_servers import FolderServer, SglangServer, VllmServer


@dataclass
class Documented:
    """Answers as the two servers do, and loads what it is told to."""

    calls: list[str] = field(default_factory=list)
    loaded: dict[str, Tensor] = field(default_factory=dict)
    version: str = ""
    is_paused: bool = False
    fails: int = 0
    """Folders that it will not load."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        path = path.partition("?")[0]
        self.calls.append(path)
        if path in ("/pause_generation", "/pause"):
            self.is_paused = True
        elif path in ("/continue_generation", "/resume"):
            self.is_paused = False
        elif path == "/update_weights_from_disk":
            return 200, {"success": self._load(body["model_path"], body["weight_version"]), "message": "no such model"}
        elif path == "/collective_rpc":
            assert body["method"] == "reload_weights"
            return (200, {"results": [None]}) if self._load(body["kwargs"]["weights_path"], "") else (500, {"error": "lost"})
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path in ("/model_info", "/weight_info"):
            return 200, {"weight_version": self.version}
        else:
            assert path == "/reset_prefix_cache"
        return 200, {"success": True}

    def _load(self, path: str, version: str) -> bool:
        assert self.is_paused, "only between two steps"
        if self.fails:
            self.fails -= 1
            return False
        self.loaded, self.version = load_file(Path(path) / "model.safetensors"), version
        return True


@contextmanager
def listening(server: Documented) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))) or b"{}")
            status, content = server.answer(self.path, body)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        do_GET = do_POST

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def write(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    folder.mkdir(parents=True)
    save_file(dict(tensors), folder / "model.safetensors")


@pytest.mark.parametrize("kind", [SglangServer, VllmServer])
def test_a_server_loads_every_version_from_the_folder_and_goes_back_where_one_fails(
    kind: type[FolderServer], tmp_path: Path
) -> None:
    tensors = {"weight": torch.zeros(3)}
    write(tmp_path / "model", tensors)
    write(tmp_path / "versions" / "somebody-else's", tensors)
    there = Documented()
    with listening(there) as url:
        transport = HttpWeights([kind(HttpServer(url, None, 60), tmp_path / "versions", write, tmp_path / "model")], tensors)

        def take(version: int) -> None:
            weights = WeightSet(version, tensors)
            assert transport.move(TransferPlan(version, ("weight",)), weights) > 0
            transport.verify(weights)
            transport.adopt()

        for version in (1, 2, 3):
            tensors["weight"].fill_(version)
            take(version)
            assert torch.equal(there.loaded["weight"], tensors["weight"])
            assert there.version.startswith(f"{version:06}-"), "no other run has given its weights this label"
            assert transport.look()
            assert not there.is_paused
        assert len(list((tmp_path / "versions").iterdir())) <= 3
        assert (tmp_path / "versions" / "somebody-else's" / "model.safetensors").exists()
        tensors["weight"].fill_(4)
        there.fails, before = 1, len(there.calls)
        with pytest.raises(WeightSyncError, match=url):
            take(4)
        since = there.calls[before:]
        assert len([call for call in since if "pause" in call]) == 1, "it does not go on until it is whole again"
        transport.revert(4)
        assert torch.equal(there.loaded["weight"], torch.full((3,), 3.0)), "whole again, before it goes on"
        assert not there.is_paused
        take(4)
        transport.revert(4)
        assert torch.equal(there.loaded["weight"], torch.full((3,), 3.0))
        assert (tmp_path / "versions").exists()
        transport.close()
        assert [path.name for path in (tmp_path / "versions").iterdir()] == ["somebody-else's"], "nothing of ours stays"


@pytest.mark.parametrize("kind", [SglangServer, VllmServer])
def test_a_server_that_was_started_again_is_noticed_and_loads_the_version_again(
    kind: type[FolderServer], tmp_path: Path
) -> None:
    tensors, there = {"weight": torch.ones(3)}, Documented(version="default")
    write(tmp_path / "model", tensors)
    with listening(there) as url:
        transport = HttpWeights([kind(HttpServer(url, None, 60), tmp_path / "versions", write, tmp_path / "model")], tensors)
        weights = WeightSet(7, tensors)
        transport.move(TransferPlan(7, ("weight",)), weights)
        transport.verify(weights)
        transport.adopt()
        assert transport.look()
        there.version, there.loaded = "default", {}
        assert not transport.look()
        transport.restore(weights)
        assert transport.look()
        assert torch.equal(there.loaded["weight"], tensors["weight"])


@pytest.mark.parametrize("kind", [SglangServer, VllmServer])
def test_a_server_that_is_started_again_after_a_version_was_written_is_counted_when_it_loads_it(
    kind: type[FolderServer], tmp_path: Path
) -> None:
    tensors, there = {"weight": torch.ones(3)}, Documented(version="default")
    write(tmp_path / "model", tensors)
    with listening(there) as url:
        transport = HttpWeights([kind(HttpServer(url, None, 60), tmp_path / "versions", write, tmp_path / "model")], tensors)
        for version in (1, 2, 3):
            weights = WeightSet(version, tensors)
            transport.move(TransferPlan(version, ("weight",)), weights)
            transport.verify(weights)
            if version == 3:
                there.version = "default"  # what it samples from now on is its own model's
            transport.adopt()
            assert transport.look()
            assert transport.num_losses == (version == 3)


def test_a_folder_that_could_not_be_written_whole_does_not_stay(tmp_path: Path) -> None:
    def fails(folder: Path, tensors: Mapping[str, Tensor]) -> None:
        write(folder, tensors)
        raise OSError("no space left on device")

    server = VllmServer(HttpServer("http://127.0.0.1:1"), tmp_path / "versions", fails, tmp_path / "model")
    with pytest.raises(WeightSyncError, match="no space"):
        server.send(1, {"weight": torch.ones(3)}, {})
    server.close()
    assert not list((tmp_path / "versions").iterdir())


@pytest.mark.parametrize("kind", [SglangServer, VllmServer])
def test_a_server_stays_where_it_is_when_a_version_cannot_be_written(kind: type[FolderServer], tmp_path: Path) -> None:
    tensors, there, is_full = {"weight": torch.zeros(3)}, Documented(), False
    write(tmp_path / "model", tensors)

    def writes(folder: Path, found: Mapping[str, Tensor]) -> None:
        if is_full:
            raise OSError("no space left on device")
        write(folder, found)

    with listening(there) as url:
        transport = HttpWeights([kind(HttpServer(url, None, 60), tmp_path / "versions", writes, tmp_path / "model")], tensors)
        for version in (1, 2):
            tensors["weight"].fill_(version)
            transport.move(TransferPlan(version, ("weight",)), WeightSet(version, tensors))
            transport.adopt()
        is_full = True
        with pytest.raises(WeightSyncError, match="no space"):
            transport.move(TransferPlan(3, ("weight",)), WeightSet(3, tensors))
        transport.revert(3)
        assert torch.equal(there.loaded["weight"], torch.full((3,), 2.0))
        assert transport.look()


@pytest.mark.parametrize("kind", [SglangServer, VllmServer])
def test_a_server_that_loads_no_folder_at_all_stays_paused(kind: type[FolderServer], tmp_path: Path) -> None:
    tensors, there = {"weight": torch.ones(3)}, Documented(fails=2)
    write(tmp_path / "model", tensors)
    with listening(there) as url:
        transport = HttpWeights([kind(HttpServer(url, None, 60), tmp_path / "versions", write, tmp_path / "model")], tensors)
        weights = WeightSet(1, tensors)
        transport.move(TransferPlan(1, ("weight",)), weights)
        transport.verify(weights)
        with pytest.raises(WeightSyncError, match="is paused"):
            transport.adopt()
        transport.revert(1)
        assert there.is_paused
