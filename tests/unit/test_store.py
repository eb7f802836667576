from __future__ import annotations

import errno
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from fakes import group, trajectory

from redline.buffer import TrajectoryStore
from redline.types import Failure, FinishReason, TrajectoryGroup, VersionSpan


def read(path: Path) -> pa.Table:
    """As anyone would, with pyarrow alone."""
    with pa.memory_map(str(path)) as source:
        return pa.ipc.open_file(source).read_all()


def sampled_groups() -> list[TrajectoryGroup]:
    right = trajectory(
        [1, 2], [3, 4, 5], version=6, text="ünïcode 🙂\n", reward=1.25, reward_parts={"correct": 1.0, "format": 0.5}
    )
    cut = trajectory([1, 2], [9], version=5, versions=VersionSpan(5, 6), finish_reason=FinishReason.LENGTH, text="")
    failed = trajectory([7], [8, 8], version=6, failure=Failure("reward", "ValueError: no number"))
    return [
        TrajectoryGroup("sums/1", [right, cut], np.array([0.5, -0.5], dtype=np.float32)),
        TrajectoryGroup("sums/2", [failed], np.array([0.0], dtype=np.float32)),
    ]


def test_the_arrow_file_holds_what_was_sampled(tmp_path: Path) -> None:
    groups = sampled_groups()
    store = TrajectoryStore(tmp_path)
    store.write(6, groups)
    rows = read(store.path(6)).to_pylist()
    attempts = [(g, a, t) for g, group in enumerate(groups) for a, t in enumerate(group.trajectories)]
    assert len(rows) == len(attempts)
    for row, (g, a, attempt) in zip(rows, attempts, strict=True):
        assert (row["version"], row["group"], row["attempt"]) == (6, g, a)
        assert row["task_id"] == groups[g].task_id
        assert row["token_ids"] == attempt.token_ids.tolist()
        assert row["loss_mask"] == attempt.loss_mask.tolist()
        assert row["logprobs"] == attempt.logprobs.tolist()
        assert row["advantage"] == groups[g].advantages[a]
        assert row["reward"] == attempt.reward
        assert dict(row["reward_parts"]) == dict(attempt.reward_parts)
        assert row["finish_reason"] == attempt.finish_reason.value
        assert (row["oldest_version"], row["newest_version"]) == (attempt.versions.oldest, attempt.versions.newest)
        assert row["text"] == attempt.text
    assert [row["failure"] for row in rows] == [None, None, "reward: ValueError: no number"]


def test_the_offsets_on_disk_are_the_trainers(tmp_path: Path) -> None:
    """One layout from sampler to device: a list column is flat values and int64 offsets."""
    store = TrajectoryStore(tmp_path)
    store.write(0, sampled_groups())
    column = read(store.path(0))["token_ids"].chunk(0)
    assert np.asarray(column.offsets).tolist() == [0, 5, 8, 11]
    assert np.asarray(column.offsets).dtype == np.int64
    assert np.asarray(column.values).tolist() == [1, 2, 3, 4, 5, 1, 2, 9, 7, 8, 8]


def test_every_step_has_a_file_of_its_own(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path / "trajectories")
    for version in (0, 1, 12):
        store.write(version, [group([1.0, -1.0], version=version)])
    assert sorted(p.name for p in store.folder.iterdir()) == ["step-000000.arrow", "step-000001.arrow", "step-000012.arrow"]


def test_a_step_that_is_written_again_replaces_the_first(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    store.write(3, [group([1.0, -1.0], task_id="first")])
    store.write(3, [group([1.0, -1.0], task_id="second")])
    assert set(read(store.path(3))["task_id"].to_pylist()) == {"second"}


def test_rewinding_removes_the_steps_that_will_be_made_again(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    for version in range(5):
        store.write(version, [group([1.0, -1.0])])
    store.rewind(3)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000.arrow", "step-000001.arrow", "step-000002.arrow"]
    store.rewind(0)
    assert list(tmp_path.iterdir()) == []


def test_rewinding_leaves_a_strangers_files_alone(tmp_path: Path) -> None:
    store = TrajectoryStore(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    store.rewind(0)
    assert (tmp_path / "notes.txt").exists()


class FullDisk:
    """A table writer that dies half-way."""

    def __init__(self, sink: pa.NativeFile, schema: pa.Schema) -> None:
        self._sink = sink

    def __enter__(self) -> FullDisk:
        return self

    def __exit__(self, *_: object) -> None: ...

    def write_table(self, table: pa.Table) -> None:
        self._sink.write(b"ARROW1\0\0half of it")
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_file_that_is_only_partly_written_is_never_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TrajectoryStore(tmp_path)
    monkeypatch.setattr(pa.ipc, "new_file", FullDisk)
    with pytest.raises(OSError, match="No space left"):
        store.write(4, [group([1.0, -1.0])])
    assert list(tmp_path.glob("*.arrow")) == []
    monkeypatch.undo()
    store.write(4, [group([1.0, -1.0])])
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004.arrow"]
