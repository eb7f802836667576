"""A folder of versions: whole or not there at all, never gone while somebody needs it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from redline.errors import ModelError, RunFolderError
from redline.weight_sync import version_folder
from redline.weight_sync.tensor_bytes import digests, pack, unpack
from redline.weight_sync.version_folder import StoredTensors, VersionFolder, current_version, reading


def make_tensors(version: int) -> dict[str, Tensor]:
    """`frozen` is the same in all versions; a row of a larger tensor, a scalar and an empty one are among the others."""
    torch.manual_seed(version)
    return {
        "embed": torch.randn(40, 8),
        "norm": torch.randn(8).bfloat16(),
        "head": torch.randn(8, 40).T,
        "scalar": torch.tensor(float(version)),
        "empty": torch.empty(0, 3),
        "frozen": torch.ones(200, dtype=torch.float16),
    }


def publish(folder: VersionFolder, version: int) -> dict[str, Tensor]:
    tensors = make_tensors(version)
    folder.write(version, tensors)
    folder.make_current(version)
    return tensors


def read(path: Path, version: int | None = None) -> tuple[int, dict[str, Tensor]]:
    with reading(path, version) as manifest:
        return manifest.version, dict(StoredTensors(path, manifest))


def assert_same(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor), name


def shard_bytes(path: Path) -> int:
    return sum(shard.stat().st_size for shard in (path / "shards").iterdir())


def test_a_version_is_read_back_bit_for_bit_and_a_late_reader_gets_the_current_one(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path, shard_bytes=500)
    publish(folder, 0)
    tensors = publish(folder, 1)
    folder.write(2, make_tensors(2))  # written, not verified by the engines yet
    version, found = read(tmp_path)
    assert version == 1
    assert_same(found, tensors)
    assert_same(read(tmp_path, 2)[1], make_tensors(2))


def test_shards_are_ordinary_safetensors_files(tmp_path: Path) -> None:
    publish(VersionFolder(tmp_path), 0)
    [shard] = (tmp_path / "shards").iterdir()
    assert_same(load_file(shard), make_tensors(0))


def test_only_tensors_whose_bytes_changed_are_written_again(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path, shard_bytes=1)
    publish(folder, 0)
    tensors = make_tensors(0) | {"norm": torch.zeros(8).bfloat16()}
    manifest = folder.write(1, tensors)
    assert manifest.bytes_written == 16
    assert_same(read(tmp_path, 1)[1], tensors)
    assert folder.write(2, tensors).bytes_written == 0


def test_a_shard_kept_for_little_of_it_is_written_again(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path)
    tensors = {f"t{i}": torch.zeros(1000) for i in range(5)}
    folder.write(0, tensors)
    for version in range(1, 20):  # each version pins its shard with one tensor
        tensors = {name: tensor + (index >= version % 5) for index, (name, tensor) in enumerate(tensors.items())}
        folder.write(version, tensors)
        folder.make_current(version)
        assert_same(read(tmp_path)[1], tensors)
        assert shard_bytes(tmp_path) < 2 * (version_folder.MOST_WASTE + 1) * 20_000


def test_old_versions_go_but_never_the_current_one_the_newest_or_one_that_is_being_read(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path)
    first = publish(folder, 0)
    with reading(tmp_path) as manifest:
        for version in (1, 2, 3):
            publish(folder, version)
        assert_same(dict(StoredTensors(tmp_path, manifest)), first)
    folder.write(4, make_tensors(4))
    folder.write(5, make_tensors(5))
    assert sorted(path.stem for path in (tmp_path / "versions").iterdir()) == ["000003", "000005"]
    assert current_version(tmp_path) == 3
    assert shard_bytes(tmp_path) < 10_000
    with pytest.raises(RunFolderError, match="no version 0"):
        read(tmp_path, 0)


class KilledError(Exception):
    """Stands for the end of the process."""


def test_a_crash_at_any_moment_leaves_the_old_version_or_the_new_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, moment = set(), 0
    while True:
        path = tmp_path / str(moment)
        publish(before := VersionFolder(path, shard_bytes=500), 1)
        before.close()
        folder, left = VersionFolder(path, shard_bytes=500), moment

        def maybe_killed() -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError

        def watched(name: str) -> None:
            real = getattr(os if name == "fsync" else Path, name)

            def wrapped(*args: object, **kwargs: object) -> object:
                maybe_killed()
                return real(*args, **kwargs)

            monkeypatch.setattr(os if name == "fsync" else Path, name, wrapped)

        for name in ("fsync", "replace", "unlink", "open"):
            watched(name)
        try:
            publish(folder, 2)
            is_done = True
        except KilledError:
            is_done = False
        monkeypatch.undo()
        folder.close()
        version, found = read(path)
        assert_same(found, make_tensors(version))
        seen.add(version)
        publish(again := VersionFolder(path), 2)
        again.close()
        assert_same(read(path)[1], make_tensors(2))  # who comes next can go on, with the same version
        assert not list(path.rglob("*.part"))
        assert shard_bytes(path) < 10_000
        if is_done:
            break
        moment += 1
    assert seen == {1, 2}
    assert moment > 10


def test_bytes_that_changed_on_the_disk_are_noticed(tmp_path: Path) -> None:
    publish(VersionFolder(tmp_path), 0)
    [shard] = (tmp_path / "shards").iterdir()
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(RunFolderError, match=r"damaged: .* is not what was written"):
        read(tmp_path)
    shard.write_bytes(content[:100])
    with pytest.raises(RunFolderError, match="damaged"):
        read(tmp_path)


def test_two_writers_of_one_folder_are_refused_and_an_empty_one_says_so(tmp_path: Path) -> None:
    folder = VersionFolder(tmp_path)
    with pytest.raises(RunFolderError, match="another process writes"):
        VersionFolder(tmp_path)
    with pytest.raises(RunFolderError, match="no version of the weights"):
        read(tmp_path)
    folder.close()
    VersionFolder(tmp_path)


def test_packed_tensors_are_safetensors_and_anything_else_is_refused() -> None:
    tensors = make_tensors(3)
    body = b"".join(pack(tensors, {"version": "3"}))
    assert_same(unpack(body), tensors)
    assert digests(unpack(body)) == digests(tensors)
    for wrong in (b"", b"\x80\x04N.", body[:-1], b"\xff" * 100):
        with pytest.raises(ModelError, match="no safetensors"):
            unpack(wrong)
