"""Which program does what in attention over packed segments: lists of blocks, made once per batch and shared by all layers.

A query sees its segment's parent and then its segment up to itself. Seen from a key, with attempts directly behind their
prompt, its queries are one run: from the key itself to the end of the last segment that continues its own.

    packed tokens        [ prompt ][ A1 ][ A2 ]          keys of A2    [ prompt ] … [ A2 ]
    queries of a prompt  [ prompt ][ A1 ][ A2 ]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from redline.kernels.segments import NO_PARENT, Segments


@dataclass(slots=True, frozen=True)
class KeyBlocks:
    """The work of keys' gradients. One unit is a tile of queries with one query head."""

    parts: np.ndarray
    """int32[programs, 6], most work first: first key, end of its segment, end of its queries, first unit, end of units, and the
    slot for its sum, or -1 where a part is all there is."""
    sums: np.ndarray
    """int32[blocks in several parts, 4]: first key, end of its segment, first slot, end of slots."""
    num_slots: int


def children_follow(segments: Segments) -> bool:
    """Whether the segments that continue another one stand directly behind it, with nothing between them."""
    own, parents = np.arange(len(segments.parents)), segments.parents
    before = np.concatenate([[NO_PARENT], parents[:-1]])
    return bool(((parents == NO_PARENT) | (parents == own - 1) | (parents == before)).all())


def query_blocks(segments: Segments, size: int) -> np.ndarray:
    """int32[blocks, 5], most keys first: first query, first and end of its segment, the parent's first token and how many."""
    segment_B, first_B = _blocks(segments, size)
    begin_B, end_B = segments.offsets[:-1][segment_B], segments.offsets[1:][segment_B]
    parent_B = np.where(segments.parents == NO_PARENT, segments.offsets[:-1], segments.offsets[segments.parents])[segment_B]
    before_B = segments.parent_lengths[segment_B]
    keys_B = before_B + np.minimum(first_B + size, end_B) - begin_B
    order = np.argsort(-keys_B, kind="stable")
    return np.stack([first_B, begin_B, end_B, parent_B, before_B], axis=1)[order].astype(np.int32)


START, DIVIDED = 8, 4
"""Units that a program takes before and after its work, and more if that is only a part of a block: its sum is written and read
once more. With these, ends of programs follow what was measured (benchmarks/LOG.md)."""
SHARES = (0.4, 0.6, 0.7, 1.0, 1.1, 1.2, 1.35, 1.5)
"""Sizes of a part that are tried, in what each place has to do on average."""
MANY = 4
"""Blocks for each place from which on they need not be divided to end together."""


def part_size(units_B: np.ndarray, copies: int, places: int) -> int:
    """The most units of one program, so that the last program ends soonest. Every block is there `copies` times, programs run
    in as many `places` at once, and those with the most to do begin."""
    if not units_B.any():
        return 1
    mean = copies * units_B.sum() / places
    if copies * len(units_B) > MANY * places:
        return math.ceil(mean / 2)
    sizes = np.unique(np.ceil(mean * np.array(SHARES)).clip(1, units_B.max()).astype(np.int64))[::-1]
    return int(min(sizes, key=lambda most: _end(units_B, most, copies, places)))


def _end(units_B: np.ndarray, most: int, copies: int, places: int) -> float:
    """When the last program ends, in units. They are given out a round at a time, the longest to the one that is free first."""
    parts_B = -(-units_B // most)
    programs = np.sort(np.repeat(units_B / parts_B + START + DIVIDED * (parts_B > 1), copies * parts_B))[::-1]
    ends = np.zeros(places)
    for first in range(0, len(programs), places):
        given = programs[first : first + places]
        ends[: len(given)] += given
        ends.sort()
    return float(ends[-1])


def key_blocks(
    segments: Segments, size: int, query_size: int, heads: int, most_units: Callable[[np.ndarray], int]
) -> KeyBlocks:
    """Blocks of keys, those with more than `most_units` of all their units divided into parts. `heads` is how many query heads
    a key has."""
    segment_B, first_B = _blocks(segments, size)
    end_B, stop_B = segments.offsets[1:][segment_B], _ends_of_queries(segments)[segment_B]
    units_B = -(-(stop_B - first_B) // query_size) * heads
    parts_B = -(-units_B // most_units(units_B))
    block_P = np.repeat(np.arange(len(units_B)), parts_B)
    part_P = _within(parts_B)
    from_P, to_P = (units_B[block_P] * (part_P + i) // parts_B[block_P] for i in (0, 1))
    is_sum_B = parts_B > 1
    slots_B = np.where(is_sum_B, parts_B, 0)
    end_of_slots_B = np.cumsum(slots_B)
    first_slot_B = end_of_slots_B - slots_B
    slot_P = np.where(is_sum_B[block_P], first_slot_B[block_P] + part_P, -1)
    parts = np.stack([first_B[block_P], end_B[block_P], stop_B[block_P], from_P, to_P, slot_P], axis=1)
    sums = np.stack([first_B, end_B, first_slot_B, end_of_slots_B], axis=1)[is_sum_B]
    order = np.argsort(from_P - to_P, kind="stable")
    return KeyBlocks(parts[order].astype(np.int32), sums.astype(np.int32), int(slots_B.sum()))


def _blocks(segments: Segments, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The segment and the first token of every block of `size` tokens."""
    counts = -(-segments.lengths // size)
    segment_B = np.repeat(np.arange(len(counts)), counts)
    return segment_B, segments.offsets[:-1][segment_B] + _within(counts) * size


def _within(counts: np.ndarray) -> np.ndarray:
    """0 … count - 1 for each count, end to end."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _ends_of_queries(segments: Segments) -> np.ndarray:
    """Per segment, the end of the last one that sees its keys."""
    ends = segments.offsets[1:].copy()
    children = np.flatnonzero(segments.parents != NO_PARENT)
    np.maximum.at(ends, segments.parents[children], segments.offsets[1:][children])
    return ends
