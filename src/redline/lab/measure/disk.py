"""How fast files are written and mapped here. No side waits for the disk: what is written is in the page cache."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PROBE_BYTES = 1 << 26


@dataclass(slots=True, frozen=True)
class DiskRates:
    """Bytes per second, into the page cache and out of it."""

    write: float
    read: float

    @property
    def how(self) -> str:
        return (
            f"measured here: {self.write / 1e9:.2f} GB/s written to a file at once,"
            f" {self.read / 1e9:.2f} GB/s summed from a mapped one"
        )


def measure_disk(folder: Path) -> DiskRates:
    path, data = folder / "probe", np.ones(PROBE_BYTES // 4, dtype=np.int32)
    write_s, read_s = [], []
    for _ in range(5):
        started = time.perf_counter()
        with path.open("wb", buffering=0) as file:
            file.write(data.data)
        write_s.append(time.perf_counter() - started)
        started = time.perf_counter()
        np.memmap(path, dtype=np.int32, mode="r").sum(dtype=np.int64)
        read_s.append(time.perf_counter() - started)
        os.unlink(path)
    return DiskRates(PROBE_BYTES / min(write_s), PROBE_BYTES / min(read_s))
