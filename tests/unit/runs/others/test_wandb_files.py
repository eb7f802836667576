"""W&B's file of a run, as wandb itself wrote it: read whole, cut short and damaged."""

from __future__ import annotations

import random
import struct
import zlib
from pathlib import Path

from support.other_logs import RECORDED

from redline.runs.others.wandb_files import read_wandb

WANDB = RECORDED / "run-tiny.wandb"


def test_history_and_settings_are_those_of_the_run() -> None:
    log = read_wandb(WANDB)
    assert log.damage == ""
    assert log.config["num_generations"] == 4
    assert {"train/reward", "train/global_step", "eval/reward"} <= log.names
    assert any(name.startswith("profiling/Time taken: GRPOTrainer.") for name in log.names)
    times = [row.time for row in log.rows if row.time is not None]
    assert times == sorted(times)
    assert times


def test_a_file_that_is_cut_anywhere_is_read_as_far_as_it_is_whole(tmp_path: Path) -> None:
    content, whole = WANDB.read_bytes(), read_wandb(WANDB).rows
    random.seed(2)
    for size in random.sample(range(7, len(content)), 8):
        (tmp_path / "cut.wandb").write_bytes(content[:size])
        log = read_wandb(tmp_path / "cut.wandb")
        assert log.rows == whole[: len(log.rows)]
        assert "damaged" not in log.damage


def test_a_flipped_bit_costs_a_block_and_never_becomes_a_figure(tmp_path: Path) -> None:
    content, whole = bytearray(WANDB.read_bytes()), read_wandb(WANDB).rows
    random.seed(3)
    for place in random.sample(range(7, len(content)), 8):
        content[place] ^= 16
        (tmp_path / "damaged.wandb").write_bytes(content)
        log = read_wandb(tmp_path / "damaged.wandb")
        assert all(row in whole for row in log.rows)
        content[place] ^= 16


def test_samples_of_a_gpu_have_our_names_and_units(tmp_path: Path) -> None:
    items = {"gpu.0.gpu": "87.5", "gpu.0.memoryAllocatedBytes": "1024", "gpu.1.powerWatts": "300", "disk.in": "1"}
    stamp = field(2, field(1, 1000) + field(2, 500_000_000))
    stats = stamp + b"".join(field(3, field(1, name.encode()) + field(16, value.encode())) for name, value in items.items())
    path = tmp_path / "run-x.wandb"
    path.write_bytes(struct.pack("<4sHB", b":W&B", 0xBEE1, 0) + piece(field(7, stats)))
    assert read_wandb(path).samples == (
        {"time": 1000.5, "gpu/0/utilization_percent": 87.5, "gpu/0/memory_used_bytes": 1024.0, "gpu/1/power_w": 300.0},
    )


def field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def piece(data: bytes) -> bytes:
    return struct.pack("<IHB", zlib.crc32(b"\1" + data), len(data), 1) + data
