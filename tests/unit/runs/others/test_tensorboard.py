"""Event files of TensorBoard: written by tensorboardX, read by ours."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest
from tensorboardX import SummaryWriter

from redline.runs.others.tensorboard import read_events


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("events")
    with SummaryWriter(str(folder)) as writer:
        for step in range(1, 9):
            writer.add_scalar("timing_s/gen", step / 8, step, walltime=1000.0 + step)
            writer.add_scalar("critic/score/mean", -step, step, walltime=1000.0 + step)
        writer.add_text("notes", "not a scalar", 3)
        writer.add_histogram("lengths", [1, 2, 3], 3)
    return next(folder.glob("*tfevents*"))


def test_scalars_have_the_values_steps_and_times_that_were_written(written: Path) -> None:
    log = read_events(written)
    found = [(row.step, row.time, dict(row.values)) for row in log.rows]
    assert found[:2] == [(1, 1001.0, {"timing_s/gen": 0.125}), (1, 1001.0, {"critic/score/mean": -1.0})]
    assert len(found) == 16
    assert log.names == {"timing_s/gen", "critic/score/mean"}
    assert log.damage == ""


def test_a_file_that_is_cut_anywhere_is_read_as_far_as_it_is_whole(written: Path, tmp_path: Path) -> None:
    content, whole = written.read_bytes(), read_events(written).rows
    for size in (*range(0, 400, 7), len(content) - 1):
        cut = tmp_path / "cut.tfevents"
        cut.write_bytes(content[:size])
        log = read_events(cut)
        assert log.rows == whole[: len(log.rows)]
        assert size in frame_ends(content) or "cut short" in log.damage


def test_a_flipped_bit_never_becomes_a_figure(written: Path, tmp_path: Path) -> None:
    content, whole = bytearray(written.read_bytes()), read_events(written).rows
    random.seed(1)
    for place in random.sample(range(len(content)), 60):
        content[place] ^= 4
        damaged = tmp_path / "damaged.tfevents"
        damaged.write_bytes(content)
        log = read_events(damaged)
        assert all(row in whole for row in log.rows)
        assert log.damage
        content[place] ^= 4


def test_an_event_that_is_damaged_costs_itself_alone(written: Path, tmp_path: Path) -> None:
    content = bytearray(written.read_bytes())
    second = sorted(frame_ends(content))[1]
    content[second + 12 + 4] ^= 1
    damaged = tmp_path / "damaged.tfevents"
    damaged.write_bytes(content)
    log = read_events(damaged)
    assert len(log.rows) == 15
    assert log.damage == "1 of its events are damaged and left out"


def test_values_of_tensors_are_scalars_too(tmp_path: Path) -> None:
    event_file = pytest.importorskip("tensorboardX.event_file_writer")
    protos = pytest.importorskip("tensorboardX.proto.summary_pb2")
    event = pytest.importorskip("tensorboardX.proto.event_pb2")
    tensors = pytest.importorskip("tensorboardX.proto.tensor_pb2")
    values = [
        protos.Summary.Value(tag="listed", tensor=tensors.TensorProto(dtype=1, float_val=[0.5])),
        protos.Summary.Value(tag="raw", tensor=tensors.TensorProto(dtype=2, tensor_content=struct.pack("<d", 0.25))),
        protos.Summary.Value(tag="several", tensor=tensors.TensorProto(dtype=1, float_val=[1.0, 2.0])),
    ]
    writer = event_file.EventFileWriter(str(tmp_path))
    writer.add_event(event.Event(step=-1, summary=protos.Summary(value=values)))
    writer.close()
    [row] = read_events(next(tmp_path.glob("*tfevents*"))).rows
    assert (row.step, dict(row.values)) == (-1, {"listed": 0.5, "raw": 0.25})


def frame_ends(content: bytes) -> set[int]:
    """Where frames end, the beginning of the file among them."""
    place, ends = 0, {0}
    while place < len(content):
        place += 16 + struct.unpack_from("<Q", content, place)[0]
        ends.add(place)
    return ends
