"""What the machines of a run beside rank 0's did lately, for a page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from redline.telemetry.files.bounded import last_lines
from redline.telemetry.files.tail import parse_row

LATELY_BYTES = 1 << 16
"""The end of a file of samples that counts: a minute or so."""
MOST_MACHINES = 100


def machines_lately(hosts: Mapping[str, Path]) -> list[dict[str, Any]]:
    """One document for each machine that has samples: its name, the process that sampled it, when it last did, and means."""
    return [_lately(name, rows) for name, path in list(hosts.items())[:MOST_MACHINES] if (rows := _newest(path))]


def _newest(path: Path) -> list[dict[str, Any]]:
    try:
        lines = last_lines(path, LATELY_BYTES).splitlines(keepends=True)
    except OSError:
        return []
    return [row for line in lines if line.endswith(b"\n") and (row := parse_row(line)) is not None]


def _lately(name: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    gpus = sorted({key for row in rows for key in row if key.startswith("gpu/") and key.endswith("/utilization_percent")})
    return {
        "host": name,
        "process": str(rows[-1].get("process", "")),
        "time": rows[-1].get("time"),
        "cores": _mean(rows, ["host/cores"]),
        "cpu_percent": _mean(rows, ["host/machine_cpu_percent"]),
        "available_bytes": _mean(rows, ["host/available_bytes"]),
        "total_bytes": _mean(rows, ["host/total_bytes"]),
        "gpus": len(gpus),
        "gpu_percent": _mean(rows, gpus),
    }


def _mean(rows: Sequence[Mapping[str, Any]], keys: Sequence[str]) -> float | None:
    """The mean over all of these figures; None where there is none."""
    found = [row[key] for row in rows for key in keys if isinstance(row.get(key), int | float) and math.isfinite(row[key])]
    return statistics.fmean(found) if found else None
