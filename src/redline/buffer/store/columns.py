"""The columns of the stored sequences, one row each, and the buffers that Arrow keeps them in. Most attempts are one sequence.

A column is one node, or several where it is nested, and a node has up to three buffers: which values are there, where each
begins, and the values. Groups are written node by node, straight from the engine's arrays, and checked node by node when they
are read back: the same nodes, the same checksum.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import pyarrow as pa

from redline.types import Trajectory, TrajectoryGroup, Turn

SECONDS = ("environment_s", "prompt_s", "queue_s", "prefill_s", "decode_s", "parse_s")
"""Seconds of a turn, in the order in which they pass: `types.Turn` says what each is."""
TURN = pa.schema(
    [
        *((name, pa.int32()) for name in ("start", "end", "oldest_version", "newest_version")),
        ("finish_reason", pa.string()),
        ("tool_calls", pa.string()),
        ("switches", pa.string()),
        *((name, pa.float32()) for name in SECONDS),
    ]
)
"""One reply of the policy. `tool_calls` is JSON: a list of name and arguments, or of what is wrong with a call, or empty.
`switches` is JSON as well, empty where one version sampled all of it: `types.Turn` says what it is."""
SCHEMA = pa.schema(
    [
        ("version", pa.int64()),
        ("checksum", pa.uint32()),
        ("group", pa.int64()),
        ("sequence", pa.int32()),
        ("attempt", pa.int32()),
        ("role", pa.string()),
        ("truncated", pa.uint8()),
        ("retries", pa.uint8()),
        ("score_s", pa.float32()),
        ("task_id", pa.string()),
        ("advantage", pa.float32()),
        ("reward", pa.float32()),
        ("reward_parts", pa.list_(pa.struct([("name", pa.string()), ("value", pa.float32())]))),  # `datasets` knows no maps
        ("finish_reason", pa.string()),
        ("oldest_version", pa.int64()),
        ("newest_version", pa.int64()),
        ("begun_version", pa.int64()),
        ("turns", pa.list_(pa.struct(list(TURN)))),
        ("failure", pa.string()),
        ("text", pa.string()),
        ("loss_mask", pa.large_list(pa.uint8())),  # Arrow packs booleans into bits, and a view of bits is no NumPy array
        ("token_ids", pa.large_list(pa.int32())),
        ("logprobs", pa.large_list(pa.float32())),
        ("routing", pa.large_list(pa.uint8())),  # `types.Trajectory` says what it is, here without its rows; empty for None
    ]
)
"""The large columns come last: a file that is cut there has lost only what lies behind the cut."""


class Mark(IntEnum):
    """What stands in `version` where there is no step that trained on the attempt."""

    WAITING = -1
    DROPPED = -2
    FORGOTTEN = -3
    """Sampled by a policy that a resumed run went back behind; the group was to be attempted again."""


@dataclass(slots=True, frozen=True)
class Node:
    """One array of Arrow's layout, its buffers as NumPy has them."""

    length: int
    values: np.ndarray | None = None
    """Values of a fixed width, or uint8: the characters of all strings."""
    lengths: np.ndarray | None = None
    """int64[length]: of each list or string; on disk their running sum, one more and from 0."""
    offset_bytes: int = 0
    """Width of those sums on disk: 4 or 8."""
    valid: np.ndarray | None = None
    """bool[length], of the one column that may hold nulls."""

    @property
    def num_nulls(self) -> int:
        return 0 if self.valid is None else int(np.count_nonzero(~self.valid))

    @property
    def buffers(self) -> list[np.ndarray]:
        """What there is of it, for checksums; validity only where something is null, as Arrow itself has it."""
        valid = self.valid if self.num_nulls else None
        return [array for array in (self.lengths, self.values, valid) if array is not None]


# ── groups → nodes ─────────────────────────────────────────────────────────────────────────────────────────────────────


def group_nodes(groups: Sequence[TrajectoryGroup], begun_versions: Sequence[int]) -> list[Node]:
    """One group after the other; in the order of `SCHEMA`, depth first."""
    rows = [t for group in groups for t in group.trajectories]
    sizes = np.array([len(group.trajectories) for group in groups], dtype=np.int64)
    ends = np.cumsum(sizes)
    lengths = np.array([len(t.token_ids) for t in rows], dtype=np.int64)
    sequence = (np.arange(len(rows)) - np.repeat(ends - sizes, sizes)).astype(np.int32)
    routing = [np.zeros(0, np.uint8) if t.routing is None else t.routing.ravel() for t in rows]
    versions = np.array([(t.versions.oldest, t.versions.newest) for t in rows], dtype=np.int64)
    columns: list[_ColumnNodes] = [
        _fixed(np.repeat(np.array([group.index for group in groups], dtype=np.int64), sizes)),
        _fixed(sequence),
        _fixed(np.array([i if t.attempt is None else t.attempt for t, i in zip(rows, sequence, strict=True)], dtype=np.int32)),
        (_strings([t.role for t in rows]),),
        _fixed(np.array([t.truncated for t in rows], dtype=np.uint8)),
        _fixed(np.array([min(t.retries, 255) for t in rows], dtype=np.uint8)),
        _fixed(np.array([t.score_s for t in rows], dtype=np.float32)),
        (_strings([group.task_id for group in groups for _ in group.trajectories]),),
        _fixed(_flat([group.advantages for group in groups], np.float32)),
        _fixed(np.array([t.reward for t in rows], dtype=np.float32)),
        _parts(rows),
        (_strings([str(t.finish_reason) for t in rows]),),
        *(_fixed(np.ascontiguousarray(column)) for column in versions.T),
        _fixed(np.repeat(np.array(begun_versions, dtype=np.int64), sizes)),
        _turns([t.turns or chosen_turns(t) for t in rows]),
        (_strings([_failure(t) for t in rows], nullable=True),),
        (_strings([t.text for t in rows]),),
        _list(lengths, 8, _flat([t.loss_mask for t in rows], np.bool_).view(np.uint8)),
        _list(lengths, 8, _flat([t.token_ids for t in rows], np.int32)),
        _list(lengths, 8, _flat([t.logprobs for t in rows], np.float32)),
        _list(np.array([len(r) for r in routing], dtype=np.int64), 8, _flat(routing, np.uint8)),
    ]
    [version] = _fixed(np.full(len(rows), Mark.WAITING, dtype=np.int64))
    [sums] = _fixed(np.repeat(_checksums(columns, [0, *ends.tolist()]), sizes))
    return [version, sums, *(node for column in columns for node in column)]


_ColumnNodes = tuple[Node, ...]
"""A column: the node of its rows, and those of what is in its lists."""


def _fixed(values: np.ndarray) -> _ColumnNodes:
    return (Node(len(values), values),)


def _parts(rows: Sequence[Trajectory]) -> _ColumnNodes:
    parts = [pair for t in rows for pair in t.reward_parts.items()]
    num_parts = np.array([len(t.reward_parts) for t in rows], dtype=np.int64)
    return (
        *(Node(len(rows), lengths=num_parts, offset_bytes=4), Node(len(parts))),
        *(_strings([name for name, _ in parts]), *_fixed(np.array([value for _, value in parts], dtype=np.float32))),
    )


def _turns(turns_of_rows: Sequence[Sequence[Turn]]) -> _ColumnNodes:
    turns = [turn for turns in turns_of_rows for turn in turns]
    num_turns = np.array([len(turns) for turns in turns_of_rows], dtype=np.int64)
    places = np.array([(t.start, t.end, t.versions.oldest, t.versions.newest) for t in turns], dtype=np.int32).reshape(-1, 4)
    seconds = np.array([[getattr(t, name) for name in SECONDS] for t in turns], dtype=np.float32).reshape(-1, len(SECONDS))
    return (
        *(Node(len(num_turns), lengths=num_turns, offset_bytes=4), Node(len(turns))),
        *(Node(len(turns), np.ascontiguousarray(column)) for column in places.T),
        _strings([str(turn.finish_reason) for turn in turns]),
        _strings([_calls(turn) for turn in turns]),
        _strings([json.dumps(list(turn.switches)) if turn.switches else "" for turn in turns]),
        *(Node(len(turns), np.ascontiguousarray(column)) for column in seconds.T),
    )


def chosen_turns(row: Trajectory) -> list[Turn]:
    """Runs of tokens that the policy chose, for a sequence that does not say its turns: the versions are the sequence's, the
    seconds 0."""
    edges = np.flatnonzero(np.diff(row.loss_mask.astype(np.int8), prepend=0, append=0)).tolist()
    return [
        Turn("", start, end, row.versions, row.finish_reason, queue_s=0.0, prefill_s=0.0, decode_s=0.0)
        for start, end in zip(edges[::2], edges[1::2], strict=True)
    ]


def _calls(turn: Turn) -> str:
    """JSON of what the reply called."""
    if not turn.tool_calls and not turn.problem:
        return ""
    calls = [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.tool_calls]
    return json.dumps([*calls, *([{"problem": turn.problem}] if turn.problem else [])], ensure_ascii=False, default=str)


def _failure(attempt: Trajectory) -> str | None:
    return str(attempt.failure) if attempt.failure else None


def _list(lengths: np.ndarray, offset_bytes: int, values: np.ndarray) -> _ColumnNodes:
    return Node(len(lengths), lengths=lengths, offset_bytes=offset_bytes), Node(len(values), values)


def _strings(texts: Sequence[str | None], *, nullable: bool = False) -> Node:
    # A model may say half a surrogate pair, which UTF-8 has no bytes for.
    encoded = [(text or "").encode(errors="replace") for text in texts]
    lengths = np.array([len(text) for text in encoded], dtype=np.int64)
    valid = np.array([text is not None for text in texts]) if nullable else None
    return Node(len(texts), np.frombuffer(b"".join(encoded), dtype=np.uint8), lengths, 4, valid)


def _flat(arrays: Sequence[np.ndarray], dtype: type[np.generic]) -> np.ndarray:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype=dtype)


# ── rows of a record batch → nodes ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(slots=True, frozen=True)
class _Column:
    """An array of a record batch, and the arrays inside it."""

    values: np.ndarray | None
    offsets: np.ndarray | None
    bits: np.ndarray | None
    """uint8: validity, the first row lowest; None where nothing is null."""
    inside: tuple[_Column, ...]

    @classmethod
    def of(cls, array: pa.Array) -> _Column:
        kind, buffers = array.type, [np.frombuffer(buffer or b"", dtype=np.uint8) for buffer in array.buffers()]
        bits = buffers[0] if array.null_count else None
        if pa.types.is_struct(kind):
            return cls(None, None, bits, tuple(cls.of(array.field(i)) for i in range(kind.num_fields)))
        if pa.types.is_primitive(kind):
            return cls(_viewed(buffers[1], kind.to_pandas_dtype()), None, bits, ())
        offsets = _viewed(buffers[1], np.int64 if pa.types.is_large_list(kind) else np.int32)
        if pa.types.is_string(kind):
            return cls(buffers[2], offsets, bits, ())
        return cls(None, offsets, bits, (cls.of(array.values),))

    def nodes(self, first: int, last: int) -> Iterator[Node]:
        length, lengths, width = last - first, None, 0
        valid = None if self.bits is None else _unpacked(self.bits, first, last)
        if self.offsets is not None:
            offsets, width = _taken(self.offsets, first, last + 1).astype(np.int64), self.offsets.itemsize
            lengths, first, last = np.diff(offsets), int(offsets[0]), int(offsets[-1])
            if (lengths < 0).any():
                raise ValueError("offsets that fall")
        yield Node(length, None if self.values is None else _taken(self.values, first, last), lengths, width, valid)
        for column in self.inside:
            yield from column.nodes(first, last)


class Rows:
    """The attempts in a record batch, to be compared with their checksums."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self._columns = {name: _Column.of(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}

    def values(self, name: str) -> np.ndarray:
        """The values of a column of a fixed width, nulls included."""
        values = self._columns[name].values
        assert values is not None
        return values[: self.batch.num_rows]

    def nodes(self, first: int, last: int) -> list[Node]:
        """The nodes of the rows from `first` up to `last`. Raises ValueError where damage left an offset to nowhere."""
        return [node for column in self._columns.values() for node in column.nodes(first, last)]

    def is_intact(self, first: int, last: int) -> bool:
        """Whether these rows are one group as it was written."""
        if not 0 <= first < last <= self.batch.num_rows:
            return False
        try:
            _, sums, *nodes = self.nodes(first, last)
        except ValueError:
            return False
        return bool(sums.values is not None and (sums.values == checksum(nodes)).all())


def _viewed(buffer: np.ndarray, dtype: type[np.generic]) -> np.ndarray:
    """As many whole values as there are; damage may have taken a part of one."""
    width = np.dtype(dtype).itemsize
    return buffer[: len(buffer) // width * width].view(dtype)


def _unpacked(bits: np.ndarray, first: int, last: int) -> np.ndarray:
    return np.unpackbits(_taken(bits, first // 8, -(-last // 8)), bitorder="little")[first % 8 :][: last - first].astype(bool)


def _taken(array: np.ndarray, first: int, last: int) -> np.ndarray:
    if not 0 <= first <= last <= len(array):
        raise ValueError(f"values {first} up to {last} of {len(array)}")
    return array[first:last]


# ── checksums ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def checksum(nodes: Iterable[Node]) -> int:
    """CRC-32 of everything in a group but `version`, which changes, and the checksum itself."""
    crc = 0
    for node in nodes:
        for array in node.buffers:
            crc = zlib.crc32(array.data, crc)
    return crc


def _checksums(columns: Iterable[_ColumnNodes], bounds: Sequence[int]) -> np.ndarray:
    """uint32[groups]: the `checksum` of each, whose rows are those between two bounds."""
    crcs = [0] * (len(bounds) - 1)
    for column in columns:
        here = bounds
        for node in column:
            inside = here if node.lengths is None else np.concatenate([[0], np.cumsum(node.lengths)])[here].tolist()
            for i in range(len(crcs)):  # each in the order of `Node.buffers`
                rows = slice(here[i], here[i + 1])
                if node.lengths is not None:
                    crcs[i] = zlib.crc32(node.lengths[rows].data, crcs[i])
                if node.values is not None:
                    crcs[i] = zlib.crc32(node.values[inside[i] : inside[i + 1]].data, crcs[i])
                if node.valid is not None and not node.valid[rows].all():
                    crcs[i] = zlib.crc32(node.valid[rows].data, crcs[i])
            if node.values is None:  # a list or a struct, and the nodes after it are what is in it
                here = inside
    return np.array(crcs, dtype=np.uint32)
