"""`metrics.jsonl`: one JSON object per step, the step first, then `section/name_unit` keys in order."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from redline.telemetry.durable import drop_torn_line, replace_file


class MetricsLog:
    """Appends rows, each on disk before the call returns. Opening it repairs what a kill left torn."""

    def __init__(self, path: Path) -> None:
        self.path = path
        drop_torn_line(path)
        self._file = path.open("ab")

    def append(self, step: int, values: Mapping[str, Any]) -> dict[str, Any]:
        """Add the row of a step, and give it as written. A number that is not finite becomes null: JSON has no other word."""
        assert all("/" in key for key in values), f"metric keys are section/name_unit, not {sorted(values)}"
        row = {"step": step, **{key: _plain(values[key]) for key in sorted(values)}}
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")
        self._file.flush()
        return row

    def rewind(self, step: int, aside: Path | None = None) -> None:
        """Cut every row after `step`: a resumed run will write them again. With a folder `aside`, a file of the same name there
        keeps them."""
        kept, cut = list[bytes](), list[bytes]()
        with self.path.open("rb") as file:
            for line in file:
                (kept if json.loads(line)["step"] <= step else cut).append(line)
        if cut and aside is not None:
            replace_file(aside / self.path.name, b"".join(cut))
        self._file.close()
        replace_file(self.path, b"".join(kept))
        self._file = self.path.open("ab")

    @staticmethod
    def read(path: Path) -> Iterator[dict[str, Any]]:
        """The rows of a finished, killed or still running log; a last line without its newline is not a row yet."""
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    yield json.loads(line)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def _plain(value: Any) -> Any:
    """A JSON value: NumPy scalars become Python numbers, and numbers that are not finite become None."""
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value
