"""A capture of half a gigabyte, in a process whose memory is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import kineto_files
from support.late_launches import Scenario

MEGABYTES = 500
PROGRAM = """
import resource, sys
from pathlib import Path
from redline.lab.traces.diagnosis import diagnose

before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
found = diagnose([Path(path) for path in sys.argv[1:]])
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(after - before, len(found.timeline.ranges), found.engines[0].causes[0].call, found.engines[0].lost.total)
"""


def write_large(folder: Path) -> tuple[list[Path], int]:
    """Write two ranks whose threads also record a great many short operations. Returns the files and the planted time."""
    recorded = Scenario(engines=1, ranks=2, steps=400).record()
    paths = []
    for pid, (_, rank) in recorded.ranks.items():
        path = folder / f"rank{rank}.json"
        *parts, tail = kineto_files.lines(recorded, pid, rank, 2)
        arguments = '"External id": 12,"Record function id": 0, "Ev Idx": 77, "Sequence number": 5'
        operation = kineto_files.event("cpu_op", "aten::add_", pid, pid + 7, 0, 0, arguments)
        before, after = operation.split('"ts": 500.000, "dur": 0.000')
        count = MEGABYTES * 2**20 // 2 // len(operation)
        end = max(call.end for call in recorded.calls if call.pid == pid) // 1000
        with path.open("w") as file:
            file.writelines(parts)
            file.writelines(f'{before}"ts": {500 + moment * end // count}.000, "dur": 0.900{after}' for moment in range(count))
            file.write(tail)
        paths.append(path)
    return paths, sum(recorded.packing[1:]) + sum(recorded.unpacking[1:])


@pytest.mark.slow
def test_half_a_gigabyte_is_read_in_bounded_memory(tmp_path: Path) -> None:
    paths, planted = write_large(tmp_path)
    size = sum(path.stat().st_size for path in paths)
    assert size >= MEGABYTES * 2**20
    done = subprocess.run([sys.executable, "-c", PROGRAM, *map(str, paths)], capture_output=True, text=True, check=True)
    kilobytes, ranges, call, lost = done.stdout.split()
    assert int(kilobytes) * 1024 < size
    assert int(ranges) > 1_000_000
    assert call == "pickle.loads"
    assert int(lost) == pytest.approx(planted, rel=0.2)
