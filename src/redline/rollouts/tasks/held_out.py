"""Which questions are kept for evaluation.

The split is by content: the same question is on the same side whatever the seed, the order or the number of times it is
drawn. A split by index would leak, since generators repeat themselves (two one-digit terms make only 200 sums).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from redline.errors import TaskError


def stable_hash(text: str) -> int:
    """64 bits that are the same in every process and on every machine, unlike Python's `hash`."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def is_held_out(text: str, fraction: float) -> bool:
    """The split of an endless source: `fraction` of all texts, judged one at a time."""
    return stable_hash(text) < fraction * 2**64


def held_out_count(num_distinct: int, fraction: float) -> int:
    """How many texts of a finite source are held out, those with the lowest hashes: floor(fraction · n), at least 1 and at most
    n - 1."""
    return min(max(int(fraction * num_distinct), 1), num_distinct - 1)


def split_held_out(texts: Iterable[str], fraction: float = 0.1) -> tuple[list[str], list[str]]:
    """Split questions into those to train on and those held out for evaluation, by their content: whatever the seed, the order
    or the duplicates, a question stays on its side. Both lists are sorted and hold each question once."""
    distinct = set(texts)
    if len(distinct) < 2 or not 0 < fraction < 1:
        raise TaskError(
            f"{len(distinct)} distinct questions cannot be split, {fraction:g} of them held out",
            "give at least two questions, and a fraction between 0 and 1",
        )
    by_hash = sorted(distinct, key=lambda text: (stable_hash(text), text))
    held_out = by_hash[: held_out_count(len(distinct), fraction)]
    return sorted(distinct - set(held_out)), sorted(held_out)
