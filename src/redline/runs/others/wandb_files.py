"""W&B's own file of a run (`run-ID.wandb`, in `offline-run-…` or `run-…`): a LevelDB log of protobuf records
(wandb/proto/wandb_internal.proto, wandb/sdk/internal/datastore.py).

    file     ":W&B" · magic u16 · version u8, then blocks of 32 KiB, the first of them with those seven bytes
    piece    CRC-32 of type and data u32 · length u16 · type u8 (whole, first, middle, last) · data
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from redline.errors import RunFolderError
from redline.runs.others import protobuf
from redline.runs.others.log import Log, Row, from_json, is_number

_HEADER = struct.pack("<4sHB", b":W&B", 0xBEE1, 0)
_BLOCK = 32768
_PIECE = struct.Struct("<IHB")
_WHOLE, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _CONFIG, _STATS, _RUN = 2, 5, 7, 17
"""Numbers of the records that we read."""
_JSON = 16
"""Number of the value of an item, in history, configuration and statistics alike."""
_GPU = {
    "gpu": ("utilization_percent", 1.0),
    "memoryAllocatedBytes": ("memory_used_bytes", 1.0),
    "powerWatts": ("power_w", 1.0),
    "enforcedPowerLimitWatts": ("power_limit_w", 1.0),
    "temp": ("temperature_c", 1.0),
    "smClock": ("sm_clock_mhz", 1.0),
}
"""W&B's figure of a GPU → ours, and what to multiply it with."""
_HOST = {"proc.memory.rssMB": ("rss_bytes", 2.0**20)}
"""The same of the host."""


def read_wandb(path: Path) -> Log:
    """Read the history, the settings and the samples of a run. A file that is cut short, or damaged, is read as far as its
    pieces are whole; `damage` says so."""
    content = path.read_bytes()
    if content[: len(_HEADER)] != _HEADER:
        raise RunFolderError(f"{path}: not a W&B file of a version that we know", "give another log of the run")
    records = _Records(content)
    found = _Found()
    for record in records:
        try:
            found.take(record)
        except ValueError:
            records.num_bad += 1
    return Log(path, "W&B", tuple(found.rows), found.config, tuple(found.samples), records.damage)


class _Records:
    """The records of a file, put together from their pieces."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.num_bad = 0
        self._is_cut = False

    @property
    def damage(self) -> str:
        bad = f"{self.num_bad} of its records are damaged and left out" if self.num_bad else ""
        return "; ".join(filter(None, (bad, "it is cut short: its last record is not whole" if self._is_cut else "")))

    def __iter__(self) -> Iterator[bytes]:
        """Give each record that is whole. After a piece that is damaged, go on with the next block."""
        begun: bytes | None = None
        for kind, data in self._pieces():
            if kind in (_WHOLE, _FIRST):
                self.num_bad += begun is not None
                begun = data
            elif kind in (_MIDDLE, _LAST) and begun is not None:
                begun += data
            if kind == 0:
                self.num_bad += 1
                begun = None
            elif kind in (_WHOLE, _LAST) and begun is not None:
                yield begun
                begun = None
        self._is_cut |= begun is not None

    def _pieces(self) -> Iterator[tuple[int, bytes]]:
        """Give type and data of each piece; type 0 stands for what is damaged."""
        content, place = self._content, len(_HEADER)
        while place + _PIECE.size <= len(content):
            left = _BLOCK - place % _BLOCK
            if left < _PIECE.size:
                place += left
                continue
            crc, size, kind = _PIECE.unpack_from(content, place)
            data = content[place + _PIECE.size : place + _PIECE.size + size]
            if kind == 0 and crc == 0 and size == 0:  # a block that was made longer than it is filled
                place += left
            elif kind <= _LAST and size <= left - _PIECE.size and len(data) < size:
                self._is_cut = True
                return
            elif zlib.crc32(bytes([kind]) + data) == crc:
                place += _PIECE.size + size
                yield kind, data
            else:
                place += left
                yield 0, b""
        self._is_cut |= place < len(content)


class _Found:
    """Collects what the records hold."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.config: dict[str, Any] = {}
        self.samples: list[dict[str, float]] = []

    def take(self, record: bytes) -> None:
        for number, value in protobuf.fields(record):
            if number == _HISTORY:
                self._take_history(protobuf.message(value))
            elif number == _CONFIG:
                self._take_config(protobuf.message(value))
            elif number == _STATS:
                self._take_sample(protobuf.message(value))
            elif number == _RUN:
                for part, own in protobuf.fields(protobuf.message(value)):
                    if part == 4:
                        self._take_config(protobuf.message(own))

    def _take_history(self, record: bytes) -> None:
        """Add a row; `_step` counts calls of `wandb.log`, which is the step only where a framework says so itself."""
        found = dict(_items(record, 1))
        values = {name: float(value) for name, value in found.items() if is_number(value)}
        time, step = values.pop("_timestamp", None), values.pop("_step", None)
        for number, value in protobuf.fields(record):
            if number == 2 and step is None:
                step = dict(protobuf.fields(protobuf.message(value))).get(1)  # type: ignore[assignment]
        values.pop("_runtime", None)
        if values:
            self.rows.append(Row(values, None if step is None else int(step), time))

    def _take_config(self, record: bytes) -> None:
        for name, value in _items(record, 1):
            if name != "_wandb":
                self.config[name] = value["value"] if isinstance(value, dict) and value.keys() <= {"value", "desc"} else value

    def _take_sample(self, record: bytes) -> None:
        sample: dict[str, float] = {}
        for number, value in protobuf.fields(record):
            if number == 2:
                stamp = dict(protobuf.fields(protobuf.message(value)))
                sample["time"] = protobuf.integer(stamp.get(1, 0)) + protobuf.integer(stamp.get(2, 0)) / 1e9
        for name, value in _items(record, 3):
            if is_number(value) and (ours := _figure(name)):
                sample[ours[0]] = float(value) * ours[1]
        if "time" in sample and len(sample) > 1:
            self.samples.append(sample)


def _items(record: bytes, number: int) -> Iterator[tuple[str, Any]]:
    """Give the items of a record under a field: their names, with dots where they lie in others, and their values."""
    for each, value in protobuf.fields(record):
        if each != number:
            continue
        parts, content = list[str](), b"null"
        for part, own in protobuf.fields(protobuf.message(value)):
            if part in (1, 2):
                parts.append(protobuf.text(own))
            elif part == _JSON:
                content = protobuf.message(own)
        yield ".".join(filter(None, parts)), from_json(content)


def _figure(name: str) -> tuple[str, float] | None:
    """Return our name of a figure of the machine, and its factor; None for one that we have no name for."""
    if name in _HOST:
        ours, factor = _HOST[name]
        return f"host/{ours}", factor
    found = re.fullmatch(r"gpu\.(\d+)\.(\w+)", name)
    if found is None or found[2] not in _GPU:
        return None
    ours, factor = _GPU[found[2]]
    return f"gpu/{found[1]}/{ours}", factor
